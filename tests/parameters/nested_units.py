"""Models whose units lie inside units: blocks with experts, layers of experts, and weights that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..support.cases import WIDTH, Block, Case, net_of


class Expert(nn.Module):
    """A unit inside a block, with a unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Mixture(Block):
    """A block with parameters before, between and after its experts. It uses the router again after them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([Expert() for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        weights = self.router(self.norm(x)).softmax(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + weights[:, number, None] * expert(x)
        return super().forward(self.last(mixed)) + self.router(mixed).sum()


class EndsInside(nn.Module):
    """A block whose output is that of a unit inside it, which a backward therefore reaches before the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), Expert()

    def forward(self, x: Tensor) -> Any:
        return self.expert(torch.tanh(self.first(x)))


class Recomputed(Mixture):
    """A block that a checkpoint computes anew, with its experts."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def nested(module: nn.Module) -> bool:
    """Choose blocks, and the experts in them."""
    return isinstance(module, (Block, Expert))


def deeply_nested(module: nn.Module) -> bool:
    """Choose blocks, the experts in them, and a layer in each of these."""
    return nested(module) or (isinstance(module, nn.Linear) and module.out_features == WIDTH + 3)


def tie_inside(model: Any) -> None:
    """Share weights of experts with the other expert, with their block, with another block, and with the root."""
    first, second, third = model.blocks
    first.experts[1].up.weight = first.experts[0].up.weight
    second.experts[0].down.bias = second.last.bias
    third.experts[1].down.weight = second.experts[1].down.weight
    third.experts[0].down.bias = model.norm.bias
    third.experts[0].up = third.experts[1].up


def held_twice(model: Any) -> None:
    """Let two blocks hold the same expert."""
    model.blocks[2].experts[0] = model.blocks[0].experts[0]


EXPERTS_KEPT = {"prefetch_depth": 0, "reshard_after_forward": lambda module: not isinstance(module, Expert)}
BLOCKS_KEPT = {"prefetch_depth": 3, "reshard_after_forward": lambda module: not isinstance(module, Block)}
MIXTURE = Case(net_of(Mixture), units=nested)
NESTED: dict[str, Case] = {
    "experts in blocks": MIXTURE,
    "ties among experts": replace(MIXTURE, prepared=tie_inside, arguments=EXPERTS_KEPT),
    "experts recomputed": Case(net_of(Recomputed), units=deeply_nested, arguments=BLOCKS_KEPT),
}
