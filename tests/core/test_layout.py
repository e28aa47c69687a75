"""Every parameter has one slot, in a bucket within the cap, which ranks own in even intervals or block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zero.config import Config
from zero.core.buckets import DEFAULT_CAP_MB, MANY_RANKS, MIB, BucketSizes, build, extended, loads
from zero.core.formulas import KeptStates, busiest_link, formula_bytes, formula_traffic, peak_bounds, sharded_bytes
from zero.core.grain import BY_BLOCK, CUT_EVERY, WHOLE, stacked
from zero.core.layout import (
    ALIGNMENT_BYTES,
    BucketSpec,
    Dtypes,
    EvenCuts,
    Layout,
    OwnerCuts,
    ParameterSpec,
    Piece,
    Slot,
    share_blocks,
    step_work,
)
from zero.core.runs import part_begins
from zero.core.stage import STAGES, stage_of

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PLAIN = [Dtypes.all(dtype) for dtype in (FP64, FP32, BF16)]
MIXED = [Dtypes(BF16, BF16, FP32, FP32), Dtypes(FP16, FP32, FP32, FP32)]
SHAPES = [
    *[(), (1,), (0, 3), (16,), (17,), (7, 13), (4, 4, 4), (127,), (8191,)],
    *[(2**31 + 5,), (3, 2**31 + 11), (2**31, 2**29 + 1)],
]
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


def padded(parameter: ParameterSpec) -> int:
    """Return the elements of a parameter's slot with its padding, from the definition."""
    boundary, sizes = BOUNDARIES[parameter.device], [dtype.itemsize for dtype in astuple(parameter.dtypes)]
    return next(n for n in itertools.count(parameter.numel) if not any(n * size % boundary for size in sizes))


_one_parameter = st.tuples(
    st.sampled_from(SHAPES) | st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(PLAIN + MIXED),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 3),
)
lists_with_units = st.tuples(st.lists(_one_parameter, max_size=12), st.sampled_from([*BOUNDARIES])).map(
    lambda drawn: [
        spec(f"p{n}", shape, dtypes, trainable, group=group, unit=unit, index=n, device=drawn[1])
        for n, (shape, dtypes, trainable, group, unit) in enumerate(drawn[0])
    ]
)
world_sizes = st.integers(1, 8)
bucket_sizes = st.sampled_from([1, 63, 64, 65, 1000, 4096, 2**20, 2**33, 2**80]) | st.integers(1, 3000)
many = settings(max_examples=3 * settings.default.max_examples)


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_slots_lie_side_by_side_on_boundaries_of_every_dtype(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    layout = build(parameters, world_size, nbytes, across_units=across)
    placed = [slot for _, _, slot in layout.slots()]
    assert sorted(slot.parameter for slot in placed) == list(range(len(parameters)))
    assert all(slot.numel == parameters[slot.parameter].numel for slot in placed)
    assert layout.parameters == tuple(parameters)
    assert layout.numel == sum(math.prod(parameter.shape) for parameter in parameters)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        place, sizes = 0, [dtype.itemsize for dtype in astuple(bucket.dtypes)]
        for slot in bucket.slots:
            assert slot.offset == place
            assert all(slot.offset * size % BOUNDARIES[bucket.device] == 0 for size in sizes)
            place += padded(parameters[slot.parameter])
        boundary = BOUNDARIES[bucket.device] // min(sizes)
        least, lengths = max(place, boundary), {high - low for low, high in itertools.pairwise(bucket.cuts)}
        if bucket.device == "cpu":
            assert bucket.numel == least
        else:  # there all ranks own equally much
            even = world_size * BOUNDARIES["cpu"] // min(sizes)
            assert bucket.numel == next(numel for numel in itertools.count(least, boundary) if numel % even == 0)
            assert len(lengths) == 1


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_buckets_are_homogeneous_full_within_their_cap_and_complete_in_order(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    layout = build(parameters, world_size, nbytes, across_units=across)
    before: dict[Any, BucketSpec] = {}
    for bucket in layout.buckets:
        members = [parameters[slot.parameter] for slot in bucket.slots]
        first, size = members[0], bucket.dtypes.param_dtype.itemsize
        units = {0 if across else member.unit for member in members}
        (kind,) = {(m.dtypes, m.device, m.trainable, *units) for m in members}
        assert kind[:2] == (bucket.dtypes, bucket.device)
        if sum(slot.numel > 0 for slot in bucket.slots) > 1:
            assert sum(map(padded, members)) * size <= nbytes  # without the padding at the end
        if kind in before:  # what begins a bucket did not fit into the one before
            filled = sum(padded(parameters[slot.parameter]) for slot in before[kind].slots)
            assert (filled + padded(first)) * size > nbytes
        before[kind] = bucket
    inside = [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets]
    assert all(members == sorted(members, reverse=True) for members in inside)
    arrived: set[int] = set()
    completed = []
    for position in reversed(range(len(parameters))):  # a backward finishes the last parameter first
        arrived.add(position)
        completed += [members for members in inside if arrived >= set(members) and members not in completed]
    assert inside == completed


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(PLAIN + MIXED))
def test_an_exact_fit_is_accepted_and_one_byte_less_is_not(a: int, b: int, dtypes: Dtypes) -> None:
    two = [spec("a", (a,), dtypes), spec("b", (b,), dtypes)]
    fit = sum(padded(parameter) for parameter in two) * dtypes.param_dtype.itemsize
    assert len(build(two, 2, fit).buckets) == 1
    assert len(build(two, 2, fit - 1).buckets) == 2


@pytest.mark.law("sizes")
def test_nothing_ends_at_two_to_the_31() -> None:
    large = 5 * 2**31 + 7
    listed = [spec("small", (3,)), spec("large", (5, large // 5), Dtypes.all(BF16)), spec("wide", (large,))]
    wide, narrow = build(listed, 8, 1).buckets[:2]
    assert wide.numel == -(-large // 16) * 16
    assert narrow.numel == -(-(large // 5 * 5) // 32) * 32
    begin, end = wide.owned(7)
    assert begin > 2**33
    assert list(wide.pieces(begin, end)) == [Piece(0, begin, large)]
    (bucket,) = build([spec("last", (5,)), spec("first", (2**31 + 3,))], 4, 2**40).buckets
    assert [slot.offset for slot in bucket.slots] == [0, 2**31 + 16]
    assert bucket.numel == 2**31 + 32
    assert bucket.pieces(*bucket.owned(3))[-1] == Piece(1, 2**31 + 16, 2**31 + 21)


def of_dtypes(**changed: Any) -> Callable[[ParameterSpec], dict[str, Any]]:
    return lambda s: {"dtypes": replace(s.dtypes, **changed)}


CHANGES: dict[str, Callable[[ParameterSpec], dict[str, Any]]] = {
    "name": lambda s: {"names": (s.names[0] + "x",)},
    "a further name": lambda s: {"names": (*s.names, "tied")},
    "shape": lambda s: {"shape": (*s.shape, 1), "stride": (*s.stride, 1)},
    "strides": lambda s: {"stride": (*s.stride, 77)},
    "compute dtype": of_dtypes(param_dtype=torch.int64),
    "travel dtype": of_dtypes(reduce_dtype=torch.int64),
    "accumulator": of_dtypes(accumulate_dtype=torch.int64),
    "master dtype": of_dtypes(master_dtype=torch.int64),
    "group": lambda s: {"group": s.group + 1},
    "unit": lambda s: {"unit": s.unit + 1},
    "trainable": lambda s: {"trainable": not s.trainable},
    "kind of device": lambda s: {"device": "mps:0"},
}


@pytest.mark.law("agreement at construction")
@given(lists_with_units)
def test_the_line_changes_with_every_property_that_ranks_share_and_no_other(parameters: list[ParameterSpec]) -> None:
    for parameter in parameters:
        for what, change in CHANGES.items():
            assert replace(parameter, **change(parameter)).line() != parameter.line(), what
        cards = [replace(parameter, device=f"cuda:{card}") for card in (0, 1)]
        assert cards[0].line() == cards[1].line()
        assert replace(parameter, index=parameter.index + 5).line() == parameter.line()


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_the_pieces_of_all_ranks_tile_every_slot_at_even_cuts(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    for bucket in build(parameters, world_size, nbytes, across_units=across).buckets:
        narrowest = min(dtype.itemsize for dtype in astuple(bucket.dtypes))
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


def test_cuts_of_parts_and_of_ranks_of_which_no_list_would_fit_in_memory() -> None:
    (bucket,) = build([spec(name, (64,)) for name in "abcd"], 2, 1 << 20).buckets
    assert [bucket.part(1, 3).owned(rank) for rank in range(2)] == [(0, 64), (64, 128)]
    assert [bucket.part(1, 2).owned(rank) for rank in range(2)] == [(0, 64), (64, 64)]
    (bucket,) = build([spec("a", (10**18,))], 10**15, 1).buckets
    assert [bucket.owned(rank) for rank in (0, 10**15 - 1)] == [(0, 992), (10**18 - 1008, 10**18)]
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
    described = [
        spec(f"p{n}", (size,), dtypes, index=n, device=device, grain=WHOLE if n % 4 == 3 else BY_BLOCK)
        for n, size in enumerate(sizes)
    ]
    for bucket in build(described, world_size, nbytes).buckets:
        (blocks,) = {described[slot.parameter].grain.unit == "block" for slot in bucket.slots}
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


FEW = [(), (1,), (0, 3), (7,), (64, 3), (3, 64), (20, 20), (5, 6, 7), (300, 40), (1000,)]
ANY = st.lists(st.sampled_from(FEW), min_size=1, max_size=30)
RANKS, CAPS = st.integers(1, 9), st.sampled_from([1, 4000, 1 << 30])
Shapes = list[tuple[int, ...]]


def specs_of(shapes: Shapes, first: int = 0, *, dtypes: Dtypes = PLAIN[1]) -> list[ParameterSpec]:
    return [
        spec(f"p{number}", shape, dtypes, number % 5 != 4, index=number, unit=number % 3, grain=WHOLE)
        for number, shape in enumerate(shapes, start=first)
    ]


def held(layout: Layout, *, trainable: bool | None = None) -> list[int]:
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
        (whole,) = {layout.parameters[slot.parameter].grain == WHOLE for slot in bucket.slots}
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
        spec(f"p{n}", shape, dtypes, n % 4 != 3, index=n, device=device, grain=stacked((shape[1:],) * shape[0]))
        for n, shape in enumerate(shapes)
    ]
    found: list[int] = [0] * ranks
    for bucket in build(parameters, ranks, cap).buckets:
        narrowest = min(dtype.itemsize for dtype in astuple(dtypes))
        places, begins = list[int](), list[int]()
        for slot in bucket.slots:
            stack = parameters[slot.parameter].grain.stack
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
    for blocks, ranks, buckets, each in ((8, 6, 3, 4), (8, 16, 2, 1), (6, 4, 2, 3), (9, 4, 4, 9)):
        held = [0] * ranks
        for _ in range(buckets):
            share_blocks([7] * blocks, held)
        assert held == [7 * each] * ranks
    held = [21, 0, 0]
    assert share_blocks([7] * 6, held) == [0, 0, 1, 1, 2, 2], "one bucket stays even"
    assert share_blocks([7] * 4, held) == [1, 1, 2, 2]
    layout = build([spec(f"p{n}", (8, 4, 8), index=n, grain=stacked(((4, 8),) * 8)) for n in range(2)], 16, 1)
    longer = extended(layout, [spec("p2", (8, 4, 8), index=2, grain=stacked(((4, 8),) * 8))], 1)
    assert longer.buckets[:2] == layout.buckets
    assert [nbytes for nbytes, _ in loads(layout).values()] == [128] * 16


WIDTH = 3000  # a square of it is 34.3 MiB in fp32, 17.2 in bf16
SQUARE = 4 * WIDTH * WIDTH
PAIR, TWELFTH = -(-2 * SQUARE // MIB), -(-12 * SQUARE // 12 // MIB)  # MiB of the larger unit, and of the whole
QUARTER = -(-12 * SQUARE // 4 // MIB)


def two_units() -> nn.Module:
    """Return two units of one and of two squares, and a root's rest that is larger than both."""
    with torch.device("meta"):
        square, pair = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        model = nn.Module()
        model.units, model.head = nn.ModuleList([square, pair]), nn.Linear(WIDTH, 9 * WIDTH, bias=False)
    return model


def config(module: nn.Module | None, stage: int = 3, **changes: Any) -> Config:
    given: dict[str, Any] = {"stage": stage, "module": module, "process_group": None, "bucket_cap_mb": "auto"}
    return Config(**{**given, **changes})


def sizes_of(found: Config, device: str = "cpu", ranks: int = 2, hosts: int = 1) -> BucketSizes:
    listed = [torch.empty(3, device="meta")] if found.module is None else list(found.module.parameters())
    precisions = found.precisions()
    return found.bucket_sizes(listed, torch.device(device), precisions, ranks=ranks, world_size=ranks, hosts=hosts)


def mib(most: int, first: int | None = None) -> BucketSizes:
    return BucketSizes(most * MIB, (most if first is None else first) * MIB)


with torch.device("meta"):
    LARGE = nn.Linear(1 << 16, 1 << 16)  # 16 GiB
CAPPED, MANY = mib(TWELFTH, DEFAULT_CAP_MB), (1, MANY_RANKS, 8)
ROWS: list[tuple[nn.Module, Any, str, tuple[int, int, int], BucketSizes]] = [  # cap; device; stage, ranks, hosts
    (two_units(), "auto", "cpu", (3, MANY_RANKS - 1, 1), mib(DEFAULT_CAP_MB)),
    (two_units(), "auto", "cpu", (0, MANY_RANKS, 1), mib(PAIR)),
    (two_units(), None, "cpu", (3, 10_000, 1), mib(DEFAULT_CAP_MB)),
    *[(two_units(), cap, "cuda", (3, ranks, 8), mib(PAIR)) for cap, ranks in (("auto", 2), (None, MANY_RANKS))],
    *[(two_units(), "auto", "cuda", (stage, 8, 1), CAPPED) for stage in (0, 2)],
    *[(two_units(), None, "cuda", (stage, 1, 1), mib(QUARTER)) for stage in (0, 3)],  # one rank gathers nothing
    *[(two_units(), cap, "cuda", MANY, found) for cap, found in (("auto", mib(PAIR)), (None, CAPPED))],
    *[(LARGE, "auto", "cuda", (2, 8, hosts), mib(512 // hosts, DEFAULT_CAP_MB)) for hosts in (1, 2)],
    (nn.Linear(3, 3), "auto", "cuda", (2, 8, 2), mib(25, DEFAULT_CAP_MB)),
    (LARGE, None, "cuda", (2, 1, 1), mib(2048)),
]


def test_auto_is_a_unit_or_a_twelfth_on_an_accelerator_and_where_ranks_are_many() -> None:
    for module, cap, device, (stage, ranks, hosts), expected in ROWS:
        assert sizes_of(config(module, stage, bucket_cap_mb=cap), device, ranks, hosts) == expected


def test_the_first_bucket_is_smaller_and_a_later_group_has_none() -> None:
    shapes = [tuple(weight.shape) for weight in two_units().parameters()]
    specs = [spec(f"p{index}", shape, index=index, device="cuda") for index, shape in enumerate(shapes)]
    square = specs[0].numel * 4
    assert [len(bucket.slots) for bucket in build(specs, 2, 100 * square).buckets] == [3]
    layout = build(specs, 2, 100 * square, first_bytes=square)
    assert [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets] == [[2], [1, 0]]
    more = [replace(spec, index=spec.index + 3) for spec in specs]
    assert len(extended(layout, more, 100 * square, first_bytes=square).buckets) == 3
    frozen = [*specs[:2], replace(specs[2], trainable=False)]
    assert [len(bucket.slots) for bucket in build(frozen, 2, 3 * square, first_bytes=square).buckets] == [1, 1, 1]


def test_a_number_is_the_size_everywhere_and_auto_needs_a_module() -> None:
    for device in ("cpu", "cuda"):
        assert sizes_of(config(two_units(), bucket_cap_mb=0.5), device) == BucketSizes(MIB // 2, MIB // 2)
    assert sizes_of(config(None, 2, bucket_cap_mb=None), "cuda") == mib(25)
    with pytest.raises(ValueError, match="pass the module itself, or parameters and module=model, or a number"):
        config(None)
    for value in (0, -1, float("nan"), float("inf"), "Auto", [25]):
        with pytest.raises(ValueError, match='a positive number of MiB, None or "auto"'):
            config(two_units(), bucket_cap_mb=value)


LIMIT = 2**31 - 1


@pytest.mark.law("sizes")
@pytest.mark.parametrize("stage", sorted(STAGES))
def test_bytes_and_traffic_beyond_two_to_the_31_are_exact(stage: int) -> None:
    shapes = [(3,), (7, LIMIT), (5, 2**30 + 3), (), (0, 4), (LIMIT, 3), (1,)]
    world_size = 4
    specs = [spec(f"p{index}", shape, index=index, device="meta") for index, shape in enumerate(shapes)]
    layout = build(specs, world_size, 2**50)
    (bucket,) = layout.buckets
    found = formula_bytes(layout, STAGES[stage], 3, lambda _: KeptStates(2 * 4))
    psi = 7 * LIMIT + 5 * (2**30 + 3) + 3 * LIMIT + 5
    assert layout.numel == psi
    padded, slack = bucket.numel, 512 * len(layout.parameters)
    assert 4 * psi <= 4 * padded <= 4 * psi + slack
    last = 16 * -(-padded // 16 // world_size)  # the last rank has the largest shard
    owned = [4 * padded if stage < number else 4 * last for number in (3, 2, 1)]
    assert found["parameters"] == owned[0]
    assert found["gradients"] == owned[1] + (4 * last if stage == 0 else 0)
    assert found["optimizer"] == 2 * owned[2]
    passes = 1 + 1 if stage == 3 else 2  # at stage 3 the root unit is gathered for the forward only
    assert formula_traffic(layout, STAGES[stage], 1, 1) == 3 * passes * 4 * padded


UNITS = {0: 16, 1: 32, 2: 64, 3: 128}  # elements of each unit: one parameter, whose slot needs no padding
KEPT = {None: 0, 4: 0, 2: sum(UNITS.values()) // 2, 1: 32}  # by what stays: nothing, this rank's shard, half, all


@pytest.mark.parametrize("stays", KEPT)
def test_at_most_the_root_two_units_and_what_stays_for_the_backward_are_gathered(stays: int | None) -> None:
    """Of four ranks. If all stays, every unit is there at once: the two largest, and the smallest as well."""
    layout = build([spec(f"unit {n}", (numel,), unit=n) for n, numel in UNITS.items()], 4, 10**6)
    found = peak_bounds(layout, stage_of(3), None, stays)
    assert found["gathered_peak"] == 4 * (16 + 64 + 128 + KEPT[stays])
    assert found["scratch_peak"] == 3 * 4 * 128
    exposed = peak_bounds(layout, stage_of(3), None, stays, shards_are_exposed=True)
    assert exposed["scratch_peak"] - found["scratch_peak"] == 4 * (16 + 64 + 128) // 4
    assert peak_bounds(layout, stage_of(2), None, stays)["gathered_peak"] == 0


def test_an_invalid_bucket_or_layout_cannot_be_built() -> None:
    good = BucketSpec(0, PLAIN[1], "cpu", (Slot(0, 0, 5), Slot(1, 16, 7)), 32, EvenCuts(32, 2, 16))
    bad_buckets: list[dict[str, Any]] = [
        *[{"cuts": cuts} for cuts in (EvenCuts(48, 2, 16), OwnerCuts(32, 2, (0, 1), (16, 16)))],
        *[{"cuts": cuts, "numel": cuts.numel} for cuts in (EvenCuts(16, 2, 16), EvenCuts(40, 1, 8))],
        {"slots": (Slot(0, 16, 5),)},
        *[{"slots": (Slot(0, 0, 5), Slot(1, *second))} for second in ((0, 7), (8, 7), (16, 17))],
        {"slots": (Slot(0, 0, 17), Slot(1, 16, 7))},
        {"device": "cuda:0"},
    ]
    for change in bad_buckets:
        with pytest.raises(ValueError, match="bucket 0"):
            replace(good, **change)
    layout = build([spec("a", (20,)), spec("b", (5,))], 2, 1)
    first, second = layout.buckets
    bad_layouts: list[tuple[dict[str, Any], str]] = [
        ({"buckets": (first,)}, "exactly one slot"),
        ({"buckets": (first, second, second)}, "exactly one slot"),
        ({"parameters": layout.parameters[:1]}, "exactly one slot"),
        ({"world_size": 3}, "cut for 2 ranks, not 3"),
        ({"parameters": (spec("a", (21,)), spec("b", (5,)))}, "slot of a"),
        ({"parameters": (spec("a", (20,)), spec("b", (5,), PLAIN[0]))}, "slot of b"),
    ]
    for change, words in bad_layouts:
        with pytest.raises(ValueError, match=words):
            replace(layout, **change)
    with pytest.raises(ValueError, match="world size"):
        build([], 0, 1)


def test_a_run_is_cut_into_parts_and_one_without_elements_has_one() -> None:
    cut = {(3, 3, None): [3], (3, 4, None): [3], (3, 10, None): [3], (3, 10, 4): [3, 7], (3, 3, 4): [3]}
    assert {run: [*part_begins(*run)] for run in cut} == cut
