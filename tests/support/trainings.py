"""Helpers for the tests of the public interface: small trainings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from .models import build, odd_batches, odd_loss
from .small import TwoVectors


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


class Two(TwoVectors):
    def forward(self, scale: float, use_a: bool = True) -> Tensor:
        loss = super().forward(scale, use_a=False)
        return loss + (self.a * scale).square().sum() if use_a else loss


SGD = torch.optim.SGD
