"""Whole parameters, and blocks of others, have one owner each: even loads, cuts between them, and nothing moves when
some are added."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from zero.core.buckets import build, extended, loads
from zero.core.formulas import KeptStates, busiest_link, formula_bytes
from zero.core.layout import Dtypes, Layout, OwnerCuts, ParameterSpec, share_blocks, step_work
from zero.core.stage import STAGES

from .drawn import BOUNDARIES, MIXED, PLAIN, spec

SHAPES = [(), (1,), (0, 3), (7,), (64, 3), (3, 64), (20, 20), (5, 6, 7), (300, 40), (1000,)]
ANY = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=30)
RANKS = st.integers(1, 9)
CAPS = st.sampled_from([1, 4000, 1 << 30])
Shapes = list[tuple[int, ...]]


def specs_of(shapes: Shapes, first: int = 0, *, dtypes: Dtypes = PLAIN[1]) -> list[ParameterSpec]:
    return [
        spec(f"p{number}", shape, dtypes, number % 5 != 4, index=number, unit=number % 3, one_owner=True)
        for number, shape in enumerate(shapes, start=first)
    ]


def held(layout: Layout, *, trainable: bool | None = None) -> list[int]:
    """Return the bytes that each rank owns."""
    found = [0] * layout.world_size
    for bucket, number, slot in layout.slots():
        described = layout.parameters[slot.parameter]
        if trainable in (None, described.trainable):
            found[bucket.owner(number)] += described.master_bytes
    return found


@given(ANY, ANY, RANKS, CAPS, st.sampled_from([PLAIN[1], MIXED[0]]), st.booleans())
def test_no_rank_has_more_than_its_share_and_the_largest_parameter(
    shapes: Shapes, more: Shapes, ranks: int, cap: int, dtypes: Dtypes, across: bool
) -> None:
    layout = build(specs_of(shapes, dtypes=dtypes), ranks, cap, across_units=across)
    for trainable in (None, True):
        sizes = [each.master_bytes for each in layout.parameters if trainable in (None, each.trainable)]
        found = held(layout, trainable=trainable)
        assert sum(found) == sum(sizes)
        assert max(found) <= sum(sizes) / ranks + max(sizes, default=0)
    longer = extended(layout, specs_of(more, len(shapes), dtypes=dtypes), cap)
    assert longer.buckets[: len(layout.buckets)] == layout.buckets
    sizes = [each.master_bytes for each in longer.parameters]
    assert max(held(longer)) <= sum(sizes) / ranks + max(sizes)


@given(ANY, RANKS, CAPS, st.booleans())
def test_cuts_fall_between_slots_which_lie_in_the_order_of_their_owners(
    shapes: Shapes, ranks: int, cap: int, across: bool
) -> None:
    cut = [spec(f"c{number}", (50,), index=len(shapes) + number) for number in range(4)]
    layout = build([*specs_of(shapes), *cut], ranks, cap, across_units=across)
    for bucket in layout.buckets:
        (whole,) = {layout.parameters[slot.parameter].one_owner for slot in bucket.slots}
        assert isinstance(bucket.cuts, OwnerCuts) == whole
        if not whole:
            continue
        bounds = list(bucket.cuts)
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, bucket.numel)
        pieces = [piece for rank in range(ranks) for piece in bucket.pieces(*bucket.owned(rank)) if piece.numel]
        assert [(p.slot, p.numel) for p in pieces] == [(n, s.numel) for n, s in enumerate(bucket.slots) if s.numel]
        for number, slot in enumerate(bucket.slots):
            low, high = bucket.owned(bucket.owner(number))
            assert low <= slot.offset <= slot.end <= high
        assert len({layout.unit(slot) for slot in bucket.slots}) == 1


def test_loads_by_hand() -> None:
    """The largest are given out first, whatever their order; with equal bytes, squares are spread by their work."""
    for shapes in ([(32,), (32,), (64,)], [(64,), (32,), (32,)]):
        assert held(build(specs_of([*shapes]), 2, 1 << 30)) == [256, 256]
    layout = build(specs_of([(20, 20), (20, 20), (4, 100), (4, 100)]), 2, 1 << 30)
    assert step_work((20, 20)) == 8000 > step_work((100, 4)) == step_work((4, 100)) == 1600
    assert [loads(layout)[rank] for rank in range(2)] == [(3200, 9600)] * 2
    layout = build(specs_of([(64, 3), (16,), (16,)]), 3, 1 << 30)
    busiest, even = busiest_link(layout, STAGES[2], 1)
    assert busiest == 2 * (4 + 4) * 64 * 3  # two peers, a reduction and a gather
    assert even == 2 * 8 * (64 * 3 + 32) // 3 + (2 * 8 * (64 * 3 + 32) % 3 > 1)
    found = [formula_bytes(layout, STAGES[3], rank, lambda _: KeptStates(8)) for rank in range(3)]
    assert sum(each["optimizer"] for each in found) == 8 * sum(bucket.numel for bucket in layout.buckets)


# -- blocks ------------------------------------------------------------------------------------------------------------

STACK = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))


@given(
    st.lists(STACK, min_size=1, max_size=9),
    RANKS,
    CAPS,
    st.sampled_from([PLAIN[1], *MIXED]),
    st.sampled_from([*BOUNDARIES]),
)
def test_blocks_have_one_owner_each_and_are_aligned_as_in_their_parameter(
    shapes: list[tuple[int, int, int]], ranks: int, cap: int, dtypes: Dtypes, device: str
) -> None:
    """No rank has more of a bucket than its share and the largest blocks between two places where cuts may lie."""
    parameters = [
        spec(f"p{n}", shape, dtypes, n % 4 != 3, index=n, device=device, stack=(shape[1:],) * shape[0])
        for n, shape in enumerate(shapes)
    ]
    found: list[int] = [0] * ranks
    for bucket in build(parameters, ranks, cap).buckets:
        narrowest = min(dtype.itemsize for dtype in dataclasses.astuple(dtypes))
        places, begins = list[int](), list[int]()
        for slot in bucket.slots:
            stack = parameters[slot.parameter].stack
            ends = [slot.offset + end for end in itertools.accumulate(map(math.prod, stack), initial=0)]
            begins += ends[:-1]
            places += [begin for begin in ends[:-1] if begin * narrowest % BOUNDARIES[device] == 0]
            for begin, end in itertools.pairwise(ends):
                (owner,) = [r for r in range(ranks) if bucket.cuts[r] <= begin < bucket.cuts[r + 1]]
                assert end <= bucket.cuts[owner + 1]
                found[owner] += (end - begin) * dtypes.master_dtype.itemsize
        assert set(bucket.cuts) <= {0, *places, bucket.numel}
        largest = max(end - begin for begin, end in itertools.pairwise((*places, bucket.numel)))
        assert bucket.cuts.largest() <= bucket.numel / ranks + largest
    assert {r: nbytes for r, (nbytes, _) in loads(build(parameters, ranks, cap)).items()} == {
        r: nbytes for r, nbytes in enumerate(found) if nbytes
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_the_rank_that_owns_most_of_a_bucket_owns_as_little_as_possible(
    sizes: list[int], held_before: list[int]
) -> None:
    held, ranks = [*held_before], len(held_before)
    owners = share_blocks(sizes, held)
    assert owners == sorted(owners)
    shares = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert held == [before + share for before, share in zip(held_before, shares, strict=True)]
    needed, filled = 1, 0
    for size in sizes:  # with less than the largest share in one rank the blocks need more ranks than there are
        if filled + size > max(shares) - 1:
            needed, filled = needed + 1, 0
        filled += size
    assert needed > ranks or max(sizes) == max(shares)


def test_buckets_even_each_other_out() -> None:
    """Of 8 blocks on 6 ranks each owns one or two, and after three buckets four; of 8 on 16 every rank owns one."""
    for blocks, ranks, buckets, each in ((8, 6, 3, 4), (8, 16, 2, 1), (6, 4, 2, 3), (9, 4, 4, 9)):
        held = [0] * ranks
        for _ in range(buckets):
            share_blocks([7] * blocks, held)
        assert held == [7 * each] * ranks
    held = [21, 0, 0]
    assert share_blocks([7] * 6, held) == [0, 0, 1, 1, 2, 2], "one bucket stays even"
    assert share_blocks([7] * 4, held) == [1, 1, 2, 2]
    layout = build([spec(f"p{n}", (8, 4, 8), index=n, stack=((4, 8),) * 8) for n in range(2)], 16, 1)
    longer = extended(layout, [spec("p2", (8, 4, 8), index=2, stack=((4, 8),) * 8)], 1)
    assert longer.buckets[:2] == layout.buckets
    assert [nbytes for nbytes, _ in loads(layout).values()] == [128] * 16
