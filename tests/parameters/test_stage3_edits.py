"""`gathered()` at stage 3, and edits in and around it: right on every rank, or an error on every rank and undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.core.parameter_specs import as_plain

from ..support.cases import Case, batches_of, one_backward, sharded
from ..support.cases import Net as CasesNet
from ..support.plain import assert_same_bits, assert_same_model
from ..support.small import blocks, with_sgd
from ..support.sockets import on_sockets
from ..test_errors import on_ranks
from .test_stage3_errors import INPUTS, error_of, plain, train, zero
from .wrong_moments import Net, loss_of

TOLD = "'blocks.1.weight' was edited while its unit was gathered"


def doubled(parameter: Tensor, times: float = 2) -> None:
    with torch.no_grad():
        parameter.mul_(times)


def plain_doubled(steps: int = 1) -> Net:
    """Return the plain loop's model after an edit."""
    model = Net()
    doubled(model.block(1).weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        train(model, optimizer)
    return model


def then_train(transport: Transport, act: Callable[[Net, ZeroOptimizer], Any]) -> tuple[Any, nn.Module]:
    """Return the result of an action on a rank, and the model after one further step."""
    model = Net()
    optimizer = zero(model, transport)
    found = act(model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer)
    optimizer.close()
    return found, model


def on_two(act: Callable[[Net, ZeroOptimizer], Any]) -> list[tuple[Any, nn.Module]]:
    return on_threads(2, lambda transport: then_train(transport, act), timeout=5)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_gathered_shows_what_was_asked_for_and_nothing_else() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[list[Tensor], list[str]]:
        first, _, other = model.first.weight, model.block(0).weight, model.block(1).weight
        with optimizer.gathered(first):
            one, hidden = first.detach().clone(), error_of(other.sum)
        with optimizer.gathered(p for p in (first, other, other)):
            several = other.detach().clone()
        with optimizer.gathered([]):
            nothing = error_of(first.sum)
        return [one, several], [hidden, nothing, error_of(first.sum)]

    for (values, messages), model in on_two(act):
        assert_same_bits(values[0], Net().first.weight)
        assert_same_bits(values[1], Net().block(1).weight)
        for name, message in zip(("blocks.1.weight", "first.weight", "first.weight"), messages, strict=True):
            assert f"'{name}' is released" in message
        assert_same_model(model, plain(1))


def test_gathered_of_a_stranger_names_it_and_holds_nothing() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> list[str]:
        strangers: list[Any] = [nn.Parameter(torch.ones(2, 5)), [model.first.weight, torch.ones(2, 5)]]
        return [
            error_of(lambda s=s, w=w: optimizer.gathered(s, write=w).__enter__()) for s in strangers for w in (0, 1)
        ]

    for messages, model in on_two(act):
        for message in messages:
            assert message == "ValueError: a tensor of shape (2, 5) is not one of this optimizer's parameters"
        assert_same_model(model, plain(1))


def test_a_forward_and_a_backward_inside_gathered_and_gathered_inside_a_forward_are_right() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> list[Tensor]:
        seen: list[Tensor] = []

        def look(*_: Any) -> None:
            with optimizer.gathered():
                seen.extend(p.detach().clone() for p in model.parameters())

        with model.blocks[1].register_forward_pre_hook(look):
            loss = loss_of(model, INPUTS)
        with optimizer.gathered():
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered():
            torch.autograd.backward(loss_of(model, INPUTS))
        optimizer.step()
        return seen

    for seen, model in on_two(act):
        for value, expected in zip(seen, Net().parameters(), strict=True):
            assert_same_bits(value, expected)
        assert_same_model(model, plain(3))


def test_a_model_is_called_with_other_parameters() -> None:
    def act(model: nn.Module, optimizer: Any) -> tuple[Tensor, Tensor]:
        other = (torch.eye(3) * 0.75).requires_grad_()
        result = torch.func.functional_call(model, {"blocks.1.weight": other}, (INPUTS,))
        torch.autograd.backward(result.square().sum())
        assert other.grad is not None
        return result, other.grad

    expected = act(Net(), None)
    for found, model in on_two(act):
        assert_same_bits(found[0], expected[0])
        assert_same_bits(found[1], expected[1])
        assert_same_model(model, plain(1))


# -- writing ----------------------------------------------------------------------------------------------------------


def test_rank_0s_edits_are_everybodys() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> None:
        with optimizer.gathered(model.block(1).weight, write=True):
            doubled(model.block(1).weight, 2 + 5 * optimizer.rank)

    for _, model in on_two(act):
        assert_same_model(model, plain_doubled())


def test_an_assigned_state_dict_is_rank_0s_on_every_rank() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> None:
        state = (plain(3) if optimizer.rank == 0 else Net()).state_dict()
        with optimizer.gathered(write=True):
            model.load_state_dict(state)

    for _, model in on_two(act):
        assert_same_model(model, plain(4))


def test_parameters_that_are_not_listed_are_edited_alike() -> None:
    def program(transport: Transport) -> nn.Module:
        model = Net()
        optimizer = zero(list(model.first.parameters()), transport, module=model)
        with optimizer.gathered(model.block(1).weight, write=True):
            doubled(model.block(1).weight, 2 + 5 * transport.rank)
        train(model, optimizer)
        optimizer.close()
        return model

    expected = plain_doubled(0)
    train(expected, torch.optim.SGD(expected.first.parameters(), lr=0.5))
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, expected)


@pytest.mark.parametrize("raising", [(0, 1), (1,)])
def test_an_exception_inside_a_block_that_writes_keeps_rank_0s_values_and_strands_nobody(
    raising: tuple[int, ...],
) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        def edit() -> None:
            with optimizer.gathered(write=True):
                doubled(model.block(1).weight, 2 + 5 * optimizer.rank)
                if optimizer.rank in raising:
                    raise ZeroDivisionError

        return error_of(edit)

    for rank, (message, model) in enumerate(on_two(act)):
        assert message == ("ZeroDivisionError: " if rank in raising else "nothing")
        assert_same_model(model, plain_doubled())


def test_an_exception_inside_a_block_that_reads_undoes_what_was_edited() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        def edit() -> None:
            with optimizer.gathered():
                doubled(model.block(1).weight)
                raise ZeroDivisionError

        return error_of(edit)

    for message, model in on_two(act):
        assert message == "ZeroDivisionError: "
        assert_same_model(model, plain(1))


# -- edits on one rank ------------------------------------------------------------------------------------------------


AGREEMENTS: dict[str, Callable[[ZeroOptimizer], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "check_replicas": lambda optimizer: optimizer.check_replicas(),
}


@pytest.mark.parametrize("call", AGREEMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_edit_in_a_block_that_reads_is_told_on_every_rank_and_undone(call: str, rank: int) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
        with optimizer.gathered():
            if optimizer.rank == rank:
                doubled(model.block(1).weight)
        return error_of(AGREEMENTS[call], optimizer), error_of(AGREEMENTS[call], optimizer)

    for (message, again), model in on_two(act):
        assert f"rank {rank}: {TOLD}" in message
        assert "edit it inside gathered(write=True)" in message
        assert again == "nothing"
        assert_same_model(model, plain(1))


def on_two_with_common_memory(act: Callable[[Net, ZeroOptimizer], Any]) -> list[tuple[Any, nn.Module]]:
    return on_sockets(2, lambda transport: then_train(transport, act), timeout=5)


@pytest.mark.parametrize("ranks", [on_two, on_two_with_common_memory])
def test_an_edit_of_what_a_block_does_not_write_is_told_on_every_rank_and_undone(
    ranks: Callable[..., list[tuple[Any, nn.Module]]],
) -> None:
    """The edit is beside a parameter that is written, in the same memory, and past its version counter."""

    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        with optimizer.gathered(model.block(1).scalar, write=True):
            model.block(1).weight.data.mul_(2)
        return error_of(optimizer.step)

    for message, model in ranks(act):
        assert TOLD in message
        assert_same_model(model, plain(1))


def test_a_view_follows_its_parameter_also_where_its_memory_was_moved() -> None:
    """`multiprocessing.Queue.put` moves the memory of a tensor."""

    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[str, Tensor, Tensor]:
        with optimizer.gathered():
            view = model.block(1).weight.detach().share_memory_()
        message = error_of(optimizer.step)
        train(model, optimizer)
        with optimizer.gathered():
            return message, view.clone(), model.block(1).weight.detach().clone()

    for (message, view, weight), model in on_two(act):
        assert "'blocks.1.scalar' was edited while its unit was gathered" in message
        assert_same_bits(view, weight)
        assert_same_bits(weight, plain(1).block(1).weight)
        assert_same_model(model, plain(2))


def test_with_one_rank_parameters_move_with_their_memory() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> Tensor:
        with optimizer.gathered():
            view = model.block(1).weight.detach().share_memory_()
        optimizer.step()
        train(model, optimizer)
        return view

    for view, model in on_threads(1, lambda transport: then_train(transport, act), timeout=5):
        assert_same_model(model, plain(2))
        assert_same_bits(view, plain(2).block(1).weight)


def test_memory_that_was_moved_away_from_all_ranks_is_told_for_good() -> None:
    def program(transport: Transport) -> list[str]:
        model = Net()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            if transport.rank:
                model.block(1).weight.detach().share_memory_()  # type: ignore[no-untyped-call]
        messages = [error_of(optimizer.step) for _ in range(2)]
        train_again = error_of(train, model, optimizer)
        with optimizer.gathered():
            assert_same_model(model, Net())
        return [*messages, train_again]

    for messages in on_sockets(2, program, timeout=5):
        for message in messages:
            assert "rank 1: the memory of 'blocks.1." in message
            assert "was moved (by share_memory_()" in message


def test_an_edit_between_forward_and_backward_makes_the_backward_raise_and_stays() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        loss = loss_of(model, INPUTS)
        with optimizer.gathered(model.block(1).weight, write=True):
            doubled(model.block(1).weight)
        return error_of(torch.autograd.backward, loss)

    for message, model in on_two(act):
        assert "'blocks.1." in message
        assert "which this backward needs, was changed by a step or an edit after the forward that used it" in message
        assert_same_model(model, plain_doubled())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=1.0)
        self.layers = nn.Sequential(Net())
        nn.init.constant_(self.table.weight, 0.75)

    def forward(self, words: Tensor | None) -> Any:
        return self.layers(INPUTS if words is None else self.table(words)).square().sum()


@pytest.mark.parametrize("call", ["step", "clip_grad_norm_"])
def test_an_embedding_that_renormalises_on_one_rank_is_told_on_every_rank_and_undone(call: str) -> None:
    """First only rank 1 looks words up; then no rank renormalizes."""

    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Words()
        optimizer = zero(model, transport)
        torch.autograd.backward(model(torch.tensor([0, 3]) if transport.rank else None))
        message = error_of(AGREEMENTS[call], optimizer)
        optimizer.zero_grad()
        train_words(model, optimizer)
        optimizer.close()
        return message, model

    expected = Words()
    train_words(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
    for message, model in on_threads(2, program, timeout=5):
        assert "rank 1: 'table.weight' was edited while its unit was gathered (as an Embedding with max_norm" in message
        assert_same_model(model, expected)


def train_words(model: Words, optimizer: torch.optim.Optimizer) -> None:
    model.table.max_norm = None
    torch.autograd.backward(model(torch.tensor([1, 2])))
    optimizer.step()


def test_memory_that_was_put_into_a_released_parameter_is_told_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(CasesNet), transport)
        one_backward(model, batches_of(0, 1)[0])
        if transport.rank == 1:
            with as_plain():
                model.head.weight.data = torch.zeros_like(model.head.weight)
        optimizer.step()

    for message in on_ranks(2, program):
        assert "rank 1: the memory of 'head.weight' was replaced" in message


def test_an_edit_past_the_version_counter_is_told_by_the_owner() -> None:
    def program(transport: Transport) -> str:
        model = blocks()
        optimizer = with_sgd(model, transport, stage=3)
        model[1].register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(2))
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "'1.weight' was edited while its unit was gathered" in message


def test_weights_that_are_not_listed_are_rank_0s_too() -> None:
    def program(transport: Transport) -> nn.Module:
        model = blocks()
        with torch.no_grad():
            model[2].weight.mul_(1 + transport.rank)
        optimizer = zero(model[0].parameters(), transport, module=model)
        optimizer.close()
        return model

    for model in on_threads(3, program, timeout=5):
        assert_same_model(model, blocks())
