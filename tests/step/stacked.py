"""Models with stacks of matrices, and the plain loop that steps each block of them as a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from ..support import sides
from ..support.sides import AsPlain, OnRank

QKV = [16, 8, 8]
Groups = list[dict[str, Any]]


class Stacks(nn.Module):
    """Experts in two tensors, of which one has odd matrices, and fused projections. One stack is unused, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(32, 4)
        self.up = nn.Parameter(torch.randn(5, 16, 24) / 4)
        self.down = nn.Parameter(torch.randn(5, 24, 16) / 5)
        self.odd = nn.Parameter(torch.randn(1, 7, 3, 5) / 2)
        self.qkv = nn.Parameter(torch.randn(32, 16) / 4)
        self.unused = nn.Parameter(torch.randn(3, 8, 8))
        self.frozen = nn.Parameter(torch.randn(3, 16, 16) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + torch.einsum("bd,edh,ehf->bf", x, self.up, self.down).tanh()
        x = x + torch.einsum("bd,edf->bf", x, self.frozen)
        x = x + (x[:, :3] @ self.odd[0]).tanh().sum(0).repeat(1, 4)[:, :16]
        found: Tensor = self.leave(x @ self.qkv.t())
        return found


def groups_of(model: nn.Module, cls: Any = torch.optim.Muon, sizes: Any = QKV, **options: Any) -> Groups:
    """Return param groups of blocks, of matrices and of all else."""
    named = dict(model.named_parameters())
    of_blocks = {"optimizer_class": cls, "lr": 0.02, **options}
    stacks = [(name, named.pop(name)) for name in ("up", "down", "unused", "frozen")]
    return [
        {**of_blocks, "params": stacks, "blocks": 0},
        {**of_blocks, "params": [("odd", named.pop("odd"))], "blocks": 1, "lr": 0.05},
        {**of_blocks, "params": [("qkv", named.pop("qkv"))], "blocks": sizes},
        {**of_blocks, "params": [("leave.weight", named.pop("leave.weight"))], "partition": "parameter"},
        {"params": list(named.items()), "lr": 0.01},
    ]


class PlainBlocks:
    """The plain loop's optimizers: one of each class, whose parameters are the blocks of those of the groups."""

    def __init__(self, groups: Groups, updated: Sequence[Tensor], model: nn.Module) -> None:
        """``updated``: what is stepped for each of the model's parameters."""
        stepped = {id(p): wide for p, wide in zip(model.parameters(), updated, strict=True)}
        self.stacks: list[tuple[Tensor, list[Tensor], Any]] = []
        self.param_groups: Groups = []
        by_class: dict[Any, Groups] = {}
        for group in groups:
            given = dict(group)
            blocks, cls = given.pop("blocks", None), given.pop("optimizer_class", torch.optim.AdamW)
            given.pop("partition", None)
            parameters = [stepped[id(p)] for _, p in given["params"]]
            given["params"] = [block for p in parameters for block in self._blocks_of(p, blocks)]
            by_class.setdefault(cls, []).append(given)
        self.optimizers = {cls: cls(own) for cls, own in by_class.items()}

    def _blocks_of(self, p: Tensor, blocks: Any) -> list[Tensor]:
        own = (
            [block.requires_grad_(p.requires_grad) for block in cut(p.detach(), blocks)] if blocks is not None else [p]
        )
        self.stacks.append((p, own, blocks))
        return own

    def step(self) -> None:
        for p, own, blocks in self.stacks:
            if blocks is not None:
                gradients = [None] * len(own) if p.grad is None else cut(p.grad, blocks)
                for block, gradient in zip(own, gradients, strict=True):
                    block.grad = gradient
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p, _, _ in self.stacks:
            p.grad = None

    def states(self) -> dict[str, dict[int, Any]]:
        """Return the states of each class: those of blocks together, as those of their parameter."""
        found: dict[str, dict[int, Any]] = {f"{cls.__module__}.{cls.__qualname__}": {} for cls in self.optimizers}
        counts = dict.fromkeys(self.optimizers, 0)
        for p, own, blocks in self.stacks:
            cls = next(cls for cls, each in self.optimizers.items() if any(own[0] is q for q in listed(each)))
            states = [self.optimizers[cls].state.get(block, {}) for block in own]
            if states[0]:
                together = {name: as_one([s[name] for s in states], own, p, blocks) for name in states[0]}
                found[f"{cls.__module__}.{cls.__qualname__}"][counts[cls]] = together
            counts[cls] += 1
        return found


def listed(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def cut(tensor: Tensor, blocks: Any) -> list[Tensor]:
    """Return the blocks of a tensor, as views."""
    return (
        [*tensor.split(blocks)]
        if isinstance(blocks, list)
        else [*tensor.unbind(blocks)]
        if not blocks
        else [*tensor[0].unbind()]
    )


def as_one(values: list[Any], own: list[Tensor], p: Tensor, blocks: Any) -> Any:
    """Return the state of a parameter, given those of its blocks."""
    if blocks is None:
        return values[0]
    if isinstance(values[0], Tensor) and values[0].shape == own[0].shape:
        return torch.cat([value.reshape(-1) for value in values]).view(p.shape)
    same = all(torch.equal(value, values[0]) if isinstance(value, Tensor) else value == values[0] for value in values)
    return values[0] if same else torch.stack(values)


def batches(step: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 8, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x.to(next(model.parameters()).dtype)).square().mean()
    return found


def plain_of(model: nn.Module, count: int, precision: Any = None, **options: Any) -> AsPlain:
    def optimizer_of(updated: Sequence[Tensor]) -> Any:
        return PlainBlocks(groups_of(model, **options), updated, model)

    return AsPlain(model, optimizer_of, precision=precision, divisor=count)


def train(side: Any, steps: range, count: int) -> None:
    """Train with ``count`` micro-batches per step."""
    if isinstance(side, ZeroOptimizer):
        side.divisor = count
        side = OnRank(side._module, side)
    sides.train(side, steps, lambda step: batches(step, count), loss_of, 0.5)
