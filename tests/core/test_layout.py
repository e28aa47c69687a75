"""The geometry: where every parameter lies, which rank owns which part, and the bytes and traffic.

No tensor is allocated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.core.buckets import build, extended
from zero.core.cuts import Cuts, EvenCuts, PartOfCuts
from zero.core.formulas import KeptStates, bucket_bytes, formula_bytes, formula_traffic
from zero.core.layout import (
    ALIGNMENT_BYTES,
    BucketSpec,
    Dtypes,
    Layout,
    ParameterSpec,
    Piece,
    Slot,
    sharded_bytes,
)
from zero.core.stage import STAGES, stage_of

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PLAIN = [Dtypes.all(dtype) for dtype in (FP64, FP32, BF16)]
MIXED = [Dtypes(BF16, BF16, FP32, FP32), Dtypes(FP16, FP32, FP32, FP32)]
SHAPES = [
    (),
    (1,),
    (0, 3),
    (16,),
    (17,),
    (7, 13),
    (4, 4, 4),
    (127,),
    (8191,),
    (2**31 + 5,),
    (3, 2**31 + 11),
    (2**31, 2**29 + 1),
]
UNLIMITED = 2**80
BOUNDARIES = {"cpu": 64, "cuda:0": 512, "xpu:1": 512}  # of slots, in bytes, by device


def spec(
    name: str = "weight",
    shape: tuple[int, ...] = (5,),
    dtypes: Dtypes = PLAIN[1],
    trainable: bool = True,
    **fields: Any,
) -> ParameterSpec:
    """Return the spec of a parameter in contiguous memory."""
    stride = tuple(math.prod([max(1, size) for size in shape[i + 1 :]]) for i in range(len(shape)))
    given_ = {"names": (name,), "stride": stride, "device": "cpu", "group": 0, "index": 0, **fields}
    return ParameterSpec(shape=shape, dtypes=dtypes, trainable=trainable, **given_)


class ByHand(Cuts):
    """Cuts at given bounds: a rule that the library does not have."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds, self.world_size = bounds, len(bounds) - 1

    def bound(self, rank: int) -> int:
        return self.bounds[rank]


def _spec(number: int, drawn: tuple[tuple[int, ...], Dtypes, bool, int], device: str) -> ParameterSpec:
    shape, dtypes, trainable, group = drawn
    return spec(f"p{number}", shape, dtypes, trainable, group=group, index=number, device=device)


one_parameter = st.tuples(
    st.sampled_from(SHAPES) | st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(PLAIN + MIXED),
    st.booleans(),
    st.integers(0, 2),
)
parameter_lists = st.tuples(st.lists(one_parameter, max_size=12), st.sampled_from([*BOUNDARIES])).map(
    lambda drawn: [_spec(number, one, drawn[1]) for number, one in enumerate(drawn[0])]
)
lists_with_units = st.tuples(parameter_lists, st.lists(st.integers(0, 3), min_size=12, max_size=12)).map(
    lambda drawn: [dataclasses.replace(spec, unit=unit) for spec, unit in zip(*drawn, strict=False)]
)
world_sizes = st.integers(1, 8)
bucket_sizes = st.sampled_from([1, 63, 64, 65, 1000, 4096, 2**20, 2**33, UNLIMITED]) | st.integers(1, 3000)


def padded(parameter: ParameterSpec) -> int:
    """Return the elements of a parameter's slot with its padding, from the definition."""
    count, boundary = parameter.numel, BOUNDARIES[parameter.device]
    while count < parameter.numel + boundary:
        if all(count * d.itemsize % boundary == 0 for d in dataclasses.astuple(parameter.dtypes)):
            return count
        count += 1
    raise AssertionError(f"no multiple within {boundary} bytes")


# -- slots -------------------------------------------------------------------------------------------------------------


@given(parameter_lists, world_sizes, bucket_sizes)
def test_every_parameter_has_exactly_one_slot_of_its_size(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    layout = build(parameters, world_size, nbytes)
    placed = [slot for _, _, slot in layout.slots()]
    assert sorted(slot.parameter for slot in placed) == list(range(len(parameters)))
    assert all(slot.numel == parameters[slot.parameter].numel for slot in placed)
    assert layout.parameters == tuple(parameters)
    assert layout.numel == sum(math.prod(parameter.shape) for parameter in parameters)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))


@given(parameter_lists, world_sizes, bucket_sizes)
def test_slots_start_on_boundaries_of_every_dtype_and_lie_side_by_side(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    """On 64 bytes on the CPU, and on 512 elsewhere, where a plain loop's parameters lie so, too."""
    for bucket in build(parameters, world_size, nbytes).buckets:
        place = 0
        for slot in bucket.slots:
            assert slot.offset == place
            for dtype in dataclasses.astuple(bucket.dtypes):
                assert slot.offset * dtype.itemsize % BOUNDARIES[bucket.device] == 0
            place += padded(parameters[slot.parameter])
        no_elements = all(slot.numel == 0 for slot in bucket.slots)
        narrowest = min(dtype.itemsize for dtype in dataclasses.astuple(bucket.dtypes))
        assert bucket.numel == (BOUNDARIES[bucket.device] // narrowest if no_elements else place)


@given(lists_with_units, world_sizes, bucket_sizes)
def test_slots_of_a_unit_start_on_the_same_boundaries_in_its_own_part_of_a_bucket(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    layout = build(parameters, world_size, nbytes, across_units=True)
    for bucket in layout.buckets:
        for _, first, last in layout.unit_spans(bucket):
            for slot in bucket.part(first, last).slots:
                for dtype in dataclasses.astuple(bucket.dtypes):
                    assert slot.offset * dtype.itemsize % BOUNDARIES[bucket.device] == 0


@given(parameter_lists, world_sizes, bucket_sizes)
def test_a_bucket_is_homogeneous(parameters: list[ParameterSpec], world_size: int, nbytes: int) -> None:
    for bucket in build(parameters, world_size, nbytes).buckets:
        members = [parameters[slot.parameter] for slot in bucket.slots]
        assert {(m.dtypes, m.device, m.trainable) for m in members} == {
            (bucket.dtypes, bucket.device, members[0].trainable)
        }


@given(parameter_lists, world_sizes, bucket_sizes)
def test_a_bucket_keeps_to_its_cap_unless_one_parameter_alone_exceeds_it(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    for bucket in build(parameters, world_size, nbytes).buckets:
        if sum(slot.numel > 0 for slot in bucket.slots) > 1:
            assert bucket.numel * bucket.dtypes.param_dtype.itemsize <= nbytes


@given(parameter_lists, world_sizes, bucket_sizes)
def test_a_bucket_is_as_full_as_the_cap_allows(parameters: list[ParameterSpec], world_size: int, nbytes: int) -> None:
    """The first parameter of the next bucket of its kind would not have fit into the bucket before."""
    kinds: dict[Any, BucketSpec] = {}
    for bucket in build(parameters, world_size, nbytes).buckets:
        first = parameters[bucket.slots[0].parameter]
        kind = (first.dtypes, first.device, first.trainable)
        if kind in kinds:
            before = sum(padded(parameters[slot.parameter]) for slot in kinds[kind].slots)
            assert (before + padded(first)) * first.dtypes.param_dtype.itemsize > nbytes
        kinds[kind] = bucket


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(PLAIN + MIXED))
def test_an_exact_fit_is_accepted_and_one_byte_less_is_not(a: int, b: int, dtypes: Dtypes) -> None:
    two = [spec("a", (a,), dtypes), spec("b", (b,), dtypes)]
    fit = sum(padded(parameter) for parameter in two) * dtypes.param_dtype.itemsize
    assert len(build(two, 2, fit).buckets) == 1
    assert len(build(two, 2, fit - 1).buckets) == 2


# -- order -------------------------------------------------------------------------------------------------------------


@given(parameter_lists, world_sizes, bucket_sizes)
def test_layout_order_is_the_reverse_of_registration_and_buckets_are_in_order_of_completion(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    layout = build(parameters, world_size, nbytes)
    members = [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets]
    assert all(inside == sorted(inside, reverse=True) for inside in members)
    arrived: set[int] = set()
    completed = []
    for position in reversed(range(len(parameters))):  # a backward finishes the last parameter first
        arrived.add(position)
        completed += [inside for inside in members if arrived >= set(inside) and inside not in completed]
    assert members == completed


def test_the_drawing_of_the_module_is_what_is_built() -> None:
    layout = build([spec(name, (20,)) for name in "abcde"], 3, 3 * 32 * 4)
    assert [[layout.parameters[s.parameter].name for s in b.slots] for b in layout.buckets] == [list("edc"), list("ba")]
    assert [slot.offset for slot in layout.buckets[0].slots] == [0, 32, 64]
    assert list(layout.buckets[0].cuts) == [0, 32, 64, 96]
    assert list(layout.buckets[1].cuts) == [0, 16, 32, 64]


# -- ownership ---------------------------------------------------------------------------------------------------------


@given(parameter_lists, world_sizes, bucket_sizes)
def test_bounds_cut_at_64_bytes_of_the_narrowest_dtype_and_as_evenly_as_that_allows(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    for bucket in build(parameters, world_size, nbytes).buckets:
        assert bucket.world_size == world_size
        assert bucket.cuts[0] == 0
        assert bucket.cuts[-1] == bucket.numel
        narrowest = min(dtype.itemsize for dtype in dataclasses.astuple(bucket.dtypes))
        assert all(bound * narrowest % ALIGNMENT_BYTES == 0 for bound in bucket.cuts)
        sizes = [high - low for low, high in map(bucket.owned, range(world_size))]
        assert sum(sizes) == bucket.numel
        assert min(sizes) >= 0
        assert (max(sizes) - min(sizes)) * narrowest <= ALIGNMENT_BYTES


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(0, 60), st.integers(0, 60), world_sizes)
def test_cuts_are_a_sequence_of_bounds_and_a_part_of_them_keeps_every_owner(
    widths: list[int], one: int, other: int, world_size: int
) -> None:
    begin, end = min(one, other), max(one, other)
    for cuts in (ByHand(tuple(itertools.accumulate(widths, initial=0))), EvenCuts(16 * 60, world_size, 16)):
        numel, ranks = cuts[-1], range(cuts.world_size)
        bounds = list(cuts)
        assert len(cuts) == len(bounds) == cuts.world_size + 1
        assert [cuts.owned(rank) for rank in ranks] == list(itertools.pairwise(bounds))
        assert (cuts[0], cuts[-2:], cuts[1:]) == (0, tuple(bounds[-2:]), tuple(bounds[1:]))
        with pytest.raises(IndexError):
            cuts[cuts.world_size + 1]
        low, high = min(begin, numel), min(end, numel)
        part = PartOfCuts(cuts, low, high)
        assert part.world_size == cuts.world_size
        owners = [rank for rank in ranks for _ in range(*cuts.owned(rank))]
        assert [rank for rank in ranks for _ in range(*part.owned(rank))] == owners[low:high]
        assert (part[0], part[-1]) == (0, high - low)


def test_a_layout_does_not_grow_with_the_number_of_ranks() -> None:
    world_size = 10**15  # a list of as many bounds would fit in no memory
    (bucket,) = build([spec("a", (10**18,))], world_size, 1).buckets
    assert [bucket.owned(rank) for rank in (0, world_size - 1)] == [(0, 992), (10**18 - 1008, 10**18)]
    assert bucket.part(0, 1).owned(1) == bucket.owned(1)
    assert bucket.even_cuts(3).bound(3) == bucket.numel


@given(parameter_lists, world_sizes, bucket_sizes)
def test_the_pieces_of_all_ranks_tile_every_slot_exactly_once(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    for bucket in build(parameters, world_size, nbytes).buckets:
        owners: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(bucket.slots))}
        for rank in range(world_size):
            low, high = bucket.owned(rank)
            pieces = bucket.pieces(low, high)
            assert list(pieces) == sorted(pieces, key=lambda piece: piece.slot)
            for piece in pieces:
                assert low <= piece.begin <= piece.end <= high
                assert piece.numel == piece.end - piece.begin
                owners[piece.slot].append((piece.begin, piece.end))
        for number, slot in enumerate(bucket.slots):
            if slot.numel == 0:
                assert owners[number] == [(slot.offset, slot.offset)], "a slot without elements has one owner"
                continue
            place = slot.offset
            for begin, end in owners[number]:
                assert begin == place
                assert end > begin
                place = end
            assert place == slot.end
        assert [(p.begin, p.end) for p in bucket.pieces(0, bucket.numel)] == [(s.offset, s.end) for s in bucket.slots]


@given(parameter_lists, world_sizes, bucket_sizes, st.data())
def test_a_part_of_a_bucket_has_the_slots_and_owners_of_the_whole(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, data: st.DataObject
) -> None:
    for bucket in build(parameters, world_size, nbytes).buckets:
        first = data.draw(st.integers(0, len(bucket.slots) - 1))
        last = data.draw(st.integers(first + 1, len(bucket.slots)))
        begin = bucket.slots[first].offset
        end = bucket.slots[last].offset if last < len(bucket.slots) else bucket.numel
        part = bucket.part(first, last)
        assert part.numel == end - begin
        moved = [(slot.parameter, slot.offset + begin, slot.numel) for slot in part.slots]
        assert moved == [(slot.parameter, slot.offset, slot.numel) for slot in bucket.slots[first:last]]
        for rank in range(world_size):
            low, high = bucket.owned(rank)
            here, there = max(low, begin), min(high, end)
            own = tuple(bound + begin for bound in part.owned(rank))
            assert own == (here, there) if here < there else own[0] == own[1]


def test_the_middle_of_a_bucket_is_owned_as_the_bucket_is() -> None:
    (bucket,) = build([spec(name, (64,)) for name in "abcd"], 2, 1 << 20).buckets
    assert [bucket.owned(rank) for rank in range(2)] == [(0, 128), (128, 256)]
    assert [bucket.part(1, 3).owned(rank) for rank in range(2)] == [(0, 64), (64, 128)]
    assert [bucket.part(1, 2).owned(rank) for rank in range(2)] == [(0, 64), (64, 64)]


def test_a_slot_without_elements_at_the_end_belongs_to_the_owner_of_the_last_element() -> None:
    dtypes = PLAIN[1]
    bucket = BucketSpec(0, dtypes, "cpu", (Slot(0, 0, 16), Slot(1, 16, 0)), 16, ByHand((0, 0, 16, 16)))
    assert [[piece.slot for piece in bucket.pieces(*bucket.owned(rank))] for rank in range(3)] == [[], [0, 1], []]


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_parameters_without_elements_alone_have_one_owner_too(world_size: int) -> None:
    layout = build([spec("a", (0, 3)), spec("b", (0,))], world_size, 1000)
    (bucket,) = layout.buckets
    found = [[piece.slot for piece in bucket.pieces(*bucket.owned(rank))] for rank in range(world_size)]
    assert sorted(found) == [[]] * (world_size - 1) + [[0, 1]]


def test_nothing_ends_at_two_to_the_31() -> None:
    large = 5 * 2**31 + 7
    layout = build(
        [spec("small", (3,)), spec("large", (5, large // 5), Dtypes.all(BF16)), spec("wide", (large,))], 8, 1
    )
    wide, narrow = layout.buckets[0], layout.buckets[1]
    assert wide.numel == -(-large // 16) * 16
    assert narrow.numel == -(-(large // 5 * 5) // 32) * 32
    assert wide.cuts.bound(7) > 2**33
    begin, end = wide.owned(7)
    (piece,) = wide.pieces(begin, end)
    assert (piece.begin, piece.end) == (begin, large)


def test_a_slot_begins_where_the_one_before_ends_also_beyond_two_to_the_31() -> None:
    (bucket,) = build([spec("last", (5,)), spec("first", (2**31 + 3,))], 4, 2**40).buckets
    assert [slot.offset for slot in bucket.slots] == [0, 2**31 + 16]
    assert bucket.numel == 2**31 + 32
    assert bucket.pieces(*bucket.owned(3))[-1] == Piece(1, 2**31 + 16, 2**31 + 21)


# -- units -------------------------------------------------------------------------------------------------------------


@given(lists_with_units, world_sizes, bucket_sizes)
def test_across_units_buckets_are_those_without_units(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    across = build(parameters, world_size, nbytes, across_units=True)
    without = [dataclasses.replace(parameter, unit=0) for parameter in parameters]
    assert across.parameters == tuple(parameters)
    assert across.buckets == build(without, world_size, nbytes).buckets


@given(lists_with_units, world_sizes, bucket_sizes)
def test_else_a_bucket_is_of_one_unit_and_its_only_part_is_the_whole(
    parameters: list[ParameterSpec], world_size: int, nbytes: int
) -> None:
    layout = build(parameters, world_size, nbytes)
    for bucket in layout.buckets:
        (unit,) = {parameters[slot.parameter].unit for slot in bucket.slots}
        assert layout.unit_spans(bucket) == [(unit, 0, len(bucket.slots))]
        assert bucket.part(0, len(bucket.slots)) == bucket


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
def test_the_parts_of_a_bucket_by_unit_tile_it(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across_units: bool
) -> None:
    layout = build(parameters, world_size, nbytes, across_units=across_units)
    for bucket in layout.buckets:
        units, slots, place = [], [], 0
        for unit, first, last in layout.unit_spans(bucket):
            part = bucket.part(first, last)
            assert {parameters[slot.parameter].unit for slot in part.slots} == {unit}
            assert (part.index, part.dtypes, part.device) == (bucket.index, bucket.dtypes, bucket.device)
            slots += [dataclasses.replace(slot, offset=place + slot.offset) for slot in part.slots]
            units.append(unit)
            place += part.numel
        assert tuple(slots) == bucket.slots
        assert place == bucket.numel
        assert all(one != other for one, other in itertools.pairwise(units)), "neighbours are one run"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_without_elements_at_the_end_of_a_bucket_have_their_own_slots(world_size: int) -> None:
    parameters = [spec("empty", (0,), unit=2), spec("also empty", (0, 3), unit=1), spec("full", (40,), unit=0)]
    layout = build(parameters, world_size, 2**20, across_units=True)
    (bucket,) = layout.buckets
    parts = [(unit, bucket.part(first, last)) for unit, first, last in layout.unit_spans(bucket)]
    assert [(unit, [slot.parameter for slot in part.slots], part.numel) for unit, part in parts] == [
        (0, [2], bucket.numel),
        (1, [1], 0),
        (2, [0], 0),
    ]
    for rank in range(world_size):
        assert parts[0][1].owned(rank) == bucket.owned(rank)


@given(lists_with_units, world_sizes, bucket_sizes, st.data())
def test_a_part_of_a_bucket_has_the_owners_of_its_elements(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, data: st.DataObject
) -> None:
    for bucket in build(parameters, world_size, nbytes, across_units=True).buckets:
        first = data.draw(st.integers(0, len(bucket.slots) - 1))
        last = data.draw(st.integers(first + 1, len(bucket.slots)))
        part, begin = bucket.part(first, last), bucket.slots[first].offset
        assert part.world_size == world_size
        for rank in range(world_size):
            whole = [piece for piece in bucket.pieces(*bucket.owned(rank)) if piece.numel]
            expected = [
                Piece(piece.slot - first, piece.begin - begin, piece.end - begin)
                for piece in whole
                if first <= piece.slot < last
            ]
            low, high = part.owned(rank)
            assert [piece for piece in part.pieces(low, high) if piece.numel] == expected
            ours = (max(bucket.cuts[rank], begin), min(bucket.cuts[rank + 1], begin + part.numel))
            assert high - low == max(0, ours[1] - ours[0]), "padding has the same owners, too"


# -- growing -----------------------------------------------------------------------------------------------------------


@given(lists_with_units, lists_with_units, world_sizes, bucket_sizes, bucket_sizes, st.booleans())
def test_extending_moves_no_slot(
    before: list[ParameterSpec],
    more: list[ParameterSpec],
    world_size: int,
    nbytes: int,
    later: int,
    across_units: bool,
) -> None:
    layout = build(before, world_size, nbytes, across_units=across_units)
    longer = extended(layout, more, later, across_units=across_units)
    assert longer.parameters == (*before, *more)
    assert longer.buckets[: len(layout.buckets)] == layout.buckets
    alone = build(more, world_size, later, across_units=across_units)
    added = longer.buckets[len(layout.buckets) :]
    assert [b.cuts for b in added] == [b.cuts for b in alone.buckets]
    assert [[s.parameter - len(before) for s in b.slots] for b in added] == [
        [s.parameter for s in b.slots] for b in alone.buckets
    ]
    assert [bucket.index for bucket in longer.buckets] == list(range(len(longer.buckets)))


# -- the lines that ranks compare --------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[ParameterSpec], ParameterSpec]] = {
    "name": lambda s: dataclasses.replace(s, names=(s.names[0] + "x",)),
    "a further name": lambda s: dataclasses.replace(s, names=(*s.names, "tied")),
    "shape": lambda s: dataclasses.replace(s, shape=(*s.shape, 1), stride=(*s.stride, 1)),
    "strides": lambda s: dataclasses.replace(s, stride=(*s.stride, 77)),
    "compute dtype": lambda s: dataclasses.replace(s, dtypes=dataclasses.replace(s.dtypes, param_dtype=torch.int64)),
    "travel dtype": lambda s: dataclasses.replace(s, dtypes=dataclasses.replace(s.dtypes, reduce_dtype=torch.int64)),
    "accumulator": lambda s: dataclasses.replace(s, dtypes=dataclasses.replace(s.dtypes, accumulate_dtype=torch.int64)),
    "master dtype": lambda s: dataclasses.replace(s, dtypes=dataclasses.replace(s.dtypes, master_dtype=torch.int64)),
    "group": lambda s: dataclasses.replace(s, group=s.group + 1),
    "unit": lambda s: dataclasses.replace(s, unit=s.unit + 1),
    "trainable": lambda s: dataclasses.replace(s, trainable=not s.trainable),
    "kind of device": lambda s: dataclasses.replace(s, device="mps:0"),
}


@pytest.mark.parametrize("what", CHANGES)
@given(parameter=parameter_lists.filter(len).map(lambda listed: listed[0]))
@settings(max_examples=settings().max_examples // 3)
def test_the_line_changes_with_every_property_of_a_parameter(what: str, parameter: ParameterSpec) -> None:
    assert CHANGES[what](parameter).line() != parameter.line()


@given(parameter_lists)
def test_the_line_does_not_change_with_what_is_each_rank_s_own_affair(parameters: list[ParameterSpec]) -> None:
    for parameter in parameters:
        others = [dataclasses.replace(parameter, device=f"cuda:{card}") for card in (0, 1)]
        assert others[0].line() == others[1].line()
        assert dataclasses.replace(parameter, index=parameter.index + 5).line() == parameter.line()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"cuts": ByHand((0, 16, 48))},
        {"cuts": ByHand((16, 16, 32))},
        {"cuts": EvenCuts(48, 2, 16)},
        {"cuts": EvenCuts(16, 2, 16), "numel": 16},
        {"cuts": ByHand((0, 40)), "numel": 40},
        {"slots": (Slot(0, 0, 5), Slot(1, 0, 7))},
        {"slots": (Slot(0, 0, 5), Slot(1, 8, 7))},
        {"slots": (Slot(0, 16, 5),)},
        {"slots": (Slot(0, 0, 17), Slot(1, 16, 7))},
        {"slots": (Slot(0, 0, 5), Slot(1, 16, 17))},
        {"device": "cuda:0"},
    ],
)
def test_an_invalid_bucket_cannot_be_built(change: dict[str, Any]) -> None:
    good = BucketSpec(0, PLAIN[1], "cpu", (Slot(0, 0, 5), Slot(1, 16, 7)), 32, EvenCuts(32, 2, 16))
    with pytest.raises(ValueError, match="bucket 0"):
        dataclasses.replace(good, **change)


def test_an_invalid_layout_cannot_be_built() -> None:
    layout = build([spec("a", (20,)), spec("b", (5,))], 2, 1)
    first, second = layout.buckets
    with pytest.raises(ValueError, match="exactly one slot"):
        dataclasses.replace(layout, buckets=(first,))
    with pytest.raises(ValueError, match="exactly one slot"):
        dataclasses.replace(layout, buckets=(first, second, second))
    with pytest.raises(ValueError, match="exactly one slot"):
        dataclasses.replace(layout, parameters=layout.parameters[:1])
    with pytest.raises(ValueError, match="cut for 2 ranks, not 3"):
        dataclasses.replace(layout, world_size=3)
    with pytest.raises(ValueError, match="slot of a"):
        dataclasses.replace(layout, parameters=(spec("a", (21,)), spec("b", (5,))))
    with pytest.raises(ValueError, match="slot of b"):
        dataclasses.replace(layout, parameters=(spec("a", (20,)), spec("b", (5,), PLAIN[0])))
    with pytest.raises(ValueError, match="world size"):
        build([], 0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.world_size = 3  # type: ignore[misc]


# -- the stage table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "parameters", "gradients", "states"),
    [
        (0, "whole", "whole", "whole"),
        (1, "whole", "whole", "shard"),
        (2, "whole", "shard", "shard"),
        (3, "shard", "shard", "shard"),
    ],
)
def test_the_stage_table_is_that_of_the_paper(number: int, parameters: str, gradients: str, states: str) -> None:
    stage = stage_of(number)
    assert stage.number == number
    assert (stage.parameters.value, stage.gradients.value, stage.states.value) == (parameters, gradients, states)
    assert stage.keeps_full_grads == (gradients == "whole")
    assert stage.grads_replicated == (number == 0)
    assert stage.parameters_are_gathered == (number in (1, 2))
    bucket = build([spec("a", (100,))], 2, 1000).buckets[0]
    assert stage.update_interval(bucket, 1) == ((0, 112) if number == 0 else (48, 112))


@pytest.mark.parametrize(
    ("number", "passes", "gathers"),
    [  # for 1, 2, 3 synchronized backwards; for 1, 3 backwards
        (0, [2, 4, 6], [0, 0]),
        (1, [2, 3, 4], [0, 0]),
        (2, [2, 3, 4], [0, 0]),
        (3, [1, 2, 3], [2, 6]),
    ],
)
def test_passes_follow_the_stage_table(number: int, passes: list[int], gathers: list[int]) -> None:
    stage = stage_of(number)
    assert [sum(stage.passes(synchronised).values()) for synchronised in (1, 2, 3)] == passes
    assert [stage.gathers(backwards) for backwards in (1, 3)] == gathers


def test_there_are_four_stages_and_nothing_else_is_one() -> None:
    assert sorted(STAGES) == [0, 1, 2, 3]
    wrong: list[Any] = [4, -1, True, False, "2", None, 1.5]
    for number in wrong:
        with pytest.raises(ValueError, match=r"stage must be one of \[0, 1, 2, 3\]"):
            stage_of(number)


# -- the formulas ------------------------------------------------------------------------------------------------------


def worked_example(world_size: int = 4) -> Layout:
    """Return a layout in fp32: 20 + 100 trainable elements in a bucket of 32 + 112, 10 frozen ones in a bucket of
    16."""
    return build([spec("a", (100,)), spec("frozen", (10,), trainable=False), spec("b", (4, 5))], world_size, 10**6)


@pytest.mark.parametrize(
    ("number", "parameters", "gradients", "optimizer"),
    [
        (0, (144 + 16) * 4, (144 + 48) * 4, 2 * 144 * 4),
        (1, (144 + 16) * 4, 144 * 4, 2 * 48 * 4),
        (2, (144 + 16) * 4, 48 * 4, 2 * 48 * 4),
        (3, (48 + 16) * 4, 48 * 4, 2 * 48 * 4),
    ],
)
def test_bytes_of_a_rank_by_hand(number: int, parameters: int, gradients: int, optimizer: int) -> None:
    """The last of four ranks owns three of nine blocks of 16 elements, and the one block of the frozen bucket."""
    layout = worked_example()
    assert formula_bytes(layout, stage_of(number), 3, lambda bucket: KeptStates(8 if bucket.index else 0)) == {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered_peak": 0 if number < 3 else (144 + 16) * 4,
        "scratch_peak": 3 * 144 * 4,
    }


def test_bytes_count_each_thing_in_its_own_dtype() -> None:
    layout = build([spec("a", (100,), Dtypes(BF16, FP16, FP32, FP64))], 2, 10**6)
    found = formula_bytes(layout, stage_of(2), 0, lambda _: KeptStates(3 * 8, has_masters=True))
    assert found == {
        "parameters": 128 * 2,
        "gradients": 128 * 4 // 2,
        "optimizer": (3 + 1) * 128 * 8 // 2,  # with the master weights
        "gathered_peak": 0,
        "scratch_peak": 3 * 128 * 4,
    }
    assert formula_traffic(layout, stage_of(2), 1, 1) == 2 * 1 * 128 * 2


@pytest.mark.parametrize(("number", "backwards", "synchronised", "passes"), [(0, 1, 1, 2), (1, 3, 3, 4), (2, 3, 1, 2)])
def test_traffic_of_a_step_by_hand(number: int, backwards: int, synchronised: int, passes: int) -> None:
    """Frozen parameters are not sent; padding is."""
    found = formula_traffic(worked_example(), stage_of(number), backwards, synchronised)
    assert found == passes * 3 * (32 + 112) * 4


def test_traffic_of_stage_3_by_hand() -> None:
    """Every unit is gathered for each forward, and again for each backward except the two that are still gathered.

    Gradients are sent as at stage 2.

    With padding: unit 0 has 16 elements and 16 frozen ones, unit 1 has 48, unit 2 has 32, of a parameter that is not
    updated, and unit 3 has 112.
    """
    listed = [
        dataclasses.replace(spec("a", (10,)), unit=0),
        dataclasses.replace(spec("b", (10,), trainable=False), unit=0),
        dataclasses.replace(spec("c", (40,)), unit=1),
        dataclasses.replace(spec("d", (100,)), unit=3),
    ]
    layout, rest = build(listed, 3, 10**6), build([dataclasses.replace(spec("e", (20,)), unit=2)], 3, 10**6)
    everything, here, trainable = 16 + 16 + 48 + 32 + 112, 16 + 16 + 112, 16 + 48 + 112
    for backwards, synchronised in ((1, 1), (3, 3), (3, 1)):
        expected = synchronised * trainable + 2 * backwards * everything - backwards * here
        assert formula_traffic(layout, stage_of(3), backwards, synchronised, rest) == 2 * 4 * expected
    found = [formula_bytes(layout, stage_of(3), rank, lambda _: KeptStates(), rest) for rank in range(3)]
    assert {each["gathered_peak"] for each in found} == {4 * (16 + 16 + 112 + 48)}
    assert sum(each["parameters"] for each in found) == 4 * everything


@given(parameter_lists, bucket_sizes, st.sampled_from([0, 1, 2, 3]))
def test_one_rank_sends_nothing_and_holds_everything(parameters: list[ParameterSpec], nbytes: int, number: int) -> None:
    layout = build(parameters, 1, nbytes)
    assert formula_traffic(layout, stage_of(number), 1, 1) == 0
    whole = sum(bucket.numel * bucket.dtypes.param_dtype.itemsize for bucket in layout.buckets)
    assert formula_bytes(layout, stage_of(number), 0, lambda _: KeptStates())["parameters"] == whole


def test_runs_have_step_counts() -> None:
    """Of 20 + 100 elements with padding between them: two runs; side by side in one group: one run, in two parts."""
    count = KeptStates(scalar_bytes=4, stepped=(1, 1), cut={0})
    _, trained = worked_example(1).buckets
    specs = [worked_example(1).parameters[slot.parameter] for slot in trained.slots]
    assert bucket_bytes(trained, specs, stage_of(0), 0, count).scalars == 2 * 4
    assert bucket_bytes(trained, specs, stage_of(0), 0, dataclasses.replace(count, stepped=(0, 1))).scalars == 4
    long = build([spec("a", (1 << 16,)), spec("b", (1 << 16,))], 1, 10**9)
    counts = {
        cut: bucket_bytes(long.buckets[0], long.parameters, stage_of(0), 0, dataclasses.replace(count, cut=cut))
        for cut in (frozenset(), frozenset({0}))
    }
    assert [each.scalars for each in counts.values()] == [4, 2 * 4]


def test_a_shard_is_a_rank_s_part_to_the_nearest_byte() -> None:
    assert [sharded_bytes(10, world_size) for world_size in (1, 3, 4, 6)] == [10, 3, 2, 2]
    assert sharded_bytes(3 * (2**60 + 1), 3) == 2**60 + 1, "no rounding to floating point on the way"
