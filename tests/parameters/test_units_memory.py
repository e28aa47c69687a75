"""What is gathered at stage 3, and when.

No graph holds weights; at most three units are gathered; the next unit is gathered while one runs; and the traffic is
that of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Pairwise, Tag, Transport, Work, on_threads
from zero.parameters.gathered.buffers import State
from zero.parameters.unit_manager import UnitManager

from ..support.cases import (
    TURNS,
    WORLD_SIZES,
    Block,
    Case,
    Net,
    assert_nothing_is_here,
    batches_of,
    loss_of,
    manager_of,
    net_of,
    one_backward,
    sharded,
    train,
)
from ..support.plain import share
from ..support.small import blocks, with_sgd

DEEP = 12
Events = list[tuple[str, str]]


def in_use(manager: UnitManager) -> int:
    """Return the bytes of gathered buffers that are referenced, also by a graph."""
    return sum(block.storage.nbytes() for block in manager.gathered.pool._blocks if not block.free)


def whole_bytes(manager: UnitManager, units: Sequence[int]) -> int:
    buffers = [buffer for number in units for buffer in manager.units[number].buffers]
    return sum(buffer.bucket.numel * buffer.shard.itemsize for buffer in buffers)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.by_default("2")
def test_after_a_forward_the_graph_holds_no_weights(world_size: int) -> None:
    """Only the root unit and the last unit are gathered, which the backward needs first."""

    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(net_of(Block, DEEP)), transport)
        manager = manager_of(optimizer)
        for step in range(2):
            loss = loss_of(model, batches_of(step, 1)[0])
            here = [number for number, unit in enumerate(manager.units) if unit.gathered.state is not State.SHARDED]
            assert here == [0, DEEP]
            assert in_use(manager) == whole_bytes(manager, here)
            loss.backward()
            assert in_use(manager) == 0
            assert_nothing_is_here(model, optimizer)
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, batches_of(0, 1)[0])
        assert in_use(manager) == 0

    on_threads(world_size, program, timeout=5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@WORLD_SIZES
def test_at_most_the_root_the_running_unit_and_the_next_one_are_here(world_size: int) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(net_of(Block, DEEP)), transport)
        manager, seen = manager_of(optimizer), []

        def look(*_: Any) -> None:
            seen.append(in_use(manager))

        for part in model.modules():
            part.register_forward_hook(look)
            part.register_full_backward_pre_hook(look)
        for step in range(2):
            train(Case(), model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.describe()
        bound = whole_bytes(manager, (0, 1, 2)) if world_size > 1 else 0
        assert max(seen) == found.bytes["gathered_peak"] == found.formula_bytes["gathered_peak"] == bound

    on_threads(world_size, program, timeout=5)


# -- when -------------------------------------------------------------------------------------------------------------


class Backwards(Net):
    """A model whose units run in another order than that of their registration."""

    def body(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def recorded(events: Events) -> Callable[[Transport], Pairwise]:
    """Return an algorithm that records when the gather of a unit is launched."""

    class Recorded(Pairwise):
        def all_gather(self, flat: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
            events.append(("gather", tag.label.removeprefix("gather of unit ").strip("'")))
            return super().all_gather(flat, bounds, tag=tag)

    return Recorded


def record_blocks(model: Any, events: Events) -> None:
    """Record when a block's forward and backward begin and end."""

    def enter(name: str) -> Any:
        def hook(_: Any, args: tuple[Tensor]) -> None:
            events.append(("forward begins", name))
            args[0].register_hook(lambda gradient: events.append(("backward ends", name)))

        return hook

    def leave(name: str) -> Any:
        def hook(_: Any, __: Any, out: Tensor) -> None:
            events.append(("forward ends", name))
            out.register_hook(lambda gradient: events.append(("backward begins", name)))

        return hook

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(enter(f"blocks.{number}"))
        block.register_forward_hook(leave(f"blocks.{number}"))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", [Net, Backwards])
@pytest.mark.by_default("Net-3", "Backwards-3")
def test_the_next_unit_is_gathered_while_one_runs(build: type[Net], world_size: int) -> None:
    """A forward uses the order of the last one, a backward its reverse. No gather begins before the preceding unit has
    ended."""

    def program(transport: Transport) -> Events:
        events: Events = []
        model, optimizer = sharded(Case(build), transport, collective=recorded(events), bucket_cap_mb=1)
        record_blocks(model, events)
        for step in range(2):
            events.clear()
            one_backward(model, batches_of(step, 1)[0])
            optimizer.zero_grad()
        return events

    order = [f"blocks.{number}" for number in range(Net.count)]
    if build is Backwards:
        order.reverse()
    for events in on_threads(world_size, program, timeout=5):
        for path, names in (("forward", order), ("backward", order[::-1])):
            for name, following in pairwise(names):
                gather = position(events, ("gather", following), last=path == "backward")
                assert gather < events.index((f"{path} ends", name)), (path, name, events)
                if name != names[0]:
                    before = names[names.index(name) - 1]
                    assert gather > events.index((f"{path} ends", before)), (path, name, events)


def position(events: Events, event: tuple[str, str], last: bool) -> int:
    """Return the position of the first or last occurrence of an event."""
    found = [number for number, each in enumerate(events) if each == event]
    assert len(found) in (1, 2), (event, events)
    return found[-1 if last else 0]


# -- how much ---------------------------------------------------------------------------------------------------------


def freeze_unit(model: Any) -> None:
    model.blocks[1].requires_grad_(False)


def freeze_parts(model: Any) -> None:
    for part in (model.norm, model.blocks[0].inner, model.blocks[2].outer):
        part.requires_grad_(False)


def some(model: Any) -> list[nn.Parameter]:
    return [*model.blocks[0].parameters(), model.blocks[1].inner.weight, *model.head.parameters()]


def tie(model: Any) -> None:
    model.blocks[2].inner.weight = model.blocks[0].inner.weight


TRAFFIC = {
    "plain": Case(),
    "one unit": Case(net_of(Block, 1)),
    "a frozen unit": Case(prepared=freeze_unit),
    "frozen parts": Case(prepared=freeze_parts),
    "parameters that are not listed": Case(groups=some),
    "tied": Case(prepared=tie),
    "in another order": Case(Backwards),
}


@WORLD_SIZES
@pytest.mark.parametrize("synchronised", [TURNS, 1])
@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.by_default("plain-1-3", "frozen parts-1-3", "tied-2-1")
def test_what_travels_in_a_step_is_what_the_formula_says(name: str, synchronised: int, world_size: int) -> None:
    def program(transport: Transport) -> tuple[list[int], int]:
        model, optimizer = sharded(TRAFFIC[name], transport)
        sent = []
        for step in range(3):
            before = optimizer.traffic
            own = share(batches_of(step, world_size), transport.rank, world_size)
            with optimizer.no_sync():
                for batch in own[synchronised:]:
                    one_backward(model, batch)
            for batch in own[:synchronised]:
                one_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            sent.append((optimizer.traffic - before).payload_sent)
        return sent, optimizer.describe().formula_traffic_bytes(TURNS, synchronised)

    results = on_threads(world_size, program, timeout=5)
    for step, total in enumerate(zip(*(sent for sent, _ in results), strict=True)):
        assert [sum(total)] * world_size == [formula for _, formula in results], step


class Path(nn.Module):
    """A model that runs the blocks that ``order`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())
        self.order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def test_a_unit_that_was_fetched_in_vain_is_given_back() -> None:
    """A unit is gathered ahead in the order of the last forward.

    If that is wrong, it is resharded when the next unit begins.
    """

    def program(transport: Transport) -> list[list[bool]]:
        model = Path()
        optimizer = with_sgd(model, transport, stage=3)
        units = optimizer._storage.manager.units[1:]  # type: ignore[attr-defined]
        here = []
        for order in ((0, 1, 2), (0, 2)):
            model.order = order
            loss = model(torch.ones(1, 4)).sum()
            here.append([unit.gathered.state is not State.SHARDED for unit in units])
            loss.backward()
            optimizer.zero_grad()
        return here

    for here in on_threads(2, program, timeout=5):
        assert here == [[False, False, True]] * 2
