"""What holds of every plan: who holds most, what shrinks memory, what is refused, and that large plans are quick."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from zero import MixedPrecision, Offload
from zero.config import PRECISIONS
from zero.core.layout import ALIGNMENT_BYTES, MIB, BucketSpec
from zero.planning.memory import MemoryPlan, RankBytes
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import OPTIMIZERS, PlanSetting

BF16 = torch.bfloat16
WRONG = (
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
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model of a few parameters, some of them empty, without dimensions, or frozen."""
    sizes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    shapes = draw(st.lists(st.tuples(sizes, st.integers(0, 3), st.booleans()), min_size=1, max_size=9))
    parameters = (ParameterShape((f"p{number}",), *shape) for number, shape in enumerate(shapes))
    return Model("drawn", tuple(parameters), ("the root's rest", "one", "two", "three"))


@st.composite
def arguments(draw: st.DrawFn, optimizers: tuple[str, ...] = tuple(OPTIMIZERS)) -> dict[str, Any]:
    """Draw the arguments of a `PlanSetting` that do not depend on the number of ranks."""
    return {
        "mixed_precision": draw(st.sampled_from([*PRECISIONS.values(), MixedPrecision(BF16, accumulate_dtype=BF16)])),
        "optimizer": draw(st.sampled_from(optimizers)),
        "bucket_cap_mb": draw(st.sampled_from([256 / MIB, 4096 / MIB, 1])),
        "threads": draw(st.booleans()),
    }


def master_bytes(bucket: BucketSpec) -> int:
    return bucket.numel * bucket.dtypes.itemsize("master_dtype")


@given(models(), arguments(), st.integers(1, 3), st.integers(1, 9))
def test_no_rank_holds_more_than_the_largest_and_all_slices_are_the_whole(
    model: Model, given: dict[str, Any], stage: int, ranks: int
) -> None:
    """Of parameters with one owner each, no rank has more than its share and one matrix."""
    plan, setting = MemoryPlan(model), PlanSetting(stage=stage, world_size=ranks, **given)
    found, largest = [plan.of_rank(setting, rank) for rank in range(ranks)], plan.of_largest(setting)
    layout = plan.laid_out(setting).layout
    first = [(bucket, plan.members(bucket)[0]) for bucket in layout.buckets]
    states = [(bucket, p, setting.classes[len(setting.classes) > 1 and p.is_unit_matrix]) for bucket, p in first]
    kept = sum(master_bytes(b) * kind.tensors for b, p, kind in states if p.trainable or kind.at_construction)
    assert sum(rank.states for rank in found) == kept
    trained = sum(master_bytes(bucket) for bucket, p in first if p.trainable)
    assert sum(rank.masters for rank in found) == trained * setting.dtypes.has_master
    if setting.optimizer != "muon":
        for kind in ("parameters", "gradients", "states", "masters"):
            assert max(getattr(rank, kind) for rank in found) == getattr(largest, kind), kind
        return
    spare = len(layout.buckets) * ALIGNMENT_BYTES * 8  # an alignment of each bucket, for all that is held of an element
    assert max(rank.resident for rank in found) <= largest.resident + spare
    whole = {p.index for p in layout.parameters if p.one_owner}
    assert whole == {n for n, p in enumerate(model.parameters) if p.unit and len(p.shape) == 2}
    sizes, mine = [layout.parameters[n].master_bytes * model.parameters[n].trainable for n in whole], [0] * ranks
    for bucket, number, slot in layout.slots():
        if slot.parameter in whole and model.parameters[slot.parameter].trainable:
            mine[bucket.owner(number)] += layout.parameters[slot.parameter].master_bytes
    assert max(mine) <= sum(sizes) / ranks + max(sizes, default=0)


@given(
    models(),
    arguments(tuple(OPTIMIZERS.keys() - {"muon"})),
    st.integers(1, 3),
    st.sampled_from([(1, 2), (2, 4), (4, 12), (3, 12)]),
)
def test_memory_falls_with_the_ranks_that_share_a_copy_and_with_the_stage(
    model: Model, given: dict[str, Any], stage: int, factors: tuple[int, int]
) -> None:
    """With the stage up to 2: at stage 3 buckets may hold one unit each, which adds padding."""
    plan, given = MemoryPlan(model), given | {"threads": True}
    held = [plan.of_largest(PlanSetting(stage=stage, world_size=factors[1], **given)).resident for stage in range(3)]
    assert held == sorted(held, reverse=True)
    assume(stage < 3 or factors[0] > 1)  # one rank shares buckets among units
    few, many = (
        plan.of_largest(PlanSetting(stage=stage, world_size=12, sharding_factor=factor, **given)) for factor in factors
    )
    for kind in ("parameters", "gradients", "states", "masters", "resident"):
        assert getattr(many, kind) <= getattr(few, kind), kind


@given(models(), arguments(), st.integers(0, 3), st.integers(1, 8))
def test_offload_changes_where_bytes_are_and_one_rank_sends_nothing(
    model: Model, given: dict[str, Any], stage: int, ranks: int
) -> None:
    plan = MemoryPlan(model)
    here, away = (
        plan.of_rank(PlanSetting(stage=stage, world_size=ranks, offload=offload, **given), 0)
        for offload in (None, Offload("."))
    )
    assert (here.parameters, here.gradients, here.states) == (away.parameters, away.gradients, away.states)
    assert here.resident == here.parameters + here.gradients + here.optimizer
    assert away.resident == away.parameters + away.gradients + away.step_counts
    assert here.offloaded == here.staged_peak == 0
    assert plan.sent(PlanSetting(stage=stage, **given), 3, 2) == 0


def test_states_on_the_host_leave_masters_on_the_gpu() -> None:
    plan = MemoryPlan(Model("one", (ParameterShape(("weight",), (1 << 16,)),)))
    given = {"mixed_precision": PRECISIONS["bf16"], "offload": Offload("cpu"), "device": "cuda"}
    held = plan.of_largest(PlanSetting(stage=2, world_size=4, **given))
    own = (1 << 16) // 4
    assert (held.states, held.masters, held.offloaded, held.staged_peak) == (8 * own, 4 * own, 8 * own, 24 * own)
    assert held.resident == 2 * (1 << 16) + 4 * own + held.step_counts + held.masters


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_setting_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanSetting(**given)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    plan, setting = MemoryPlan(Model("none", ())), PlanSetting(stage=2, world_size=2)
    assert plan.of_rank(setting, 1) == RankBytes()
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        plan.of_rank(setting, 2)
