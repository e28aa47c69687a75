"""Helpers for the tests of the public interface: small trainings, and an optimizer that counts its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from .models import build, odd_batches, odd_loss
from .small import TwoVectors

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def trained(transport: Transport, stage: int, steps: int = 1, **arguments: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """Train ``steps`` whole steps on one rank, and then run the backward of the next."""
    model = build(0)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.0005, lr=1e-2, **arguments)
    for step in range(steps + 1):
        odd_loss(model, odd_batches(transport.world_size, step)[transport.rank]).backward()
        if step < steps:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its group, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Two(TwoVectors):
    def forward(self, scale: float, use_a: bool = True) -> Tensor:
        loss = super().forward(scale, use_a=False)
        return loss + (self.a * scale).square().sum() if use_a else loss


SGD = torch.optim.SGD
