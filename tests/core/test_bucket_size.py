"""The size of buckets that is chosen from device, stage and model. No tensor is allocated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from zero import MixedPrecision
from zero.config import Config
from zero.core.buckets import build, extended
from zero.core.layout import DEFAULT_CAP_MB, MANY_RANKS, MIB, BucketSizes, Dtypes, unit_cap_mb
from zero.planning.models.shapes import model_of
from zero.planning.plan import Training
from zero.planning.setting import PlanSetting

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
        "stage": 3,
        "module": module,
        "process_group": None,
        "bucket_cap_mb": "auto",
    }
    return Config(**{**given, **changes})


def sizes(found: Config, device: str = "cpu", ranks: int = 2, hosts: int = 1) -> BucketSizes:
    listed = [torch.empty(3, device="meta")] if found.module is None else list(found.module.parameters())
    return found.bucket_sizes(listed, torch.device(device), ranks, hosts)


def mib(most: int, first: int | None = None) -> BucketSizes:
    return BucketSizes(most * MIB, (most if first is None else first) * MIB)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("cap", ["auto", None])
def test_on_the_cpu_buckets_have_25_mib_and_with_auto_a_unit_where_ranks_are_many(cap: Any, stage: int) -> None:
    found = config(blocks(), stage=stage, bucket_cap_mb=cap)
    for ranks in (1, 2, MANY_RANKS - 1):
        assert sizes(found, ranks=ranks) == mib(DEFAULT_CAP_MB)
    pair = -(-2 * WIDTH * WIDTH * 4 // MIB)
    for ranks in (MANY_RANKS, 10_000):
        assert sizes(found, ranks=ranks) == mib(DEFAULT_CAP_MB if cap is None else pair)


@pytest.mark.parametrize("cap", ["auto", None])
def test_on_an_accelerator_a_gathered_unit_is_a_bucket_and_else_a_twelfth_of_the_model(cap: Any) -> None:
    pair, total = -(-2 * WIDTH * WIDTH * 4 // MIB), 12 * WIDTH * WIDTH * 4
    stage_3 = config(blocks(), bucket_cap_mb=cap)
    assert sizes(stage_3, "cuda") == sizes(stage_3, "cuda", MANY_RANKS, hosts=8) == mib(pair)
    twelfth = -(-total // 12 // MIB)
    for stage, ranks in ((0, 1), (0, 8), (1, 8), (2, 8), (3, 1)):  # one rank gathers nothing
        found = config(blocks(), stage=stage, bucket_cap_mb=cap)
        assert sizes(found, "cuda", ranks) == mib(twelfth, DEFAULT_CAP_MB)
    many = sizes(config(blocks(), stage=1, bucket_cap_mb=cap), "cuda", MANY_RANKS, hosts=8)
    assert many == (mib(pair) if cap == "auto" else mib(twelfth, DEFAULT_CAP_MB))


def test_a_twelfth_is_at_least_25_mib_and_at_most_256_and_between_hosts_128() -> None:
    with torch.device("meta"):
        small, large = nn.Linear(3, 3), nn.Linear(1 << 16, 1 << 16)  # 16 GiB
    for module, hosts, most in ((small, 1, 25), (small, 2, 25), (large, 1, 256), (large, 2, 128)):
        assert sizes(config(module, stage=2), "cuda", 8, hosts) == mib(most, DEFAULT_CAP_MB)


def test_a_number_is_the_size_everywhere() -> None:
    for device in ("cpu", "cuda"):
        assert sizes(config(blocks(), bucket_cap_mb=0.5), device) == BucketSizes(MIB // 2, MIB // 2)


def test_the_first_bucket_of_a_backward_is_smaller_and_a_later_group_has_none() -> None:
    specs = model_of(blocks(), "").specs(lambda _: Dtypes.all(torch.float32), with_units=False, device="cuda")
    square = specs[0].numel * 4
    assert [len(bucket.slots) for bucket in build(specs, 2, 100 * square).buckets] == [3]
    layout = build(specs, 2, 100 * square, first_bytes=square)
    assert [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets] == [[2], [1, 0]]
    more = [replace(spec, index=spec.index + 3) for spec in specs]
    assert len(extended(layout, more, 100 * square, first_bytes=square).buckets) == 3
    frozen = [*specs[:2], replace(specs[2], trainable=False)]
    assert [len(bucket.slots) for bucket in build(frozen, 2, 3 * square, first_bytes=square).buckets] == [1, 1, 1]


def test_what_the_model_computes_with_and_the_users_own_units_count() -> None:
    whole = sizes(config(blocks()), ranks=MANY_RANKS)
    narrow = sizes(config(blocks(), mixed_precision=MixedPrecision(torch.bfloat16)), ranks=MANY_RANKS)
    assert narrow == mib(unit_cap_mb(2 * WIDTH * WIDTH * 2)) != whole
    head = config(blocks(), units=lambda module: getattr(module, "out_features", 0) == 9 * WIDTH)
    assert sizes(head, ranks=MANY_RANKS) == mib(unit_cap_mb(9 * WIDTH * WIDTH * 4))
    with torch.device("meta"):
        small, none = nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 3)
    for module in (small, none):  # without units, too
        assert sizes(config(module), ranks=MANY_RANKS) == mib(DEFAULT_CAP_MB)


def test_one_bucket_holds_each_unit() -> None:
    module = blocks()
    described = model_of(module, "").specs(lambda _: Dtypes.all(torch.float32), with_units=True, device="cpu")
    layout = build(described, MANY_RANKS, sizes(config(module), ranks=MANY_RANKS).most)
    by_unit = [{layout.unit(slot) for slot in bucket.slots} for bucket in layout.buckets]
    assert sorted(map(tuple, by_unit)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_has_the_same_rule(device: str) -> None:
    training = Training(model_of(blocks(), "blocks"), [], precision="fp32")
    for stage, ranks, per_host, cap in product(range(4), (1, 8, MANY_RANKS), (1, 8), (None, "auto", 3)):
        per_host = min(per_host, ranks)
        planned = PlanSetting(stage=stage, world_size=ranks, device=device, ranks_per_host=per_host)
        found = config(blocks(), stage=stage, bucket_cap_mb=cap)
        assert training.bucket_sizes(planned, cap) == sizes(found, device, ranks, ranks // per_host)


def test_auto_needs_a_module_and_none_does_not() -> None:
    with pytest.raises(ValueError, match="pass the module itself, or parameters and module=model, or a number"):
        config(None)
    assert sizes(config(None, stage=2, bucket_cap_mb=None), "cuda") == mib(25)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "Auto", [25]])
def test_other_values_name_what_there_is(value: Any) -> None:
    with pytest.raises(ValueError, match='a positive number of MiB, None or "auto"'):
        config(blocks(), bucket_cap_mb=value)
