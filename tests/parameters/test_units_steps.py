"""The rest of a step at stage 3, with the plain loop's bits.

This covers `no_sync`, clipping, gradients and states read and loaded, added groups, copies, and several optimizers.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.cases import (
    INPUTS,
    LEARNING_RATE,
    TURNS,
    WORLD_SIZES,
    Batch,
    Block,
    Case,
    Net,
    assert_nothing_is_here,
    assert_parameters,
    assert_plain,
    batches_of,
    in_rounds,
    one_backward,
    plain_loop,
    sharded,
    train,
)
from ..support.plain import assert_same_bits, assert_same_states, share

STEPS = 3


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def divide(model: nn.Module, divisor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class SometimesPart(Net):
    """A model whose last block has a gradient only in odd steps."""

    step = 0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 3 if self.step % 2 else 2]:
            x = block(x)
        return x


def note_step(model: Any, step: int) -> None:
    model.step = step


def summed_by_rank(model: nn.Module, batches: Sequence[Batch], world_size: int) -> None:
    """Return p.grad as ranks under `no_sync` produce it: each rank's own sum first."""
    total: list[Tensor | None] = [None for _ in model.parameters()]
    for rank in range(world_size):
        model.zero_grad()
        in_rounds(one_backward, model, share(batches, rank, world_size))
        for number, gradient in enumerate(gradients(model)):
            mine = total[number]
            total[number] = gradient if mine is None else mine if gradient is None else mine + gradient
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient


@WORLD_SIZES
@pytest.mark.parametrize("synced", [0, 1])
def test_no_sync_adds_up_on_each_rank_first(world_size: int, synced: int) -> None:
    """With a last backward outside `no_sync`, and without one."""
    case = Case(SometimesPart, begin=note_step)
    plain = case.make()
    adam, expected = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE), []
    for step in range(STEPS):
        case.begin(plain, step)
        summed_by_rank(plain, batches_of(step, world_size), world_size)
        divide(plain, TURNS * world_size)
        adam.step()
        expected.append(parameters_of(plain))

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(STEPS):
            case.begin(model, step)
            own = share(batches_of(step, world_size), transport.rank, world_size)
            with optimizer.no_sync():
                in_rounds(one_backward, model, own[: len(own) - synced])
            in_rounds(one_backward, model, own[len(own) - synced :])
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_is_here(model, optimizer)
            with optimizer.gathered():
                assert_parameters(model, expected[step])

    on_threads(world_size, program, timeout=5)


@WORLD_SIZES
def test_clipping_divisor_and_gradients_are_the_plain_loops(world_size: int) -> None:
    case = Case(SometimesPart, begin=note_step)
    plain = case.make()
    adam = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    expected: list[tuple[list[Tensor | None], Tensor, dict[str, Tensor]]] = []
    for step in range(STEPS):
        case.begin(plain, step)
        in_rounds(one_backward, plain, batches_of(step, world_size))
        divide(plain, 3 + step)
        before, norm = gradients(plain), clip_grad_norm_(plain.parameters(), 0.05)
        adam.step()
        adam.zero_grad()
        expected.append((before, norm, parameters_of(plain)))

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step, (before, norm, after) in enumerate(expected):
            train(case, model, optimizer, step)
            optimizer.divisor = 3 + step
            found = [optimizer.full_grad(p) for p in model.parameters()]
            assert_same_bits(optimizer.clip_grad_norm_(0.05), norm, "norm")
            optimizer.step()
            optimizer.zero_grad()
            for (name, _), ours, theirs in zip(model.named_parameters(), found, before, strict=True):
                assert (ours is None) == (theirs is None), name
                if ours is not None and theirs is not None:
                    assert_same_bits(ours, theirs, name)
            assert_nothing_is_here(model, optimizer)
            with optimizer.gathered():
                assert_parameters(model, after)

    on_threads(world_size, program, timeout=5)


@WORLD_SIZES
@pytest.mark.by_default("1")
def test_states_go_from_stage_2_to_stage_3_and_back(world_size: int) -> None:
    """One step at each, passing on the optimizer's and the model's state dicts."""
    case, stages = Case(steps=4), (2, 3, 2, 3)
    _, expected = plain_loop(case, world_size)

    def program(transport: Transport) -> Any:
        weights, states = case.make().state_dict(), None
        for step, stage in enumerate(stages):
            model, optimizer = sharded(case, transport, stage=stage)
            with optimizer.gathered(write=True):
                model.load_state_dict(weights)
            if states is not None:
                optimizer.load_state_dict(states)
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered():
                assert_parameters(model, expected[step])
                weights = copy.deepcopy(model.state_dict())
            optimizer.consolidate_state_dict(to=world_size - 1)
            given = optimizer.state_dict() if transport.rank == world_size - 1 else None
            states = sent(optimizer, given)
        return states

    for states in on_threads(world_size, program, timeout=5):
        assert_same_states(states, states_of_plain(case, world_size))


def sent(optimizer: ZeroOptimizer, states: Any) -> Any:
    """Return on every rank the states of the one rank that has them."""
    buffer = io.BytesIO()
    if states is not None:
        torch.save(states, buffer)
    found = [data for data in optimizer.exchange(buffer.getvalue()) if data]
    return torch.load(io.BytesIO(found[0]), weights_only=True)


def states_of_plain(case: Case, world_size: int) -> dict[str, Any]:
    plain = case.make()
    adam = torch.optim.AdamW(plain.named_parameters(), lr=LEARNING_RATE)
    for step in range(case.steps):
        in_rounds(one_backward, plain, batches_of(step, world_size))
        divide(plain, TURNS * world_size)
        adam.step()
        adam.zero_grad()
    return adam.state_dict()


@WORLD_SIZES
def test_a_group_of_parameters_that_were_not_listed_before(world_size: int) -> None:
    """They were sharded from the beginning, and are updated from now on."""

    def later(model: Any, step: int) -> list[nn.Parameter]:
        return [list(model.blocks[1].parameters()), [model.blocks[0].inner.bias, model.embed.weight]][step - 1]

    def first(model: Any) -> list[nn.Parameter]:
        added = {id(p) for step in (1, 2) for p in later(model, step)}
        return [p for p in model.parameters() if id(p) not in added and p is not model.norm.bias]

    case = Case(groups=first)
    plain = case.make()
    adam, expected = torch.optim.AdamW(first(plain), lr=LEARNING_RATE), []
    for step in range(STEPS):
        if step:
            adam.add_param_group({"params": later(plain, step), "lr": 0.2})
        in_rounds(one_backward, plain, batches_of(step, world_size))
        divide(plain, TURNS * world_size)
        adam.step()
        plain.zero_grad()
        expected.append(parameters_of(plain))

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(STEPS):
            if step:
                model.zero_grad()  # unlisted parameters have gradients like any other tensor
                optimizer.add_param_group({"params": later(model, step), "lr": 0.2})
            train(case, model, optimizer, step)
            optimizer.step()
            model.zero_grad()
            assert_nothing_is_here(model, optimizer)
            with optimizer.gathered():
                assert_parameters(model, expected[step])
        optimizer.close()
        assert_parameters(model, expected[-1])
        assert_plain(model)

    on_threads(world_size, program, timeout=5)


@WORLD_SIZES
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_made_inside_gathered_is_a_plain_model_that_trains_alone(world_size: int, how: str) -> None:
    case = Case(steps=3)
    _, expected = plain_loop(case, world_size)

    def copied(model: nn.Module) -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded: nn.Module = torch.load(buffer, weights_only=False)
        return loaded

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(2):
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with optimizer.gathered():
                    twin = copied(model)
        assert_nothing_is_here(model, optimizer)
        assert_parameters(twin, expected[0])
        adam = torch.optim.SGD(twin.parameters(), lr=0.1)
        before = optimizer.traffic
        one_backward(twin, batches_of(1, 1)[0])
        adam.step()
        assert optimizer.traffic == before
        assert_parameters(twin, alone)
        train(case, model, optimizer, 2)
        optimizer.step()
        with optimizer.gathered():
            assert_parameters(model, expected[2])

    reference = case.make()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(expected[0][name])
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    one_backward(reference, batches_of(1, 1)[0])
    sgd.step()
    alone = parameters_of(reference)
    on_threads(world_size, program, timeout=5)


# -- two models -------------------------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 6), Block(), nn.Linear(6, INPUTS))


Pair = tuple[Any, Any]  # generator and discriminator


def adversarial_step(models: Pair, optimizers: Pair, batches: Sequence[Batch], finish: Any) -> None:
    """Run the discriminator's step, then the generator's, whose loss goes through the discriminator."""
    maker, judge = models
    for batch in batches:
        (judge(maker(batch.x).detach()).tanh().mean() - judge(batch.x).tanh().mean()).backward()
    finish(optimizers[1], judge)
    for batch in batches:
        (-judge(maker(batch.x)).tanh().mean()).backward()
    finish(optimizers[0], maker)
    judge.zero_grad()


@WORLD_SIZES
def test_two_optimizers_over_two_models_whose_graphs_meet(world_size: int) -> None:
    cases, batches = (Case(generator), Case()), [batches_of(step, world_size) for step in range(STEPS)]
    plains = tuple(case.make() for case in cases)
    adams = tuple(torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE) for plain in plains)

    def finish(optimizer: Any, model: nn.Module) -> None:
        divide(model, TURNS * world_size)
        optimizer.step()
        model.zero_grad()

    expected = []
    for step in range(STEPS):
        adversarial_step((plains[0], plains[1]), (adams[0], adams[1]), batches[step], finish)
        expected.append([parameters_of(plain) for plain in plains])

    def finish_sharded(optimizer: ZeroOptimizer, model: nn.Module) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def program(transport: Transport) -> None:
        pairs = [sharded(case, transport) for case in cases]
        models, optimizers = (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1])
        for step in range(STEPS):
            adversarial_step(models, optimizers, share(batches[step], transport.rank, world_size), finish_sharded)
            for number in (0, 1):
                assert_nothing_is_here(models[number], optimizers[number])
                with optimizers[number].gathered():
                    assert_parameters(models[number], expected[step][number])

    on_threads(world_size, program, timeout=5)
