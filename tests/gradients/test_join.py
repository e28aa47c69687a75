"""Ranks with different numbers of batches, inside `join`, train like the plain loop over all batches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer, clip_grad_norm_

from ..support.machine.hosts import HOSTS
from ..support.narrowed import BF16, Narrowed
from ..support.plain import assert_same_bits, assert_same_model
from ..support.programs import _BUILDING
from ..support.sockets import meet

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3, "3, in common memory"])
COUNTS = ((3, 1), (1, 4), (0, 2), (2, 2), (1, 0, 3), (2, 5, 3))


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.5 - number, 0.75, parameter.numel()).view(parameter.shape))
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2 + (step + rank) % 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a sum over tokens."""
    loss: Tensor = model(x).float().square().sum()
    return loss


def among(stage: int | str, transport: Transport) -> dict[str, Any]:
    """Return the optimizer's arguments that say how ranks are connected."""
    if stage == "3, in common memory":
        return {"stage": 3, "process_group": Transport(meet(transport))}
    return {"stage": stage, "process_group": transport}


def plain(counts: tuple[int, ...], precision: MixedPrecision | None, scheduled: bool) -> tuple[nn.Module, list[Tensor]]:
    model = small()
    numbers = Narrowed(model, precision)
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if scheduled else 1.0)
    norms = []
    for step in range(max(counts)):
        total: dict[int, Tensor] = {}
        xs = [batch(step, rank) for rank, count in enumerate(counts) if step < count]
        for x in xs:
            loss_of(model, x if precision is None else x.to(precision.param_dtype)).backward()
            for index, p in enumerate(model.parameters()):
                assert p.grad is not None
                gradient = numbers.travelling(p.grad)
                total[index] = total[index] + gradient if index in total else gradient.clone()
            model.zero_grad()
        tokens = sum(len(x) for x in xs)
        numbers.show([total[index] / tokens for index in range(len(total))])
        norms.append(clip_grad_norm_(numbers.held, 0.5))
        numbers.step(optimizer)
        optimizer.zero_grad()
        scheduler.step()
    return model, norms


def train(counts: tuple[int, ...], scheduled: bool) -> Callable[[nn.Module, ZeroOptimizer], list[Tensor]]:
    def run(model: nn.Module, optimizer: ZeroOptimizer) -> list[Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if scheduled else 1.0)
        norms = []
        with optimizer.join():
            for step in range(counts[optimizer.rank]):
                x = batch(step, optimizer.rank)
                loss_of(model, x).backward()
                optimizer.divisor = optimizer.sum_over_ranks(len(x))
                norms.append(optimizer.clip_grad_norm_(0.5))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        return norms

    return run


@pytest.mark.parametrize("precision", [None, MixedPrecision(BF16)])
@pytest.mark.parametrize("counts", COUNTS)
@STAGES
@pytest.mark.by_default("2-counts0-None", "1-counts2-precision1", "3, in common memory-counts0-precision1")
def test_training_is_that_of_the_plain_loop_over_the_union(
    stage: int | str, counts: tuple[int, ...], precision: MixedPrecision | None
) -> None:
    """With tokens counted over all ranks, a clip, and a schedule that the ranks with batches follow."""
    expected, norms = plain(counts, precision, scheduled=True)

    def program(transport: Transport) -> tuple[nn.Module, list[Tensor]]:
        model = small()
        optimizer = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            lr=0.05,
            **among(stage, transport),
            bucket_cap_mb=1e-4,
            mixed_precision=precision,
        )
        seen = train(counts, scheduled=True)(model, optimizer)
        optimizer.check_replicas()
        optimizer.close()
        return model, seen

    for rank, (model, seen) in enumerate(on_threads(len(counts), program, timeout=10)):
        assert_same_model(model, expected)
        assert len(seen) == counts[rank]
        for ours, theirs in zip(seen, norms, strict=False):
            assert_same_bits(ours, theirs)


@STAGES
def test_a_rank_that_left_makes_every_call_of_the_others(stage: int | str) -> None:
    def program(transport: Transport) -> list[Any]:
        model = small()
        model.register_buffer("mean", torch.full((2,), float(transport.rank)))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, **among(stage, transport))
        model.mean.fill_(transport.rank)  # type: ignore[operator, union-attr]
        seen: list[Any] = []
        with optimizer.join():
            if transport.rank == 0:
                for _ in range(2):
                    loss_of(model, batch(0, 0)).backward()
                    seen.append(optimizer.full_grad(model[0].weight))
                    with optimizer.gathered(model[0].weight, write=True):
                        model[0].weight.data.mul_(2)
                    with optimizer.gathered():
                        pass
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                    seen.append(optimizer.check_replicas())
                    seen.append(optimizer.full_master(model[2].bias))
                    optimizer.broadcast_buffers()
                    optimizer.consolidate_state_dict(0)
                    seen.append(optimizer.sum_over_ranks(0.25))
                    assert optimizer.exchange(b"x") == [b"x", b""]
        optimizer.check_replicas()
        return [seen, model.mean]

    (seen, _), (nothing, mean) = on_threads(2, program, timeout=10)
    assert nothing == []
    assert mean.tolist() == [0, 0]
    assert len(seen) == 8
    assert seen[3] == 0.25


@pytest.mark.parametrize("overflow", [False, True])
@STAGES
@pytest.mark.by_default("0-False", "3-False")
def test_a_scaler_works_where_a_rank_left(stage: int | str, overflow: bool) -> None:
    def step(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
        loss = loss_of(model, batch(0, 0))
        scaler.scale(loss / 0 if overflow else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, divisor=1, **among(stage, transport))
        with optimizer.join():
            if transport.rank == 1:
                step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0))
        optimizer.close()
        return model

    expected = small()
    step(expected, torch.optim.SGD(expected.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0))
    for model in on_threads(2, program, timeout=10):
        assert_same_model(model, expected)


def test_at_stage_0_means_are_shown_before_and_after_join_and_not_inside() -> None:
    """A loop's change of them would be missing on ranks that have run out of batches."""

    def program(transport: Transport) -> None:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, process_group=transport)
        loss_of(model, batch(0, 0)).backward()
        weight = model[0].weight
        assert weight.grad is not None
        mean = weight.grad.clone()
        with optimizer.join():
            if transport.rank == 0:
                with pytest.raises(RuntimeError, match="full_grad"):
                    weight.grad.mul_(2)
                whole = optimizer.full_grad(weight)
                assert whole is not None
                assert_same_bits(whole, mean)
        assert weight.grad is not None
        assert_same_bits(weight.grad, mean)

    on_threads(2, program, timeout=10)


def test_ranks_that_call_different_things_are_told_on_every_rank() -> None:
    def program(transport: Transport) -> str:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=transport)

        def different() -> None:
            with optimizer.join():
                if transport.rank < 2:
                    optimizer.clip_grad_norm_(1.0 + transport.rank)

        with pytest.raises(RuntimeError, match="inside join") as caught:
            different()
        return str(caught.value)

    first, *others = on_threads(3, program, timeout=10)
    assert others == [first, first]
    assert re.search(r"rank 0 calls clip_grad_norm_\(\) and rank 1 .*max_norm.*1.0.*max_norm.*2.0", first)


def test_join_ends_with_an_exception() -> None:
    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.05, process_group=transport)
        with pytest.raises(KeyError, match="this loop"), optimizer.join():
            raise KeyError("this loop")
        train((1, 2), scheduled=False)(model, optimizer)
        optimizer.close()
        return model

    expected, _ = plain((1, 2), None, scheduled=False)
    for model in on_threads(2, program, timeout=10):
        assert_same_model(model, expected)


def test_options_that_a_rank_takes_over_keep_their_type() -> None:
    """A learning rate in a tensor stays that tensor, betas stay a tuple."""

    def program(transport: Transport) -> None:
        model = small()
        rate = torch.tensor(0.1)
        groups = [{"params": [p], "lr": rate, "betas": (0.9, 0.99)} for p in model.parameters()]
        optimizer = ZeroOptimizer(groups, torch.optim.AdamW, process_group=transport, module=model, foreach=False)
        with optimizer.join():
            if transport.rank == 0:
                loss_of(model, batch(0, 0)).backward()
                rate.fill_(0.25)
                for group in optimizer.param_groups:
                    group["betas"] = (0.5, 0.75)
                optimizer.step()
                optimizer.zero_grad()
        assert rate.item() == 0.25
        for group in optimizer.param_groups:
            assert group["lr"] is rate
            assert group["betas"] == (0.5, 0.75)

    on_threads(2, program, timeout=10)


def test_sums_over_ranks_are_exact_and_equal_everywhere() -> None:
    def program(transport: Transport) -> list[float]:
        optimizer = ZeroOptimizer(small(), torch.optim.SGD, lr=0.1, process_group=transport)
        with pytest.raises(TypeError, match=r"numbers, not tensor"):
            optimizer.sum_over_ranks(torch.ones(()))  # type: ignore[arg-type]
        big = optimizer.sum_over_ranks(2**60 + transport.rank)
        return [big, optimizer.sum_over_ranks([1e300, 1.0, -1e300][transport.rank])]

    assert on_threads(3, program, timeout=10) == [[3 * 2**60 + 3, 1.0]] * 3


def test_options_that_differ_between_ranks_are_an_error_that_names_them() -> None:
    def program(transport: Transport) -> str:
        model = small()
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = ZeroOptimizer(groups, torch.optim.SGD, lr=0.1, process_group=transport, module=model)
        loss_of(model, batch(0, 0)).backward()
        if transport.rank == 1:
            optimizer.param_groups[2]["lr"] = 0.2
        with pytest.raises(ValueError, match="'lr' of the param groups") as caught:
            optimizer.step()
        optimizer.param_groups[2]["lr"] = 0.2
        optimizer.step()  # no state was lost
        return str(caught.value)

    first, second = on_threads(2, program, timeout=10)
    assert first == second
    assert "between rank 0 and rank 1" in first


class Deep(nn.Module):
    """A model of several units, of which the next one is gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with _BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def trained_alone(make: Callable[[], nn.Module], counts: tuple[int, ...], by_all: tuple[int, ...]) -> nn.Module:
    """Train with the plain loop on the batches of ranks that have these numbers, and then in steps of all ranks."""
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (*range(max(counts)), *by_all):
        for rank, count in enumerate(counts):
            if step < count or step in by_all:
                loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("collective", ["pairwise", "ring", "two hosts"])
@pytest.mark.by_default("pairwise")
def test_units_that_travel_are_gathered_for_the_others_whatever_the_algorithm(collective: str) -> None:
    """Some algorithms complete a gather only when every rank has read."""
    counts = (2, 0, 1, 0, 3)

    def program(transport: Transport) -> nn.Module:
        model = seeded(Deep)
        optimizer = ZeroOptimizer(
            model,
            torch.optim.SGD,
            lr=0.1,
            stage=3,
            process_group=transport,
            collective=HOSTS.get(collective, collective),
            bucket_cap_mb=1e-4,
            divisor=1,
        )
        with optimizer.join():
            for step in range(counts[optimizer.rank]):
                loss_of(model, batch(step, optimizer.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return model

    expected = trained_alone(Deep, counts, ())
    models = on_threads(len(counts), program, timeout=10)
    for model in models:  # a ring adds in another order, the same on all ranks
        assert_same_model(model, models[0] if collective == "ring" else expected)


class Crossed(Deep):
    """A model that uses its units in another order than that of registration; the library learns it from a forward."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 2, 1, 3):
            x = torch.tanh(self.layers[number](x))
        return x


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("counts", [(1, 0, 0, 0), (0, 2, 1, 2)])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.by_default("False-counts0-True", "False-counts1-True")
def test_units_may_be_there_when_a_block_begins_and_when_a_rank_leaves_it(
    before: bool, counts: tuple[int, ...], reshard: bool | int
) -> None:
    """With forwards without a backward, before the block and when a rank has run out of batches; then all train on."""

    def program(transport: Transport) -> nn.Module:
        model = seeded(Crossed)
        optimizer = ZeroOptimizer(
            model,
            torch.optim.SGD,
            lr=0.1,
            stage=3,
            process_group=transport,
            bucket_cap_mb=1e-4,
            divisor=1,
            reshard_after_forward=reshard,
        )
        left = [loss_of(model, batch(0, 0))] if before else []
        with optimizer.join():
            for step in range(counts[optimizer.rank]):
                loss_of(model, batch(step, optimizer.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                left.append(loss_of(model, batch(0, 0)))
        for step in range(7, 9):
            loss_of(model, batch(step, optimizer.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    expected = trained_alone(Crossed, counts, (7, 8))
    for model in on_threads(len(counts), program, timeout=10):
        assert_same_model(model, expected)


@pytest.mark.parametrize("kind", ["a number", "numpy's", "a tensor", "a new key"])
def test_an_option_keeps_its_kind_on_the_way_to_a_rank_that_left(kind: str) -> None:
    """A step with a rate in fp32 has other bits than one with a Python float."""

    def set_rate(group: dict[str, Any], step: int) -> None:
        rate = 0.1 / (step + 3)
        if kind == "a new key":
            group["note"] = None
        group["lr"] = {"numpy's": np.float32(rate), "a tensor": torch.tensor(rate)}.get(kind, rate)

    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, divisor=1, foreach=False)
        with optimizer.join():
            for step in range(3 if transport.rank == 0 else 0):
                loss_of(model, batch(step, 0)).backward()
                set_rate(optimizer.param_groups[0], step)
                optimizer.step()
                optimizer.zero_grad()
        if kind == "a new key":
            assert optimizer.param_groups[0]["note"] is None
        optimizer.close()
        return model

    expected = small()
    optimizer = torch.optim.AdamW(expected.parameters(), foreach=False)
    for step in range(3):
        loss_of(expected, batch(step, 0)).backward()
        set_rate(optimizer.param_groups[0], step)
        optimizer.step()
        optimizer.zero_grad()
    for model in on_threads(2, program, timeout=10):
        assert_same_model(model, expected)


@STAGES
def test_calls_inside_gathered_and_in_hooks_of_a_step_are_made_by_who_left(stage: int | str) -> None:
    def program(transport: Transport) -> list[Any]:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, divisor=1, **among(stage, transport))
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.sum_over_ranks(2)))
        with optimizer.join():
            if transport.rank == 1:
                loss_of(model, batch(0, 0)).backward()
                with optimizer.gathered(model[0].weight, write=True):
                    seen.append(optimizer.full_grad(model[2].bias))
                    seen.append(optimizer.clip_grad_norm_(1.0))
                    model(batch(0, 0))
                    with torch.no_grad():
                        model[0].weight.mul_(2)
                optimizer.step()
                with optimizer.gathered(), torch.no_grad():
                    seen.append(optimizer.check_replicas())
                    model(batch(0, 0))
            stranger = optimizer.gathered(torch.ones(2))
            with pytest.raises(ValueError, match="not one of this optimizer's parameters"):
                stranger.__enter__()
        return seen

    nothing, seen = on_threads(2, program, timeout=10)
    assert nothing == []
    assert len(seen) == 4
    assert seen[2] == 2


def test_an_error_of_one_rank_inside_join_reaches_those_that_left_and_those_that_go_on() -> None:
    def program(transport: Transport) -> str:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=transport)

        def loop() -> None:
            with optimizer.join():
                if transport.rank == 1:
                    raise KeyError("a broken batch")
                if transport.rank == 0:
                    loss_of(model, batch(0, 0)).backward()
                    optimizer.step()

        begin = time.monotonic()
        with pytest.raises((KeyError, RuntimeError)) as caught:
            loop()
        assert time.monotonic() - begin < 5
        optimizer.zero_grad()
        loss_of(model, batch(0, transport.rank)).backward()
        optimizer.step()  # all ranks can continue
        optimizer.check_replicas()
        return str(caught.value)

    first, culprit, last = on_threads(3, program, timeout=10)
    assert first == last == "rank 1 left join() with an error: KeyError: 'a broken batch'"
    assert culprit == "'a broken batch'"


def test_what_changes_the_layout_is_refused_inside_join() -> None:
    optimizer = ZeroOptimizer(small(), torch.optim.SGD, lr=0.1)
    with optimizer.join():
        with pytest.raises(RuntimeError, match="inside join"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(RuntimeError, match="inside join"):
            optimizer.close()
    optimizer.close()


class CountsWhereItSteps(torch.optim.SGD):
    """An optimizer that counts in its groups, but only in steps with a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["params"]:
                group["counted"] = group.get("counted", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("2")
def test_what_a_class_keeps_in_its_groups_may_differ_between_ranks(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        groups = [{"params": [p], "whose": transport.rank, 3: "not a name"} for p in model.parameters()]
        optimizer = ZeroOptimizer(
            groups, CountsWhereItSteps, lr=0.1, stage=stage, process_group=transport, module=model
        )
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    on_threads(3, program, timeout=10)
