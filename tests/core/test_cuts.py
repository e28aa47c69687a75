"""Ranks own a bucket in even intervals, and whatever part of it is taken, each element keeps its owner."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.core.buckets import build
from zero.core.cuts import Cuts
from zero.core.layout import ALIGNMENT_BYTES, BucketSpec, ParameterSpec, Piece, Slot, sharded_bytes

from .drawn import BOUNDARIES, PLAIN, bucket_sizes, lists_with_units, spec, world_sizes

many = settings(max_examples=3 * settings.default.max_examples)


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_the_pieces_of_all_ranks_tile_every_slot_at_even_cuts(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    for bucket in build(parameters, world_size, nbytes, across_units=across).buckets:
        narrowest = min(dtype.itemsize for dtype in dataclasses.astuple(bucket.dtypes))
        sizes = [high - low for low, high in map(bucket.owned, range(world_size))]
        assert (bucket.world_size, bucket.cuts[0], bucket.cuts[-1]) == (world_size, 0, bucket.numel)
        assert all(bound * narrowest % ALIGNMENT_BYTES == 0 for bound in bucket.cuts)
        assert sum(sizes) == bucket.numel
        assert min(sizes) >= 0
        assert (max(sizes) - min(sizes)) * narrowest <= ALIGNMENT_BYTES
        owners: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(bucket.slots))}
        for low, high in map(bucket.owned, range(world_size)):
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
            bounds = [slot.offset, *(end for _, end in owners[number])]
            assert owners[number] == list(itertools.pairwise(bounds))
            assert bounds == sorted(set(bounds))
            assert bounds[-1] == slot.end
        assert [(p.begin, p.end) for p in bucket.pieces(0, bucket.numel)] == [(s.offset, s.end) for s in bucket.slots]


@given(lists_with_units, world_sizes, bucket_sizes, st.data())
@many
def test_a_part_of_a_bucket_has_the_wholes_slots_and_owners(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, data: st.DataObject
) -> None:
    for bucket in build(parameters, world_size, nbytes, across_units=True).buckets:
        first = data.draw(st.integers(0, len(bucket.slots) - 1))
        last = data.draw(st.integers(first + 1, len(bucket.slots)))
        begin = bucket.slots[first].offset
        end = bucket.slots[last].offset if last < len(bucket.slots) else bucket.numel
        part = bucket.part(first, last)
        assert (part.numel, part.world_size) == (end - begin, world_size)
        moved = [dataclasses.replace(slot, offset=slot.offset + begin) for slot in part.slots]
        assert tuple(moved) == bucket.slots[first:last]
        for rank in range(world_size):
            low, high = part.owned(rank)
            here, there = max(bucket.cuts[rank], begin), min(bucket.cuts[rank + 1], end)
            assert (low + begin, high + begin) == (here, there) if here < there else low == high
            expected = [
                Piece(piece.slot - first, piece.begin - begin, piece.end - begin)
                for piece in bucket.pieces(*bucket.owned(rank))
                if piece.numel and first <= piece.slot < last
            ]
            assert [piece for piece in part.pieces(low, high) if piece.numel] == expected


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_the_parts_of_a_bucket_by_unit_tile_it(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    layout = build(parameters, world_size, nbytes, across_units=across)
    if across:
        without = [dataclasses.replace(parameter, unit=0) for parameter in parameters]
        assert layout.buckets == build(without, world_size, nbytes).buckets
    for bucket in layout.buckets:
        units, slots, place = [], [], 0
        for unit, first, last in layout.unit_spans(bucket):
            part = bucket.part(first, last)
            assert {parameters[slot.parameter].unit for slot in part.slots} == {unit}
            assert (part.index, part.dtypes, part.device) == (bucket.index, bucket.dtypes, bucket.device)
            for dtype, slot in itertools.product(dataclasses.astuple(part.dtypes), part.slots):
                assert slot.offset * dtype.itemsize % BOUNDARIES[bucket.device] == 0
            slots += [dataclasses.replace(slot, offset=place + slot.offset) for slot in part.slots]
            units.append(unit)
            place += part.numel
        assert (tuple(slots), place) == (bucket.slots, bucket.numel)
        assert all(one != other for one, other in itertools.pairwise(units)), "neighbours are one run"
        assert across or (len(units) == 1 and bucket.part(0, len(bucket.slots)) == bucket)


def owners_of(bucket: BucketSpec) -> list[list[int]]:
    return [[piece.slot for piece in bucket.pieces(*bucket.owned(rank))] for rank in range(bucket.world_size)]


def test_a_slot_without_elements_has_one_owner_wherever_it_lies() -> None:
    class ByHand(Cuts):
        bounds, world_size = (0, 0, 16, 16), 3

        def bound(self, rank: int) -> int:
            return self.bounds[rank]

    last = BucketSpec(0, PLAIN[1], "cpu", (Slot(0, 0, 16), Slot(1, 16, 0)), 16, ByHand())
    assert owners_of(last) == [[], [0, 1], []]
    for world_size in (1, 2, 7):
        (alone,) = build([spec("a", (0, 3)), spec("b", (0,))], world_size, 1000).buckets
        assert sorted(owners_of(alone)) == [[]] * (world_size - 1) + [[0, 1]]
        parameters = [spec("empty", (0,), unit=2), spec("also empty", (0, 3), unit=1), spec("full", (40,), unit=0)]
        layout = build(parameters, world_size, 2**20, across_units=True)
        (bucket,) = layout.buckets
        parts = [(unit, bucket.part(first, last)) for unit, first, last in layout.unit_spans(bucket)]
        found = [(unit, [slot.parameter for slot in part.slots], part.numel) for unit, part in parts]
        assert found == [(0, [2], bucket.numel), (1, [1], 0), (2, [0], 0)]
        for rank in range(world_size):
            assert parts[0][1].owned(rank) == bucket.owned(rank)


def test_cuts_by_hand() -> None:
    (bucket,) = build([spec(name, (64,)) for name in "abcd"], 2, 1 << 20).buckets
    assert [bucket.owned(rank) for rank in range(2)] == [(0, 128), (128, 256)]
    assert [bucket.part(1, 3).owned(rank) for rank in range(2)] == [(0, 64), (64, 128)]
    assert [bucket.part(1, 2).owned(rank) for rank in range(2)] == [(0, 64), (64, 64)]
    world_size = 10**15  # a list of as many bounds would fit in no memory
    (bucket,) = build([spec("a", (10**18,))], world_size, 1).buckets
    assert [bucket.owned(rank) for rank in (0, world_size - 1)] == [(0, 992), (10**18 - 1008, 10**18)]
    assert bucket.part(0, 1).owned(1) == bucket.owned(1)
    assert bucket.even_cuts(3).bound(3) == bucket.numel
    assert [sharded_bytes(10, ranks) for ranks in (1, 3, 4, 6)] == [10, 3, 2, 2]
    assert sharded_bytes(3 * (2**60 + 1), 3) == 2**60 + 1, "no rounding to floating point on the way"
