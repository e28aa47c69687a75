"""Graphs hold no weights, at most three units are gathered, and traffic is that of the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Transport
from zero import ZeroOptimizer
from zero.parameters.gathered.units import State
from zero.parameters.unit_manager import UnitManager

from ..support.cases import (
    TURNS,
    Block,
    Case,
    assert_nothing_is_here,
    batches_of,
    loss_of,
    manager_of,
    net_of,
    one_backward,
    sharded,
)
from ..support.plain import assert_same_bits, share
from ..support.rows import rows, without
from .stage3 import Blocks, on_blocks
from .unit_cases import freeze_parts, tie
from .worlds import on, size_of

DEEP = 12


def in_use(manager: UnitManager) -> int:
    """Return the bytes of gathered buffers that are referenced, also by a graph."""
    return sum(block.storage.nbytes() for block in manager.gathered.pool._blocks if not block.free)


def whole_bytes(manager: UnitManager, units: Sequence[int]) -> int:
    buffers = [buffer for number in units for buffer in manager.units[number].buffers]
    return sum(buffer.bucket.numel * buffer.shard.itemsize for buffer in buffers)


@pytest.mark.law("buffers in flight")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("world", rows(["one"], ["several"]))
def test_at_most_the_root_the_running_unit_and_the_next_one_are_here(world: str) -> None:
    """After a forward, whose graph holds no weights, those that the backward needs first: the root and the last."""

    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(net_of(Block, DEEP)), transport)
        manager, seen = manager_of(optimizer), []

        def look(*_: Any) -> None:
            seen.append(in_use(manager))

        for part in model.modules():
            part.register_forward_hook(look)
            part.register_full_backward_pre_hook(look)
        for step in range(2):
            loss = loss_of(model, batches_of(step, 1)[0])
            if transport.world_size > 1:
                here = [number for number, unit in enumerate(manager.units) if unit.gathered.state is not State.SHARDED]
                assert here == [0, DEEP]
                assert in_use(manager) == whole_bytes(manager, here)
            loss.backward()
            assert in_use(manager) == 0
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_is_here(model, optimizer)
        with torch.no_grad():
            loss_of(model, batches_of(0, 1)[0])
        assert in_use(manager) == 0
        found = optimizer.describe()
        bound = whole_bytes(manager, (0, 1, 2)) if transport.world_size > 1 else 0
        assert max(seen) == found.bytes["gathered_peak"] == found.formula_bytes["gathered_peak"] == bound

    on(world, program)


TRAFFIC: dict[str, tuple[Case, int, str]] = {
    "plain": (Case(), 1, "several"),
    "every backward synchronized": (Case(), TURNS, "travel"),
    "frozen parts": (Case(prepared=freeze_parts), 1, "several"),
    "parameters that are not listed": (Case(groups=lambda model: list(model.blocks[0].parameters())), 1, "several"),
    "tied": (Case(prepared=tie), TURNS, "several"),
    "alone": (Case(), 1, "one"),
    "in common memory": (Case(), 1, "common"),
}


@pytest.mark.law("traffic")
@pytest.mark.parametrize(
    "name", without(TRAFFIC, "plain", "every backward synchronized", "frozen parts", "parameters that are not listed")
)
def test_what_travels_in_a_step_is_what_the_formula_says(name: str) -> None:
    case, synchronised, world = TRAFFIC[name]

    def program(transport: Transport) -> tuple[list[int], int]:
        model, optimizer = sharded(case, transport)
        sent = []
        for step in range(3):
            before = optimizer.traffic
            own = share(batches_of(step, transport.world_size), transport.rank, transport.world_size)
            with optimizer.no_sync():
                for batch in own[synchronised:]:
                    one_backward(model, batch)
            for batch in own[:synchronised]:
                one_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            sent.append((optimizer.traffic - before).payload_sent)
        return sent, optimizer.describe().formula_traffic_bytes(TURNS, synchronised)

    results = on(world, program)
    for step, total in enumerate(zip(*(sent for sent, _ in results), strict=True)):
        assert [sum(total)] * size_of(world) == [formula for _, formula in results], step


def test_a_view_that_is_kept_within_a_step_follows_its_own_parameter() -> None:
    """It must not show a unit that is gathered into a free buffer of the same size meanwhile."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[Tensor]:
        with optimizer.gathered():
            views = [model.weight(number).detach() for number in range(3)]
        with torch.no_grad():
            model(model.inputs)
        return [view.clone() for view in views]

    for views, _ in on_blocks("travel", 4, act):
        for number, view in enumerate(views):
            assert_same_bits(view, Blocks(4).weight(number))


def test_memory_that_a_view_held_serves_the_next_unit_once_the_view_is_gone() -> None:
    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[int]:
        manager = manager_of(optimizer)
        with optimizer.gathered(model.weight(0)):
            view = model.weight(0).detach()
        found = [in_use(manager)]
        del view
        with optimizer.gathered(model.weight(1)):
            return [*found, in_use(manager), whole_bytes(manager, [1])]

    for (held, used, one), _ in on_blocks("travel", 4, act):
        assert held == used == one
