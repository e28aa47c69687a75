"""What holds of every plan: where memory shrinks, who holds most, how long a plan takes, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from zero import MixedPrecision, Offload
from zero.config import PRECISIONS
from zero.core.layout import ALIGNMENT_BYTES, MIB, BucketSpec, Dtypes
from zero.planning.memory import MemoryPlan, RankBytes
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import OPTIMIZERS, PlanSetting

BF16 = torch.bfloat16
KINDS = ("parameters", "gradients", "states", "masters")


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model of a few parameters, some of them empty, without dimensions, or frozen."""
    sizes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    shapes = draw(st.lists(st.tuples(sizes, st.integers(0, 3), st.booleans()), min_size=1, max_size=9))
    parameters = tuple(
        ParameterShape((f"p{number}",), shape, unit, trainable)
        for number, (shape, unit, trainable) in enumerate(shapes)
    )
    return Model("drawn", parameters, ("the root's rest", "one", "two", "three"))


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of a `PlanSetting` that do not depend on the number of ranks."""
    return {
        "mixed_precision": draw(st.sampled_from([*PRECISIONS.values(), MixedPrecision(BF16, accumulate_dtype=BF16)])),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS.keys() - {"muon"}))),
        "bucket_cap_mb": draw(st.sampled_from([256 / MIB, 4096 / MIB, 1])),
        "threads": draw(st.booleans()),
        "offload": draw(st.sampled_from([None, Offload(".")])),
    }


@given(models(), settings(), st.integers(1, 3), st.integers(1, 9))
def test_the_last_rank_owns_most_and_all_slices_are_the_whole(
    model: Model, arguments: dict[str, Any], stage: int, ranks: int
) -> None:
    plan, setting = MemoryPlan(model), PlanSetting(stage=stage, world_size=ranks, **arguments | {"offload": None})
    found = [plan.of_rank(setting, rank) for rank in range(ranks)]
    for kind in KINDS:
        assert max(getattr(rank, kind) for rank in found) == getattr(plan.of_largest(setting), kind), kind
    buckets = plan.laid_out(setting).layout.buckets
    trained = [bucket for bucket in buckets if plan.members(bucket)[0].trainable]
    assert sum(rank.masters for rank in found) == sum(map(_master_bytes, trained)) * setting.dtypes.has_master
    (states,) = setting.classes
    of_states = buckets if states.at_construction else trained
    assert sum(rank.states for rank in found) == sum(map(_master_bytes, of_states)) * states.tensors


@given(models(), settings(), st.integers(1, 3), st.integers(1, 9))
def test_so_they_are_where_matrices_have_one_owner_each_and_no_rank_has_more_than_a_share_and_a_matrix(
    model: Model, arguments: dict[str, Any], stage: int, ranks: int
) -> None:
    plan, setting = MemoryPlan(model), PlanSetting(stage=stage, world_size=ranks, **arguments | {"optimizer": "muon"})
    found = [plan.of_rank(setting, rank) for rank in range(ranks)]
    largest, layout = plan.of_largest(setting), plan.laid_out(setting).layout
    spare = len(layout.buckets) * ALIGNMENT_BYTES * 8  # an alignment of each bucket, for all that is held of an element
    for each in found:
        assert each.resident + each.offloaded <= largest.resident + largest.offloaded + spare
    of_muon = {p.index for p in layout.parameters if p.one_owner}
    assert of_muon == {n for n, p in enumerate(model.parameters) if p.unit and len(p.shape) == 2}
    trained = [spec.master_bytes for spec in layout.parameters if spec.one_owner and spec.trainable]
    mine = [0] * ranks
    for bucket, number, slot in layout.slots():
        spec = layout.parameters[slot.parameter]
        if spec.one_owner and spec.trainable:
            mine[bucket.owner(number)] += spec.master_bytes
    assert max(mine) <= sum(trained) / ranks + max(trained, default=0)
    states = {0: setting.classes[0].tensors, 1: setting.classes[1].tensors}
    of_bucket = {b.index: states[layout.parameters[b.slots[0].parameter].optimizer_class] for b in layout.buckets}
    kept = [b for b in layout.buckets if plan.members(b)[0].trainable]
    if not setting.offload:
        assert sum(rank.states for rank in found) == sum(_master_bytes(b) * of_bucket[b.index] for b in kept)


def _master_bytes(bucket: BucketSpec) -> int:
    return bucket.numel * bucket.dtypes.itemsize("master_dtype")


@given(models(), settings(), st.integers(1, 3), st.sampled_from([(1, 2), (2, 4), (4, 12), (3, 12)]))
def test_memory_falls_with_the_ranks_that_share_a_copy(
    model: Model, arguments: dict[str, Any], stage: int, factors: tuple[int, int]
) -> None:
    """Units do not share buckets in either setting, since that changes padding."""
    assume(stage < 3 or factors[0] > 1)
    plan = MemoryPlan(model)
    few, many = (
        plan.of_largest(
            PlanSetting(stage=stage, world_size=12, sharding_factor=factor, **arguments | {"threads": True})
        )
        for factor in factors
    )
    for kind in ("parameters", "gradients", "states", "masters", "resident"):
        assert getattr(many, kind) <= getattr(few, kind), kind


@given(models(), settings(), st.integers(1, 8))
def test_memory_falls_with_the_stage(model: Model, arguments: dict[str, Any], ranks: int) -> None:
    """Up to stage 2; at stage 3 buckets may hold one unit each, which adds padding."""
    plan = MemoryPlan(model)
    held = [plan.of_largest(PlanSetting(stage=stage, world_size=ranks, **arguments)) for stage in range(3)]
    assert held[0].resident >= held[1].resident >= held[2].resident


@given(models(), settings(), st.integers(0, 3), st.integers(1, 8))
def test_offload_changes_where_bytes_are(model: Model, arguments: dict[str, Any], stage: int, ranks: int) -> None:
    plan = MemoryPlan(model)
    here, away = (
        plan.of_largest(PlanSetting(stage=stage, world_size=ranks, **arguments | {"offload": o}))
        for o in (None, Offload("."))
    )
    assert (here.parameters, here.gradients, here.states) == (away.parameters, away.gradients, away.states)
    assert here.resident == here.parameters + here.gradients + here.optimizer
    assert away.resident == away.parameters + away.gradients + away.step_counts
    assert here.offloaded == here.staged_peak == 0


@given(models(), settings(), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2))
def test_one_rank_sends_nothing(
    model: Model, arguments: dict[str, Any], stage: int, synchronised: int, more: int
) -> None:
    plan, setting = MemoryPlan(model), PlanSetting(stage=stage, **arguments)
    assert plan.sent(setting, synchronised + more, synchronised) == 0


def test_precisions_have_master_weights_in_fp32() -> None:
    def found(precision: MixedPrecision | None) -> Dtypes:
        return PlanSetting(mixed_precision=precision).dtypes

    assert {name: found(precision) for name, precision in PRECISIONS.items()} == {
        "fp32": Dtypes.all(torch.float32),
        "bf16": Dtypes(BF16, BF16, torch.float32, torch.float32),
        "fp16": Dtypes(torch.float16, torch.float16, torch.float32, torch.float32),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, r"stage must be one of \[0, 1, 2, 3\], not 4"),
        ({"world_size": 0}, "world_size must be a whole number, at least 1, not 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a positive number of MiB"),
        ({"bucket_cap_mb": "auto"}, "depends on the model"),
        ({"stage": 2, "world_size": 8, "sharding_factor": 3}, "sharding_factor must divide the number of ranks, 8"),
        ({"stage": 0, "world_size": 8, "sharding_factor": 2}, "stage 0 shards nothing: leave sharding_factor=2 out"),
        ({"stage": 2, "world_size": 8, "reshard_after_forward": False}, "reshard_after_forward=False with stage 2"),
        ({"stage": 3, "world_size": 8, "reshard_after_forward": 3}, "a number that divides the 8 ranks"),
        ({"stage": 3, "offload": Offload("cpu")}, "with parameters on the CPU"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw', .*, not 'lion'"),
        ({"world_size": 8, "ranks_per_host": 3}, "ranks_per_host must divide the number of ranks, 8, not 3"),
    ],
)
@pytest.mark.by_default
def test_a_wrong_setting_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanSetting(**arguments)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        MemoryPlan(Model("none", ())).of_rank(PlanSetting(stage=2, world_size=2), 2)
    assert MemoryPlan(Model("none", ())).of_rank(PlanSetting(stage=2, world_size=2), 1) == RankBytes()


def test_states_on_a_gpu_that_are_offloaded_leave_masters_there() -> None:
    plan = MemoryPlan(Model("one", (ParameterShape(("weight",), (1 << 16,)),)))
    held = plan.of_largest(
        PlanSetting(stage=2, world_size=4, mixed_precision=PRECISIONS["bf16"], offload=Offload("cpu"), device="cuda")
    )
    own = (1 << 16) // 4
    assert (held.states, held.masters, held.offloaded, held.staged_peak) == (8 * own, 4 * own, 8 * own, 24 * own)
    assert held.resident == 2 * (1 << 16) + 4 * own + held.step_counts + held.masters


def llama(width: int, hidden: int, layers: int, narrow: int, vocabulary: int) -> Model:
    shapes = [ParameterShape(("embedding",), (vocabulary, width))]
    square, key, up, down = (width, width), (narrow, width), (hidden, width), (width, hidden)
    for unit in range(1, layers + 1):
        of_unit = (square, key, key, square, up, up, down, (width,), (width,))
        shapes += [ParameterShape((f"{unit}.{number}",), shape, unit) for number, shape in enumerate(of_unit)]
    shapes += [ParameterShape(("norm",), (width,)), ParameterShape(("head",), (vocabulary, width))]
    return Model("llama", tuple(shapes), ("the root's rest", *(f"layer {unit}" for unit in range(layers))))


@pytest.mark.timeout(60)  # no list grows with the ranks, and equal buckets are counted once: half a second
def test_405b_parameters_are_planned_on_10_000_ranks() -> None:
    plan = MemoryPlan(llama(16384, 53248, 126, 1024, 128256))
    assert plan.model.numel == 405_853_388_800
    for factor in (8, 10_000):
        setting = PlanSetting(
            stage=3,
            world_size=10_000,
            sharding_factor=factor,
            mixed_precision=PRECISIONS["bf16"],
            device="cuda",
            ranks_per_host=8,
        )
        held = plan.of_largest(setting)
        whole = 18 * plan.model.numel / factor
        assert whole <= held.parameters + held.gradients + held.optimizer <= 1.01 * whole
        assert plan.sent(setting) > 0
