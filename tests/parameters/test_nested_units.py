"""Units inside units, ahead or kept: the plain loop's bits, and the formulas' memory and traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport
from zero.core.units import find_units
from zero.parameters.gathered.units import State

from ..support.by_module import KEEP, by_kind
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
from ..support.errors import error_of
from ..support.narrowed import PRECISIONS
from ..support.plain import share
from ..support.programs import Program, check
from ..support.rows import only, without
from ..support.sides import Side, same_as_plain
from .nested_units import NESTED, ODD, EndsInside, Expert, Mixture, Net, deeply_nested, held_twice, nested, tie_inside
from .worlds import check_in, on, size_of

EXPERTS_KEPT = {"prefetch_depth": 0, "reshard_after_forward": lambda module: not isinstance(module, Expert)}
BLOCKS_KEPT = {"prefetch_depth": 3, "reshard_after_forward": lambda module: not isinstance(module, Block)}
DIALS: dict[str, Mapping[str, Any]] = {"": {}, "experts kept": EXPERTS_KEPT, "blocks kept": BLOCKS_KEPT}
ROWS = [
    *((name, world, "") for name in NESTED for world in ("one", "several", "common")),
    *((name, "several", "experts kept") for name in NESTED),
    *((name, "travel", "blocks kept") for name in NESTED),
]


BY_DEFAULT = (
    ("experts in blocks", "common", ""),
    ("ties among them", "several", "experts kept"),
    ("recomputed", "travel", "blocks kept"),
)


@pytest.mark.parametrize(("name", "world", "dials"), only(ROWS, *BY_DEFAULT))
def test_training_has_the_plain_loops_bits_and_leaves_nothing_gathered(name: str, world: str, dials: str) -> None:
    check_in(world, replace(NESTED[name], arguments=DIALS[dials]))


INNER = {"*": PRECISIONS["bf16"], "layers.1.1": KEEP}
BY_MODULE = {
    "an inner unit in fp32": Program(3, 3, precision=INNER, units=ODD["inside units"]),
    "an inner unit in fp32, kept": Program(1, 3, precision=INNER, units=ODD["kept inside units"]),
    "by kind, two copies": Program(4, 3, precision=by_kind, sharding_factor=2, units=ODD["kept inside units"]),
}


@pytest.mark.parametrize("row", without(BY_MODULE, "an inner unit in fp32, kept", "by kind, two copies"))
def test_each_of_them_may_have_a_precision_of_its_own(row: str) -> None:
    check(BY_MODULE[row])


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
    assert tied["blocks.2.experts.0.down.bias"] == "the root's rest"
    assert where(held_twice)["blocks.0.experts.0.up.bias"] == "blocks.0.experts.0"


DEEP = 4
FLAT = Case(net_of(Block, DEEP))
MIXED = Case(net_of(Mixture, DEEP), units=nested)
THREE_DEEP = Case(net_of(Mixture, DEEP), units=deeply_nested)
ENDS_INSIDE = Case(net_of(EndsInside, DEEP), units=lambda module: isinstance(module, (EndsInside, Expert)))
MEASURED: dict[str, tuple[Case, dict[str, Any], bool]] = {  # whether the bound is reached
    "none ahead": (FLAT, {"prefetch_depth": 0}, True),
    "two ahead": (FLAT, {"prefetch_depth": 2}, True),
    "more ahead than there are": (FLAT, {"prefetch_depth": 9}, True),
    "all units kept by a function": (FLAT, {"reshard_after_forward": lambda _: False}, True),
    "nested": (MIXED, {}, True),
    "nested, none ahead": (MIXED, {"prefetch_depth": 0}, True),
    "nested, three ahead": (MIXED, {"prefetch_depth": 3}, False),
    "three deep": (THREE_DEEP, {}, True),
    "three deep, none ahead": (THREE_DEEP, {"prefetch_depth": 0}, True),
    "blocks end inside": (ENDS_INSIDE, {}, False),
    "blocks end inside, two ahead": (ENDS_INSIDE, {"prefetch_depth": 2}, False),
    "nested, experts kept": (MIXED, EXPERTS_KEPT, True),
    "nested, blocks kept": (MIXED, {**BLOCKS_KEPT, "prefetch_depth": 1}, True),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", only(MEASURED, "two ahead", "three deep", "blocks end inside", "nested, experts kept"))
def test_memory_and_traffic_are_those_of_the_formulas(name: str) -> None:
    """No bucket of a unit is here longer than it must be, and none is gathered twice for a forward or a backward."""
    case, arguments, is_reached = MEASURED[name]

    def program(transport: Transport) -> tuple[list[int], int]:
        model, optimizer = sharded(case, transport, bucket_cap_mb=25, **arguments)
        sent = []
        for step in range(3):
            before = optimizer.traffic
            for batch in share(batches_of(step, transport.world_size), transport.rank, transport.world_size):
                one_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            sent.append((optimizer.traffic - before).payload_sent)
            assert_nothing_is_here(model, optimizer)
        found = optimizer.describe()
        peak, bound = found.bytes["gathered_peak"], found.formula_bytes["gathered_peak"]
        assert peak == bound if is_reached else 0 < peak < bound
        assert found.bytes["scratch_peak"] <= found.formula_bytes["scratch_peak"]
        return sent, found.formula_traffic_bytes(TURNS, TURNS)

    results = on("several", program)
    for step, total in enumerate(zip(*(sent for sent, _ in results), strict=True)):
        assert [sum(total)] * size_of("several") == [formula for _, formula in results], step


def test_a_rank_that_has_left_a_join_gathers_them_for_the_others() -> None:
    """In each step ranks have no, one and two micro-batches."""

    def loop(side: Side) -> list[torch.Tensor]:
        norms = []
        for step in range(2):
            batches = batches_of(step, 3)
            with side.join():
                for turn in range(TURNS):
                    ranks = [rank for rank in side.ranks if turn < (rank + step) % 3]
                    side.train(lambda model, rank, of=batches[3 * turn :]: loss_of(model, of[rank]), ranks=ranks)  # type: ignore[misc]
            norms.append(side.clip(0.5))
            side.step()
            side.clear()
        return norms

    settings = {"stage": 3, "units": deeply_nested, "prefetch_depth": 2}
    same_as_plain(loop, Case(net_of(Mixture, 2)).make, torch.optim.AdamW, 3, settings=settings)


@pytest.mark.parametrize("depth", only([0, 1, 3], 3))
def test_the_next_units_are_under_way_and_no_others(depth: int) -> None:
    def program(transport: Transport) -> list[list[int]]:
        model, optimizer = sharded(FLAT, transport, prefetch_depth=depth)
        seen = []

        def look(*_: Any) -> None:
            units = manager_of(optimizer).units
            seen.append([n for n, unit in enumerate(units) if n and unit.gathered.state is not State.SHARDED])

        for block in model.blocks:
            block.register_forward_hook(look)
            block.register_full_backward_pre_hook(look)
        loss_of(model, batches_of(0, 1)[0]).backward()
        return seen

    forward = [list(range(unit, min(unit + depth, DEEP) + 1)) for unit in range(1, DEEP + 1)]
    backward = [list(range(max(unit - depth, 1), unit + 1)) for unit in range(DEEP, 0, -1)]
    assert on("travel", program) == [forward + backward] * 2


def test_a_unit_around_the_one_that_a_backward_reaches_is_not_gathered_again() -> None:
    """Nor is a unit inside the last one, which is still here, nor one that a checkpoint has computed anew."""

    def program(transport: Transport) -> dict[str, int]:
        model, optimizer = sharded(NESTED["recomputed"], transport)
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


def test_experts_that_ranks_choose_apart_are_an_error_by_name_unless_the_ranks_share_memory() -> None:
    class Chooses(Mixture):
        rank = 0

        def forward(self, x: torch.Tensor) -> Any:
            return Block.forward(self, self.experts[self.rank](x))

    def program(transport: Transport) -> str:
        model, optimizer = sharded(Case(net_of(Chooses), units=nested), transport)
        for block in model.blocks:
            block.rank = transport.rank
        try:
            one_backward(model, batches_of(0, 1)[0])
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    assert on("common", program) == ["", ""]
    for said in on("travel", program):
        assert re.search(r"is in gather of unit 'blocks\.\d\.experts\.\d'", said)


def test_a_function_of_the_user_that_fails_on_one_rank_is_named_on_every_rank() -> None:
    def program(transport: Transport) -> str:
        answers = {True: {True: True, False: False}, False: {}}[transport.rank == 0]
        case = Case(units=lambda module: answers[isinstance(module, Block)])
        return error_of(sharded, case, transport)

    said = "units: the function failed for 'embed' (KeyError: False)"
    assert on("travel", program) == [f"ValueError: rank 1: {said}", f"ValueError: {said}"]


def test_a_predicate_of_everything_makes_each_module_a_unit() -> None:
    units = find_units(Net(), lambda module: not isinstance(module, nn.ModuleList))
    assert units.names[1:4] == ("embed", "blocks.0", "blocks.0.norm")
    assert [len(members) for members in units.parameters[:4]] == [0, 2, 0, 2]
    assert units.around[3] == {2, 3}
