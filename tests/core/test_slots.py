"""Every parameter has one slot: on a boundary, in the order of completion, in a bucket within the cap."""

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

from zero.core.buckets import build
from zero.core.layout import BucketSpec, Dtypes, EvenCuts, OwnerCuts, ParameterSpec, Piece, Slot

from .drawn import BF16, BOUNDARIES, MIXED, PLAIN, bucket_sizes, lists_with_units, padded, spec, world_sizes

many = settings(max_examples=3 * settings.default.max_examples)


@given(lists_with_units, world_sizes, bucket_sizes, st.booleans())
@many
def test_slots_lie_side_by_side_on_boundaries_of_every_dtype(
    parameters: list[ParameterSpec], world_size: int, nbytes: int, across: bool
) -> None:
    """On 64 bytes on the CPU, and on 512 elsewhere, where a plain loop's parameters lie so, too."""
    layout = build(parameters, world_size, nbytes, across_units=across)
    placed = [slot for _, _, slot in layout.slots()]
    assert sorted(slot.parameter for slot in placed) == list(range(len(parameters)))
    assert all(slot.numel == parameters[slot.parameter].numel for slot in placed)
    assert layout.parameters == tuple(parameters)
    assert layout.numel == sum(math.prod(parameter.shape) for parameter in parameters)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        place, sizes = 0, [dtype.itemsize for dtype in dataclasses.astuple(bucket.dtypes)]
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


# -- the lines that ranks compare --------------------------------------------------------------------------------------


def of_dtypes(**changed: Any) -> Callable[[ParameterSpec], dict[str, Any]]:
    return lambda s: {"dtypes": dataclasses.replace(s.dtypes, **changed)}


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
            assert dataclasses.replace(parameter, **change(parameter)).line() != parameter.line(), what
        cards = [dataclasses.replace(parameter, device=f"cuda:{card}") for card in (0, 1)]
        assert cards[0].line() == cards[1].line()
        assert dataclasses.replace(parameter, index=parameter.index + 5).line() == parameter.line()


# -- errors ------------------------------------------------------------------------------------------------------------


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
            dataclasses.replace(good, **change)
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
            dataclasses.replace(layout, **change)
    with pytest.raises(ValueError, match="world size"):
        build([], 0, 1)
