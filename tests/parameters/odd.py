"""Training of the odd model on one rank, step by step, and in the plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero import ZeroOptimizer

from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.plain import plain_step

STEPS = 3


class Run:
    """A rank that trains."""

    def __init__(self, group: Any, **arguments: Any) -> None:
        self.model: Any = locked_build(0)
        given = {"process_group": group, "bucket_cap_mb": 0.0005, "lr": 0.1, **arguments}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, **given)
        self.rank = self.optimizer.rank
        self.batches = batches(self.optimizer.world_size)

    def loss(self, number: int = 0) -> Any:
        return odd_loss(self.model, self.batches[number][self.rank])

    @torch.no_grad()
    def evaluate(self) -> Any:
        return self.loss()

    def end_step(self) -> None:
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.end_step()


def batches(ranks: int) -> list[list[Any]]:
    return [odd_batches(ranks, seed=step, extra=False) for step in range(STEPS)]


def plain(ranks: int) -> nn.Module:
    model = locked_build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in batches(ranks):
        plain_step(model, optimizer, odd_loss, step, ranks, max_norm=1.0)
        optimizer.zero_grad()
    return model
