"""Training on ranks and in the plain loop, with running averages of the weights: ours, or torch's AveragedModel."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import swa_utils

from zero import ShardedAverage

from ..support import sides
from ..support.machine.program import AVERAGES
from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.sides import AsPlain, Loop, Side, same_as_plain

TOGETHER = 6  # micro-batches of a step


def train(side: Side, steps: range, *averages: Any) -> None:
    for step in steps:
        sides.train(side, [step], lambda step: odd_batches(TOGETHER, step, extra=False), odd_loss)
        for average in averages:
            average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))


def average_of(side: Side, kind: str, **arguments: Any) -> Any:
    if isinstance(side, AsPlain):
        return swa_utils.AveragedModel(side.model, **AVERAGES[kind])
    return ShardedAverage(side.optimizer, **AVERAGES[kind], **arguments)


def values(average: Any) -> dict[str, Any]:
    ours = isinstance(average, ShardedAverage)
    found: Any = average.gather(to=None) if ours else dict(average.module.named_parameters())
    return {name: (value.stride(), value.detach().clone()) for name, value in found.items()}


def same(loop: Loop, world_size: int, stage: int, precision: Any = None, **settings: Any) -> None:
    arguments = {"settings": {"stage": stage, "bucket_cap_mb": 0.0005, **settings}, "precision": precision}
    same_as_plain(loop, lambda: locked_build(0), torch.optim.AdamW, world_size, divisor=TOGETHER, lr=0.01, **arguments)
