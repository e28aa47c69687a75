"""Training on ranks and in the plain loop, with running averages of the weights: ours, or torch's AveragedModel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import swa_utils

from zero import ShardedAverage

from ..support.models import odd_batches, odd_loss
from ..support.programs import locked_build
from ..support.sides import AsPlain, Loop, Side, same_as_plain

TOGETHER = 6  # micro-batches of a step
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.7)},
    "by tensor": {"avg_fn": lambda average, weights, count: average * 0.9 + weights * 0.1},
}


def batches(step: int) -> Sequence[Any]:
    return odd_batches(TOGETHER, step, extra=False)


def train(
    side: Side,
    steps: range,
    *averages: Any,
    batches_of: Callable[[int], Sequence[Any]] = batches,
    loss_of: Callable[[Any, Any], Tensor] = odd_loss,
) -> None:
    """Take steps over the micro-batches of all ranks, and update averages behind each."""
    world_size = side.world_size if isinstance(side, AsPlain) else side.optimizer.world_size
    for step in steps:
        for number, batch in enumerate(batches_of(step)):
            if number % world_size in side.ranks:
                side.train(lambda model, _, batch=batch: loss_of(model, batch), ranks=[number % world_size])  # type: ignore[misc]
        side.step()
        side.clear()
        for average in averages:
            average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))


def average_of(side: Side, kind: str, **arguments: Any) -> Any:
    if isinstance(side, AsPlain):
        return swa_utils.AveragedModel(side.model, **KINDS[kind])
    return ShardedAverage(side.optimizer, **KINDS[kind], **arguments)


def values(average: Any) -> dict[str, Any]:
    """Return an average's values and strides, by name."""
    ours = isinstance(average, ShardedAverage)
    found: Any = average.gather(to=None) if ours else dict(average.module.named_parameters())
    return {name: (value.stride(), value.detach().clone()) for name, value in found.items()}


def same(loop: Loop, world_size: int, stage: int, precision: Any = None, **settings: Any) -> None:
    """Assert that a loop gives ranks the bits of the plain loop."""
    arguments = {"settings": {"stage": stage, "bucket_cap_mb": 0.0005, **settings}, "precision": precision}
    same_as_plain(loop, lambda: locked_build(0), torch.optim.AdamW, world_size, divisor=TOGETHER, lr=0.01, **arguments)
