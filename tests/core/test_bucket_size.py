"""The size of buckets that "auto" stands for. No tensor is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero import MixedPrecision
from zero.config import Config
from zero.core.buckets import build
from zero.core.layout import DEFAULT_CAP_MB, MANY_RANKS, MIB, Dtypes, automatic_cap_mb, unit_cap_mb
from zero.core.stage import stage_of
from zero.planning.models.shapes import model_of
from zero.planning.plan import Training

WIDTH = 3000  # a square of it is 34.3 MiB in fp32, 17.2 in bf16


def blocks() -> nn.Module:
    """Return two units of one and of two squares, and a root's rest that is larger than both."""
    with torch.device("meta"):
        square, pair = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        model = nn.Module()
        model.units, model.head = nn.ModuleList([square, pair]), nn.Linear(WIDTH, 9 * WIDTH, bias=False)
    return model


def config(module: nn.Module | None, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "stage": stage_of(3),
        "module": module,
        "process_group": None,
        "bucket_cap_mb": "auto",
        "collective": "auto",
        "sharding_factor": None,
        "reshard_after_forward": True,
        "offload": None,
        "precision": None,
        "units": None,
        "partition": None,
    }
    return Config(**{**given, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_auto_is_25_mib_and_a_unit_where_ranks_are_many(stage: int) -> None:
    found = config(blocks(), stage=stage_of(stage))
    assert [found.bucket_bytes(ranks) for ranks in (1, 2, MANY_RANKS - 1)] == [DEFAULT_CAP_MB * MIB] * 3
    pair = 2 * WIDTH * WIDTH * 4
    for ranks in (MANY_RANKS, 10_000):
        nbytes = found.bucket_bytes(ranks)
        assert pair <= nbytes < pair + MIB
        assert nbytes % MIB == 0


def test_auto_counts_what_the_model_computes_with_and_the_users_own_units() -> None:
    whole = config(blocks()).bucket_bytes(MANY_RANKS)
    narrow = config(blocks(), precision=MixedPrecision(torch.bfloat16)).bucket_bytes(MANY_RANKS)
    assert narrow == unit_cap_mb(2 * WIDTH * WIDTH * 2) * MIB < whole
    head = config(blocks(), units=lambda module: getattr(module, "out_features", 0) == 9 * WIDTH)
    assert head.bucket_bytes(MANY_RANKS) == unit_cap_mb(9 * WIDTH * WIDTH * 4) * MIB
    with torch.device("meta"):
        small, none = nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 3)
    for module in (small, none):  # without units, too
        assert config(module).bucket_bytes(MANY_RANKS) == DEFAULT_CAP_MB * MIB


def test_one_bucket_holds_each_unit() -> None:
    module = blocks()
    described = model_of(module, "").specs(lambda _: Dtypes.all(torch.float32), with_units=True, device="cpu")
    layout = build(described, MANY_RANKS, config(module).bucket_bytes(MANY_RANKS))
    by_unit = [{layout.unit(slot) for slot in bucket.slots} for bucket in layout.buckets]
    assert sorted(map(tuple, by_unit)) == [(0,), (1,), (2,)]


def test_the_plan_has_the_same_rule() -> None:
    training = Training(model_of(blocks(), "blocks"), [], precision="fp32")
    for ranks in (2, MANY_RANKS):
        assert automatic_cap_mb(ranks, training.largest_unit) * MIB == config(blocks()).bucket_bytes(ranks)


def test_auto_needs_a_module() -> None:
    with pytest.raises(ValueError, match="pass the module itself, or parameters and module=model, or a number"):
        config(None)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "Auto", None])
def test_other_values_name_what_there_is(value: Any) -> None:
    with pytest.raises(ValueError, match='a positive number of MiB or "auto"'):
        config(blocks(), bucket_cap_mb=value)
