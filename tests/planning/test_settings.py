"""What holds of every plan: which rank holds most, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero import MixedPrecision, Offload
from zero.config import PRECISIONS
from zero.core.layout import ALIGNMENT_BYTES, MIB, BucketSpec
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import OPTIMIZERS, PlanSetting

BF16 = torch.bfloat16
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"world_size": 0}, "world_size must be a whole number, at least 1, not 0"),
    ({"bucket_cap_mb": "auto"}, "depends on the model"),
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
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of a `PlanSetting` that do not depend on the number of ranks."""
    return {
        "mixed_precision": draw(st.sampled_from([*PRECISIONS.values(), MixedPrecision(BF16, accumulate_dtype=BF16)])),
        "optimizer": draw(st.sampled_from(tuple(OPTIMIZERS))),
        "bucket_cap_mb": draw(st.sampled_from([256 / MIB, 4096 / MIB, 1])),
        "threads": draw(st.booleans()),
    }


def master_bytes(bucket: BucketSpec) -> int:
    return bucket.numel * bucket.dtypes.itemsize("master_dtype")


@given(models(), arguments(), st.integers(1, 3), st.integers(1, 9))
def test_no_rank_holds_more_than_the_largest_and_all_slices_are_the_whole(
    model: Model, chosen: dict[str, Any], stage: int, ranks: int
) -> None:
    plan, setting = MemoryPlan(model), PlanSetting(stage=stage, world_size=ranks, **chosen)
    found, largest = [plan.of_rank(setting, rank) for rank in range(ranks)], plan.of_largest(setting)
    first = [(bucket, plan.members(bucket)[0]) for bucket in plan.laid_out(setting).layout.buckets]
    states = [(bucket, p, setting.classes[len(setting.classes) > 1 and p.is_unit_matrix]) for bucket, p in first]
    kept = sum(master_bytes(b) * kind.tensors for b, p, kind in states if p.trainable or kind.at_construction)
    assert sum(rank.states for rank in found) == kept
    trained = sum(master_bytes(bucket) for bucket, p in first if p.trainable)
    assert sum(rank.masters for rank in found) == trained * setting.dtypes.has_master
    spare = (setting.optimizer == "muon") * len(first) * ALIGNMENT_BYTES * 8  # an alignment of each bucket
    for kind in ("resident",) if spare else ("parameters", "gradients", "states", "masters"):
        assert max(getattr(rank, kind) for rank in found) <= getattr(largest, kind) + spare, kind


def test_a_wrong_setting_or_rank_is_refused_by_name() -> None:
    for wrong, message in WRONG:
        with pytest.raises(ValueError, match=message):
            PlanSetting(**wrong)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        MemoryPlan(Model("none", ())).of_rank(PlanSetting(stage=2, world_size=2), 2)
