"""Three layers in bf16 beside the plain loop, for the tests of master weights and casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from zero import MixedPrecision, ZeroOptimizer

from ..support.loops import seeded
from ..support.narrowed import BF16

WIDTH = 64  # a multiple of the alignment: no padding


def build(seed: int = 0, count: int = 3) -> nn.Sequential:
    made = seeded(seed, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))))
    assert isinstance(made, nn.Sequential)
    return made


def zero(model: Any, transport: Transport, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"lr": 0.05, "mixed_precision": MixedPrecision(BF16), "bucket_cap_mb": 0.01, **arguments}
    return ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, **arguments)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    found: Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return found


def step(model: nn.Module, optimizer: ZeroOptimizer, seed: int = 0) -> None:
    loss_of(model, seed).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
