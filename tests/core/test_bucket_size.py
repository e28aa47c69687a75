"""The size of buckets is chosen from device, stage, ranks and model, and a number is the size everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zero.config import Config
from zero.core.buckets import DEFAULT_CAP_MB, MANY_RANKS, MIB, BucketSizes, build, extended

from .drawn import spec

WIDTH = 3000  # a square of it is 34.3 MiB in fp32, 17.2 in bf16
SQUARE = 4 * WIDTH * WIDTH
PAIR, TWELFTH = -(-2 * SQUARE // MIB), -(-12 * SQUARE // 12 // MIB)  # MiB of the larger unit, and of the whole


def blocks() -> nn.Module:
    """Return two units of one and of two squares, and a root's rest that is larger than both."""
    with torch.device("meta"):
        square, pair = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        model = nn.Module()
        model.units, model.head = nn.ModuleList([square, pair]), nn.Linear(WIDTH, 9 * WIDTH, bias=False)
    return model


def config(module: nn.Module | None, stage: int = 3, **changes: Any) -> Config:
    given: dict[str, Any] = {"stage": stage, "module": module, "process_group": None, "bucket_cap_mb": "auto"}
    return Config(**{**given, **changes})


def sizes(found: Config, device: str = "cpu", ranks: int = 2, hosts: int = 1) -> BucketSizes:
    listed = [torch.empty(3, device="meta")] if found.module is None else list(found.module.parameters())
    return found.bucket_sizes(listed, torch.device(device), ranks, hosts, found.precisions())


def mib(most: int, first: int | None = None) -> BucketSizes:
    return BucketSizes(most * MIB, (most if first is None else first) * MIB)


with torch.device("meta"):
    LARGE = nn.Linear(1 << 16, 1 << 16)  # 16 GiB
CAPPED, MANY = mib(TWELFTH, DEFAULT_CAP_MB), (1, MANY_RANKS, 8)
ROWS: list[tuple[nn.Module, Any, str, tuple[int, int, int], BucketSizes]] = [  # cap; device; stage, ranks, hosts
    (blocks(), "auto", "cpu", (3, MANY_RANKS - 1, 1), mib(DEFAULT_CAP_MB)),
    (blocks(), "auto", "cpu", (0, MANY_RANKS, 1), mib(PAIR)),
    (blocks(), None, "cpu", (3, 10_000, 1), mib(DEFAULT_CAP_MB)),
    *[(blocks(), cap, "cuda", (3, ranks, 8), mib(PAIR)) for cap, ranks in (("auto", 2), (None, MANY_RANKS))],
    *[(blocks(), "auto", "cuda", (stage, 8, 1), CAPPED) for stage in (0, 2)],
    (blocks(), None, "cuda", (3, 1, 1), CAPPED),  # one rank gathers nothing
    *[(blocks(), cap, "cuda", MANY, found) for cap, found in (("auto", mib(PAIR)), (None, CAPPED))],
    *[(LARGE, "auto", "cuda", (2, 8, hosts), mib(256 // hosts, DEFAULT_CAP_MB)) for hosts in (1, 2)],
    (nn.Linear(3, 3), "auto", "cuda", (2, 8, 2), mib(25, DEFAULT_CAP_MB)),
]


def test_auto_is_a_unit_or_a_twelfth_on_an_accelerator_and_where_ranks_are_many() -> None:
    for module, cap, device, (stage, ranks, hosts), expected in ROWS:
        assert sizes(config(module, stage, bucket_cap_mb=cap), device, ranks, hosts) == expected


def test_the_first_bucket_is_smaller_and_a_later_group_has_none() -> None:
    shapes = [tuple(weight.shape) for weight in blocks().parameters()]
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
        assert sizes(config(blocks(), bucket_cap_mb=0.5), device) == BucketSizes(MIB // 2, MIB // 2)
    assert sizes(config(None, 2, bucket_cap_mb=None), "cuda") == mib(25)
    with pytest.raises(ValueError, match="pass the module itself, or parameters and module=model, or a number"):
        config(None)
    for value in (0, -1, float("nan"), float("inf"), "Auto", [25]):
        with pytest.raises(ValueError, match='a positive number of MiB, None or "auto"'):
            config(blocks(), bucket_cap_mb=value)
