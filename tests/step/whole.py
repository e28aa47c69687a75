"""A model of which classes step some parameters whole, and its training beside the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support import sides
from ..support.loops import seeded
from ..support.sides import AsPlain, OnRank

MICRO_BATCHES = 6
Named = list[tuple[str, Any]]


class Mixed(nn.Module):
    """Matrices and vectors, for one class each: some unused, frozen, tied, and in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].weight = nn.Parameter(self.blocks[1][2].weight.detach().t().contiguous().t())
        self.norm, self.unused, self.frozen = nn.LayerNorm(8), nn.Linear(3, 5), nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.frozen(self.norm(x))


def shared(model: nn.Module) -> tuple[Named, Named]:
    """Return the matrices of the blocks, and all else."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.dim() == 2 and name.startswith("blocks")]
    return matrices, [(name, p) for name, p in named if all(p is not q for _, q in matrices)]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups of Muon and AdamW."""
    matrices, rest = shared(model)
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02, "weight_decay": 0.1},
        {"params": rest[::2], "optimizer_class": torch.optim.AdamW, "lr": 0.01},
        {"params": rest[1::2], "optimizer_class": torch.optim.AdamW, "lr": 0.005, "weight_decay": 0.0},
    ]


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x.to(next(model.parameters()).dtype)).square().mean()
    return found


def train_plainly(model: nn.Module, optimizer: Any, steps: range) -> None:
    sides.train(AsPlain(model, lambda _: optimizer, divisor=MICRO_BATCHES), steps, batches, loss_of, 0.5)


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range = range(3)) -> None:
    optimizer.divisor = MICRO_BATCHES
    sides.train(OnRank(model, optimizer), steps, batches, loss_of, 0.5)


def made(build: Callable[[], nn.Module] = Mixed) -> Any:
    return seeded(0, build)


def on_ranks(
    world_size: int, run: Callable[[Any, Transport], Any], build: Callable[[], nn.Module] = Mixed
) -> list[Any]:
    """Call ``run`` on every rank with a model."""
    models = [made(build) for _ in range(world_size)]
    return on_threads(world_size, lambda transport: run(models[transport.rank], transport), timeout=10)
