"""A model with a running average of its weights, beside torch's AveragedModel in the plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from zero import ShardedAverage, ZeroOptimizer

from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, plain_step
from ..support.programs import locked_build

TOGETHER = 6  # micro-batches of a step
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.7)},
    "by tensor": {"avg_fn": lambda average, weights, count: average * 0.9 + weights * 0.1},
}


def plain(steps: int, kind: str) -> tuple[nn.Module, swa_utils.AveragedModel]:
    model = locked_build(0)
    average = swa_utils.AveragedModel(model, **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        plain_step(model, optimizer, odd_loss, odd_batches(TOGETHER, step, extra=False), TOGETHER)
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, average


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range, *averages: ShardedAverage) -> None:
    optimizer.divisor = TOGETHER
    for step in steps:
        for batch in odd_batches(TOGETHER, step, extra=False)[optimizer.rank :: optimizer.world_size]:
            odd_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters()


def build(model: nn.Module, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"stage": stage, "process_group": group, "bucket_cap_mb": 0.0005, "lr": 0.01, **arguments}
    return ZeroOptimizer(model, torch.optim.AdamW, **arguments)


def assert_same_averages(found: dict[str, Tensor] | None, average: swa_utils.AveragedModel) -> None:
    expected = dict(average.module.named_parameters())
    assert found is not None
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].stride() == value.stride(), name
        assert_same_bits(found[name], value.detach(), name)
