"""Ranks own a bucket in even intervals, and whatever part of it is taken, each element keeps its owner."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.core.buckets import build
from zero.core.formulas import sharded_bytes
from zero.core.layout import ALIGNMENT_BYTES, CUT_EVERY, Dtypes, ParameterSpec

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
        assert (sum(sizes), min(sizes) >= 0, max(sizes)) == (bucket.numel, True, bucket.cuts.largest())
        assert (max(sizes) - min(sizes)) * narrowest <= ALIGNMENT_BYTES
        pieces = [piece for rank in range(world_size) for piece in bucket.pieces(*bucket.owned(rank))]
        for number, slot in enumerate(bucket.slots):  # one without elements has one owner
            bounds = [slot.offset, *(piece.end for piece in pieces if piece.slot == number)]
            assert [(p.begin, p.end) for p in pieces if p.slot == number] == list(itertools.pairwise(bounds))
            assert bounds == (sorted(set(bounds)) if slot.numel else [slot.offset] * 2)
            assert bounds[-1] == slot.end


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


@given(
    st.lists(st.integers(2 * CUT_EVERY, 9 * CUT_EVERY) | st.just(2**31 + 5), min_size=1, max_size=9),
    world_sizes,
    bucket_sizes,
    st.sampled_from(PLAIN),
    st.sampled_from([*BOUNDARIES]),
)
def test_where_parameters_consist_of_blocks_every_piece_begins_with_one_and_is_large(
    sizes: list[int], world_size: int, nbytes: int, dtypes: Dtypes, device: str
) -> None:
    """Whether some have one owner, and where others end, changes nothing of that."""
    described = [
        spec(f"p{n}", (size,), dtypes, index=n, device=device, blocks=n % 4 != 3, one_owner=n % 4 == 3)
        for n, size in enumerate(sizes)
    ]
    for bucket in build(described, world_size, nbytes).buckets:
        (blocks,) = {described[slot.parameter].blocks for slot in bucket.slots}
        bounds = list(bucket.cuts)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, bucket.numel, world_size + 1)
        assert bounds == sorted(bounds)
        pieces = [piece for rank in range(world_size) for piece in bucket.pieces(*bucket.owned(rank))]
        assert sum(piece.numel for piece in pieces) == sum(slot.numel for slot in bucket.slots)
        for piece in pieces if blocks else ():
            slot = bucket.slots[piece.slot]
            assert (piece.begin - slot.offset) % CUT_EVERY == 0
            assert piece.numel >= CUT_EVERY
            assert piece.numel % CUT_EVERY == 0 or piece.end == slot.end
        if blocks:
            most = max(slot.numel - (slot.numel // CUT_EVERY - 1) * CUT_EVERY for slot in bucket.slots)
            padding = max(bucket.numel - sum(slot.numel for slot in bucket.slots), 0)
            assert bucket.cuts.largest() <= bucket.numel / world_size + most + padding
