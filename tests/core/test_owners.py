"""Parameters that have one owner each: who owns what, and where the cuts are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.core.buckets import build, extended
from zero.core.cuts import OwnerCuts
from zero.core.formulas import KeptStates, busiest_link, formula_bytes
from zero.core.layout import Dtypes, Layout, ParameterSpec
from zero.core.owners import step_work
from zero.core.stage import STAGES

FP32, MIXED = Dtypes.all(torch.float32), Dtypes(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
SHAPES = [(), (1,), (0, 3), (7,), (64, 3), (3, 64), (20, 20), (5, 6, 7), (300, 40), (1000,)]


def specs_of(shapes: list[tuple[int, ...]], first: int = 0, *, dtypes: Dtypes = FP32) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            (f"p{number}",),
            shape,
            (1,) * len(shape),
            dtypes,
            "cpu",
            number % 5 != 4,
            0,
            number,
            number % 3,
            one_owner=True,
        )
        for number, shape in enumerate(shapes, start=first)
    ]


def held(layout: Layout, *, trainable: bool | None = None) -> list[int]:
    """Return the bytes that each rank owns."""
    found = [0] * layout.world_size
    for bucket, number, slot in layout.slots():
        spec = layout.parameters[slot.parameter]
        if trainable in (None, spec.trainable):
            found[bucket.owner(number)] += spec.master_bytes
    return found


ANY = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=30)
RANKS = st.integers(1, 9)


@given(ANY, RANKS, st.sampled_from([1, 4000, 1 << 30]), st.sampled_from([FP32, MIXED]), st.booleans())
def test_no_rank_has_more_than_its_share_and_the_largest_parameter(
    shapes: list[tuple[int, ...]], ranks: int, bucket_bytes: int, dtypes: Dtypes, across: bool
) -> None:
    layout = build(specs_of(shapes, dtypes=dtypes), ranks, bucket_bytes, across_units=across)
    for trainable in (None, True):
        sizes = [spec.master_bytes for spec in layout.parameters if trainable in (None, spec.trainable)]
        found = held(layout, trainable=trainable)
        assert sum(found) == sum(sizes)
        assert max(found) <= sum(sizes) / ranks + max(sizes, default=0)


@given(ANY, RANKS, st.sampled_from([1, 4000, 1 << 30]), st.booleans())
def test_cuts_fall_between_slots_which_lie_in_the_order_of_their_owners(
    shapes: list[tuple[int, ...]], ranks: int, bucket_bytes: int, across: bool
) -> None:
    layout = build(specs_of(shapes), ranks, bucket_bytes, across_units=across)
    for bucket in layout.buckets:
        assert isinstance(bucket.cuts, OwnerCuts)
        bounds = list(bucket.cuts)
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, bucket.numel)
        for number, slot in enumerate(bucket.slots):
            low, high = bucket.owned(bucket.owner(number))
            assert low <= slot.offset <= slot.end <= high
            if slot.numel:
                assert [piece.numel for rank in range(ranks) for piece in bucket.pieces(*bucket.owned(rank))
                        if piece.slot == number] == [slot.numel]  # fmt: skip
        assert len({layout.unit(slot) for slot in bucket.slots}) == 1


def test_the_largest_parameters_are_given_out_first() -> None:
    """Whatever their order; else the last one comes on top of an even load."""
    for shapes in ([(32,), (32,), (64,)], [(64,), (32,), (32,)]):
        assert held(build(specs_of(shapes), 2, 1 << 30)) == [256, 256]  # type: ignore[arg-type]


@given(ANY, ANY, RANKS)
def test_parameters_that_are_added_go_to_those_who_have_least_and_move_nothing(
    before: list[tuple[int, ...]], more: list[tuple[int, ...]], ranks: int
) -> None:
    layout = build(specs_of(before), ranks, 4000)
    longer = extended(layout, specs_of(more, len(before)), 4000)
    assert longer.buckets[: len(layout.buckets)] == layout.buckets
    sizes = [spec.master_bytes for spec in longer.parameters]
    assert max(held(longer)) <= sum(sizes) / ranks + max(sizes)


def test_pieces_and_whole_parameters_never_share_a_bucket() -> None:
    cut = [ParameterSpec((f"c{number}",), (50,), (1,), FP32, "cpu", True, 0, number) for number in range(4)]
    layout = build([*cut, *specs_of([(50,)] * 4, 4)], 2, 1 << 30)
    assert all(
        len({layout.parameters[slot.parameter].one_owner for slot in bucket.slots}) == 1 for bucket in layout.buckets
    )


def test_ranks_with_equal_bytes_differ_in_the_work_of_a_step() -> None:
    """Then the squares are spread, as are the long ones, which take less work."""
    layout = build(specs_of([(20, 20), (20, 20), (4, 100), (4, 100)]), 2, 1 << 30)
    assert step_work((20, 20)) == 8000 > step_work((100, 4)) == step_work((4, 100)) == 1600
    assert [layout.loads()[rank] for rank in range(2)] == [(3200, 9600)] * 2


def test_the_busiest_rank_s_link_is_loaded_by_what_it_owns() -> None:
    layout = build(specs_of([(64, 3), (16,), (16,)]), 3, 1 << 30)
    busiest, even = busiest_link(layout, STAGES[2], 1)
    assert busiest == 2 * (4 + 4) * 64 * 3  # two peers, a reduction and a gather
    assert even == 2 * 8 * (64 * 3 + 32) // 3 + (2 * 8 * (64 * 3 + 32) % 3 > 1)


@given(ANY, RANKS, st.sampled_from([1, 2, 3]))
def test_the_bytes_of_all_ranks_are_those_of_the_model(shapes: list[tuple[int, ...]], ranks: int, stage: int) -> None:
    layout = build(specs_of(shapes, dtypes=MIXED), ranks, 4000)
    kept = KeptStates(8, has_masters=True)
    found = [formula_bytes(layout, STAGES[stage], rank, lambda _: kept) for rank in range(ranks)]
    whole = sum(bucket.numel for bucket in layout.buckets)
    assert sum(each["optimizer"] for each in found) == 12 * whole
    if stage == 3:
        assert sum(each["parameters"] for each in found) == 2 * whole
