"""`gathered()` shows and writes what was asked for; any other edit is undone and told on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.core.parameter_specs import as_plain
from zero.parameters import edit_detector

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model
from .stage3 import INPUTS, Net, loss_of, on_blocks, on_ranks, plain, plain_blocks, train, zero
from .worlds import on

TOLD = "'blocks.1.weight' was edited while its unit was gathered"
Act = Callable[[Net, ZeroOptimizer], Any]


def doubled(parameter: Tensor, times: float = 2) -> None:
    with torch.no_grad():
        parameter.mul_(times)


# -- reading and writing ----------------------------------------------------------------------------------------------


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

    for (values, messages), model in on_ranks("travel", act):
        assert_same_bits(values[0], Net().first.weight)
        assert_same_bits(values[1], Net().block(1).weight)
        for name, message in zip(("blocks.1.weight", "first.weight", "first.weight"), messages, strict=True):
            assert f"'{name}' is released" in message
        assert_same_model(model, plain(1))


def test_gathered_of_a_stranger_names_it_and_holds_nothing() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> list[str]:
        strangers: list[Any] = [nn.Parameter(torch.ones(2, 5)), [model.first.weight, torch.ones(2, 5)]]
        return [error_of(optimizer.gathered(each, write=write).__enter__) for each in strangers for write in (0, 1)]

    for messages, model in on_ranks("travel", act):
        for message in messages:
            assert message == "ValueError: a tensor of shape (2, 5) is not one of this optimizer's parameters"
        assert_same_model(model, plain(1))


@pytest.mark.law("weak hooks")
@pytest.mark.parametrize(
    ("world", "copied"),
    [("travel", copy.deepcopy), ("common", lambda model: pickle.loads(pickle.dumps(model))), ("one", copy.deepcopy)],
)
def test_a_copy_made_inside_gathered_is_a_plain_model_that_trains_alone(world: str, copied: Any) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> list[nn.Module]:
        train(model, optimizer)
        with optimizer.gathered():
            twins = [copied(model), copied(model)]
        before = optimizer.traffic
        train(twins[1], torch.optim.SGD(twins[1].parameters(), lr=0.5))
        assert optimizer.traffic == before
        return twins

    for twins, model in on_ranks(world, act):
        for number, twin in enumerate(twins, 1):
            assert_same_model(twin, plain(number))
        assert_same_model(model, plain(2))


# -- edits ------------------------------------------------------------------------------------------------------------


def in_a_block(
    ranks: tuple[int, ...], call: Callable[[ZeroOptimizer], Any], write: str = "", edit: Callable[..., Any] = doubled
) -> Act:
    """Edit ``blocks.1.weight`` on some ranks inside a block that writes to another or to none, then ``call``."""

    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
        with optimizer.gathered(model.get_parameter(write) if write else None, write=bool(write)):
            if optimizer.rank in ranks:
                edit(model.block(1).weight)
        return error_of(call, optimizer), error_of(call, optimizer)

    return act


def written(write: bool, raising: tuple[int, ...]) -> Act:
    """Edit on each rank in another way inside a block, which some ranks leave by an exception."""

    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
        def edit() -> None:
            with optimizer.gathered(model.block(1).weight, write=write):
                doubled(model.block(1).weight, 2 + 5 * optimizer.rank)
                if optimizer.rank in raising:
                    raise ZeroDivisionError

        message = error_of(edit)
        assert message == ("ZeroDivisionError: " if optimizer.rank in raising else "nothing")
        return error_of(optimizer.step), error_of(optimizer.step)

    return act


def around_one_that_raises(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
    with optimizer.gathered(model.block(1).weight, write=True):
        doubled(model.block(1).weight, 2 + 5 * optimizer.rank)
        with suppress(ZeroDivisionError), optimizer.gathered():
            raise ZeroDivisionError
        with torch.no_grad():
            model(INPUTS)
    return error_of(optimizer.step), error_of(optimizer.step)


def through_a_view(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
    with optimizer.gathered():
        view = model.block(1).weight.detach()
    view.mul_(2)
    loss_of(model, INPUTS)
    return error_of(optimizer.step), error_of(optimizer.step)


def into_an_array_before_a_block(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
    with optimizer.gathered():
        array = model.block(1).weight.detach().numpy()
    array *= 2
    block = in_a_block((), STEP, "blocks.1.weight")
    return error_of(block, model, optimizer), error_of(optimizer.step)


RELEASED = "'blocks.1.weight' was edited while it was released"
STEP, CLIP = ZeroOptimizer.step, lambda optimizer: optimizer.clip_grad_norm_(1.0)
PAST = lambda weight: weight.data.mul_(2)  # noqa: E731
EDITS: dict[str, tuple[str, Act, str, bool]] = {  # world, edit, what is told, whether it stays
    "by rank 0, told by step": ("travel", in_a_block((0,), STEP), f"rank 0: {TOLD}", False),
    "by rank 1, told by clip": ("common", in_a_block((1,), CLIP), f"rank 1: {TOLD}", False),
    "by rank 1, told by a check": ("travel", in_a_block((1,), ZeroOptimizer.check_replicas), f"rank 1: {TOLD}", False),
    "beside what is written": ("travel", in_a_block((0, 1), STEP, "blocks.1.scalar", PAST), TOLD, False),
    "beside what is written, in common": ("common", in_a_block((0, 1), STEP, "blocks.1.scalar", PAST), TOLD, False),
    "through a view": ("travel", through_a_view, RELEASED, False),
    "through a view, in common": ("common", through_a_view, RELEASED, False),
    "through a view, on one rank": ("one", through_a_view, "nothing", True),
    "into an array before a block that writes": ("common", into_an_array_before_a_block, TOLD, False),
    "in a block that reads and raises": ("travel", written(False, (0, 1)), "nothing", False),
    "in a block that writes, around one that raises": ("travel", around_one_that_raises, "nothing", True),
    "in a block that writes, around one that raises, in common": ("common", around_one_that_raises, "nothing", True),
    "in a block that writes and raises": ("common", written(True, (0, 1)), "nothing", True),
    "in a block that writes and raises on one rank": ("travel", written(True, (1,)), "nothing", True),
}


@pytest.mark.usefixtures("whenever_seen")
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_kept_or_told_on_every_rank_and_undone(name: str) -> None:
    world, act, text, stays = EDITS[name]
    for (message, again), model in on_ranks(world, act):
        assert text in message
        assert "was edited while its" not in text or "edit it inside gathered(write=True)" in message
        assert again == "nothing"
        assert_same_model(model, plain(1, doubled=stays))


@pytest.mark.usefixtures("whenever_seen")
def test_an_edit_names_its_parameter_and_no_neighbour_in_the_shard() -> None:
    def act(model: Any, optimizer: ZeroOptimizer) -> str:
        with optimizer.gathered():
            PAST(model.weight(1))
        return error_of(optimizer.step)

    for message, model in on_blocks("travel", 40, act):
        assert "rank 0: '1.weight' was edited while its unit was gathered" in message
        assert_same_model(model, plain_blocks(40, 1))


@pytest.mark.usefixtures("unseen")
def test_an_edit_on_a_device_is_told_after_any_number_of_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_detector, "MOST_UNREAD", 3)

    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        with optimizer.gathered():
            PAST(model.block(1).weight)
        for _ in range(3):
            with torch.inference_mode():
                model(INPUTS)
        return error_of(optimizer.step)

    for message, model in on_ranks("travel", act):
        assert TOLD in message
        assert_same_model(model, plain(1))


@pytest.mark.usefixtures("unseen")
def test_an_edit_on_a_device_is_told_by_the_step_behind_a_clip() -> None:
    """The clip would wait for the device."""

    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[str, str]:
        with optimizer.gathered():
            PAST(model.block(1).weight)
        return error_of(CLIP, optimizer), error_of(STEP, optimizer)

    for (clipped, stepped), model in on_ranks("travel", act):
        assert clipped == "nothing"
        assert TOLD in stepped
        assert_same_model(model, plain(1))


# -- memory that moves ------------------------------------------------------------------------------------------------


def move(block: Any, _: Any) -> None:
    block.weight.detach().share_memory_()


def test_memory_that_was_moved_away_from_all_ranks_is_told_for_good() -> None:
    def program(transport: Transport) -> list[str]:
        model = Net()
        optimizer = zero(model, transport)
        if transport.rank:
            model.block(1).register_forward_pre_hook(move)
        loss_of(model, INPUTS)
        messages = [error_of(optimizer.step) for _ in range(2)]
        train_again = error_of(train, model, optimizer)
        with optimizer.gathered():
            assert_same_model(model, Net())
        return [*messages, train_again]

    for messages in on("common", program):
        for message in messages:
            assert "rank 1: the memory of 'blocks.1." in message
            assert "was moved (by share_memory_()" in message


def test_memory_that_was_put_into_a_released_parameter_is_told_on_every_rank() -> None:
    def program(transport: Transport) -> str:
        model = Net()
        optimizer = zero(model, transport)
        torch.autograd.backward(loss_of(model, INPUTS))
        if transport.rank == 1:
            with as_plain():
                model.block(1).weight.data = torch.zeros(3, 3)
        return error_of(optimizer.step)

    for message in on("travel", program):
        assert "rank 1: the memory of 'blocks.1.weight' was replaced" in message


@pytest.mark.usefixtures("whenever_seen")
@pytest.mark.parametrize(("world", "call"), [("travel", STEP), ("common", CLIP)])
def test_an_embedding_that_renormalises_is_told_on_every_rank_and_undone(
    world: str, call: Callable[[ZeroOptimizer], Any]
) -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), Net())
        nn.init.constant_(model[0].weight, 0.75)  # type: ignore[arg-type]
        model.inputs = torch.tensor([0, 3])  # type: ignore[assignment]
        return model

    def act(model: Any, optimizer: ZeroOptimizer) -> str:
        torch.autograd.backward(loss_of(model, model.inputs))
        message = error_of(call, optimizer)
        model[0].max_norm = None
        return message

    expected = build()
    expected[0].max_norm = None
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.5), expected.inputs)
    for message, model in on_ranks(world, act, build):
        assert "'0.weight' was edited while its unit was gathered (as an Embedding with max_norm" in message
        assert_same_model(model, expected)


class Codebook(nn.Module):
    """Its forward moves a parameter, as the running means of a vector quantiser do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(3, 3), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.linear(inputs)
        self.code.data.mul_(0.5).add_(hidden.detach().mean(0))
        return hidden


@pytest.mark.parametrize("world", ["travel", "common"])
def test_a_codebook_that_a_forward_moves_is_told_to_be_ignored(world: str) -> None:
    def program(transport: Transport) -> tuple[str, str, Tensor]:
        sharded, ignoring = (nn.Sequential(Codebook()) for _ in range(2))
        first = error_of(train, sharded, zero(sharded, transport.fork()))
        code = cast(Codebook, ignoring[0]).code
        second = error_of(train, ignoring, zero(ignoring, transport.fork(), ignored=code))
        return first, second, code.detach()

    for first, second, code in on(world, program):
        assert "'0.code' was edited while its unit was gathered" in first
        assert "where a forward moves it (a codebook), list it in ignored=" in first
        assert second == "nothing"
        assert not code.eq(1).any()


def put_data(model: Net) -> None:
    model.block(1).weight.data = torch.ones(3, 3)


def put_a_vector(model: Net) -> None:
    nn.utils.vector_to_parameters(torch.ones(9), [model.block(1).weight])


def put_a_state_dict(model: Net) -> None:
    model.load_state_dict({"blocks.1.weight": torch.ones(3, 3)}, strict=False, assign=True)


@pytest.mark.parametrize("put", [put_data, put_a_vector, put_a_state_dict])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_that_is_put_in_the_place_of_a_parameters_is_told_with_what_copies_it(
    stage: int, put: Callable[[Net], None]
) -> None:
    def act(optimizer: ZeroOptimizer, model: Net) -> None:
        with optimizer.gathered(write=True):
            put(model)
        train(model, optimizer)

    def program(transport: Transport) -> str:
        model = Net()
        return error_of(act, zero(model, transport, stage, collective="pairwise"), model)

    for message in on_threads(2, program, timeout=BOUND):
        assert "'blocks.1.weight' was replaced after the optimizer was built" in message
        assert "by p.copy_(t) under torch.no_grad()" in message
        assert ("load_state_dict(assign=True)" in message) == (put is put_a_state_dict)


@pytest.mark.usefixtures("whenever_seen")
def test_parameters_that_are_not_listed_are_rank_0s_and_are_edited_alike() -> None:
    def program(transport: Transport) -> nn.Module:
        model = Net()
        doubled(model.block(1).weight, 1 + transport.rank)
        optimizer = zero(list(model.first.parameters()), transport, module=model)
        with optimizer.gathered(model.block(1).weight, write=True):
            doubled(model.block(1).weight, 2 + 5 * transport.rank)
        train(model, optimizer)
        optimizer.close()
        return model

    expected = plain(0, doubled=True)
    train(expected, torch.optim.SGD(expected.first.parameters(), lr=0.5))
    for world in ("travel", "common"):
        for model in on(world, program):
            assert_same_model(model, expected)
