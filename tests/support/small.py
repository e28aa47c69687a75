"""Small models whose gradients are known, and plain loops to compare them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from .plain import plain_step


class TwoVectors(nn.Module):
    """A model that uses ``a`` only if the caller asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(32.0))
        self.b = nn.Parameter(torch.arange(40.0) / 7)

    def forward(self, scale: float, use_a: bool = True) -> Tensor:
        loss = (self.b * scale).square().sum()
        return loss + (self.a * scale).sum() if use_a else loss


def with_sgd(model: nn.Module, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, process_group=transport, lr=0.1, **arguments)


def plain_two(
    batches: list[tuple[float, bool]], divisor: float, steps: int = 1, clip: float | None = None
) -> TwoVectors:
    """Run the plain loop over micro-batches (scale, whether ``a`` is used)."""
    model = TwoVectors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain_step(model, optimizer, lambda m, batch: m(*batch), batches, divisor, clip)
    return model


def blocks() -> nn.Sequential:
    """Build three units of one size, the same every time."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.25 + number / 8)
    return model
