"""Stage 3 trains whatever torch trains, used in whatever way, with units inside units, ahead or kept.

It has the plain loop's bits, and leaves nothing gathered. Memory and traffic of units side by side are laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Transport
from zero import ZeroOptimizer
from zero.core.units import find_units
from zero.parameters.gathered.units import State
from zero.parameters.unit_manager import UnitManager

from ..support.cases import (
    TURNS,
    Block,
    Case,
    batches_of,
    loss_of,
    manager_of,
    net_of,
    one_backward,
    sharded,
    train,
)
from ..support.plain import assert_same_bits
from ..support.rows import rows
from .stage3 import Blocks, check_in, on, on_blocks
from .unit_cases import (
    CASES,
    EXPERTS_KEPT,
    FIRST,
    FURTHER,
    EndsInside,
    Mixture,
    deeply_nested,
    ends_inside,
    held_twice,
    nested,
    tie_inside,
)


@pytest.mark.first(2)
@pytest.mark.parametrize(("name", "world"), rows(FIRST, FURTHER))
def test_training_has_the_plain_loops_bits_and_leaves_nothing_gathered(name: str, world: str) -> None:
    check_in(world, CASES[name])


DEEP = 4
FLAT = Case(net_of(Block, DEEP))
MEASURED: dict[str, tuple[Case, bool]] = {  # whether the bound of memory is reached
    "three deep": (Case(net_of(Mixture, DEEP), units=deeply_nested), True),
    "blocks end inside": (Case(net_of(EndsInside, DEEP), units=ends_inside), False),
    "experts kept": (Case(net_of(Mixture, DEEP), units=nested, arguments=EXPERTS_KEPT), True),
}


@pytest.mark.law("traffic")
@pytest.mark.parametrize("name", MEASURED)
def test_memory_and_traffic_of_units_inside_units_are_those_of_the_formulas(name: str) -> None:
    case, is_reached = MEASURED[name]

    def program(transport: Transport) -> tuple[int, int]:
        model, optimizer = sharded(case, transport, bucket_cap_mb=25)
        for step in range(2):
            before = optimizer.traffic
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.describe()
        peak, bound = found.bytes["gathered_peak"], found.formula_bytes["gathered_peak"]
        assert peak == bound if is_reached else 0 < peak < bound
        assert found.bytes["scratch_peak"] <= found.formula_bytes["scratch_peak"]
        return (optimizer.traffic - before).payload_sent, found.formula_traffic_bytes(TURNS, TURNS)

    sent, formula = zip(*on("several", program), strict=True)
    assert {sum(sent)} == set(formula)


def in_use(manager: UnitManager) -> int:
    """Return the bytes of gathered buffers that are referenced, also by a graph."""
    return sum(block.storage.nbytes() for block in manager.gathered.pool._blocks if not block.free)


def whole_bytes(manager: UnitManager, units: Sequence[int]) -> int:
    buffers = [buffer for number in units for buffer in manager.units[number].buffers]
    return sum(buffer.bucket.numel * buffer.shard.itemsize for buffer in buffers)


@pytest.mark.law("buffers in flight")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_running_unit_and_the_next_ones_are_here_and_no_others(depth: int) -> None:
    """After a forward, whose graph holds no weights, the root and what the backward needs first; then nothing."""

    def program(transport: Transport) -> list[list[int]]:
        model, optimizer = sharded(FLAT, transport, prefetch_depth=depth)
        manager, seen = manager_of(optimizer), list[list[int]]()

        def look(*_: Any) -> None:
            here = [number for number, unit in enumerate(manager.units) if unit.gathered.state is not State.SHARDED]
            assert in_use(manager) <= whole_bytes(manager, here)
            seen.append([number for number in here if number])

        for block in model.blocks:
            block.register_forward_hook(look)
            block.register_full_backward_pre_hook(look)
        loss = loss_of(model, batches_of(0, 1)[0])
        if depth == 1:
            assert in_use(manager) == whole_bytes(manager, (0, DEEP))
        loss.backward()
        assert in_use(manager) == 0
        with torch.no_grad():
            loss_of(model, batches_of(0, 1)[0])
        assert in_use(manager) == 0
        return seen[: 2 * DEEP]

    forward = [list(range(unit, min(unit + depth, DEEP) + 1)) for unit in range(1, DEEP + 1)]
    backward = [list(range(max(unit - depth, 1), unit + 1)) for unit in range(DEEP, 0, -1)]
    assert on("travel", program) == [forward + backward] * 2


def test_a_view_that_is_kept_follows_its_own_parameter_and_its_memory_is_free_once_it_is_gone() -> None:
    """It must not show a unit that is gathered into a free buffer of the same size meanwhile."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[list[Tensor], list[int]]:
        manager = manager_of(optimizer)
        with optimizer.gathered(model.weight(0)):
            view = model.weight(0).detach()
        found = [in_use(manager)]
        del view
        with optimizer.gathered(model.weight(1)):
            found += [in_use(manager), whole_bytes(manager, [1])]
        with optimizer.gathered():
            views = [model.weight(number).detach() for number in range(3)]
        with torch.no_grad():
            model(model.inputs)
        return [view.clone() for view in views], found

    for (views, (held, used, one)), _ in on_blocks("travel", 4, act):
        assert held == used == one
        for number, view in enumerate(views):
            assert_same_bits(view, Blocks(4).weight(number))


def test_a_unit_holds_what_no_unit_inside_it_holds_and_what_several_share_lies_around_them() -> None:
    def where(prepared: Any, predicate: Any = nested) -> dict[str, str]:
        model = net_of(Mixture)()
        prepared(model)
        units = find_units(model, predicate)
        numbers = units.numbers()
        return {name: units.names[numbers[id(p)]] for name, p in model.named_parameters(remove_duplicate=False)}

    plain = where(lambda _: None, deeply_nested)
    assert plain["blocks.0.experts.1.up.weight"] == "blocks.0.experts.1.up"
    assert plain["blocks.0.experts.1.down.weight"] == "blocks.0.experts.1"
    assert plain["blocks.0.router.weight"] == plain["blocks.0.last.bias"] == "blocks.0"
    assert plain["norm.weight"] == "the root's rest"
    tied = where(tie_inside)
    assert tied["blocks.0.experts.1.up.weight"] == "blocks.0"  # two experts of it
    assert tied["blocks.1.experts.0.down.bias"] == "blocks.1"  # with the block itself
    assert tied["blocks.2.experts.1.down.weight"] == "the root's rest"  # with another block
    assert where(held_twice)["blocks.0.experts.0.up.bias"] == "blocks.0.experts.0"


def test_a_unit_around_the_one_that_a_backward_reaches_is_not_gathered_again() -> None:
    """Nor is a unit inside the last one, which is still here, nor one that a checkpoint has computed anew."""

    def program(transport: Transport) -> dict[str, int]:
        model, optimizer = sharded(replace(CASES["experts recomputed"], arguments={}), transport)
        manager = manager_of(optimizer)
        gathers = {unit.name: 0 for unit in manager.units}
        for unit in manager.units:
            unit.gathered.unsharding = counting(unit.gathered.unsharding, gathers, unit.name)
        one_backward(model, batches_of(0, 1)[0])
        optimizer.step()
        return gathers

    for gathers in on("travel", program):
        assert {name: count for name, count in gathers.items() if name.startswith("blocks.") and count > 3} == {}
        assert [gathers[f"blocks.{number}"] for number in range(3)] == [2, 2, 1]


def counting(original: Any, counts: dict[str, int], name: str) -> Any:
    def count() -> Any:
        counts[name] += 1
        return original()

    return count
