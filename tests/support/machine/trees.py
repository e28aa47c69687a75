"""Random models: a tree of parts as data, and the module that is built from it.

Knows: every kind of parameter and of use that a model may have. Does not know: training, or ranks.

A part maps (rows, width) to (rows, width). In an *integer* model each parameter only adds a sum of its elements, each
times a small integer of the batch: gradients are integers whatever the weights are, so a sum is exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..models import seeded

FEATURES, ROWS = 3, 2
Kind = Literal[
    "linear", "matrix", "tied", "turned", "scalar", "one", "empty", "norm", "unused", "views", "gaps",
    "sequence", "twice", "sometimes", "checkpoint",
]  # fmt: skip
LEAVES: tuple[Kind, ...] = ("linear", "matrix", "tied", "turned", "scalar", "one", "empty", "norm", "unused")
VIEWS: tuple[Kind, ...] = ("views",)
GAPS: tuple[Kind, ...] = ("gaps",)  # used by element alone: sums and products over gaps add up in another order
WRAPPERS: tuple[Kind, ...] = ("sequence", "twice", "sometimes", "checkpoint")


class Source:
    """Makes a subclass a frozen dataclass that prints as the shortest source text that makes it."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    def __repr__(self) -> str:
        told = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_source(value)}' for name, value in told)})"


def _source(value: object) -> str:
    return "float('inf')" if value == math.inf else repr(value)


class Part(Source):
    """A node of the tree. ``size``: of the parameters inside a leaf; ``of``: the children of a wrapper."""

    kind: Kind
    size: int = 5
    dtype: str = "float32"
    frozen: bool = False
    of: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Batch:
    """A micro-batch. ``mask``: bit j is set if the j-th "sometimes" part is used. ``zeros``: so are all gradients."""

    x: Tensor
    mask: int = -1
    fails: bool = False
    zeros: bool = False


class PlannedError(ZeroDivisionError):
    """The error that a program raises on purpose."""


class Builder:
    """Builds the parts of a tree, and keeps the matrices and counts for the next parts."""

    def __init__(self, width: int, integer: bool) -> None:
        self.width, self.integer = width, integer
        self.matrices: list[nn.Parameter] = []
        self.sometimes = 0

    def build(self, part: Part) -> nn.Module:
        return Wrapper(part, self) if part.kind in WRAPPERS else Leaf(part, self)


class Leaf(nn.Module):
    """A few parameters, each used once."""

    def __init__(self, part: Part, builder: Builder) -> None:
        super().__init__()
        self.kind, self.integer, self.dtype = part.kind, builder.integer, getattr(torch, part.dtype)
        for name, value in self._values(part, builder).items():
            self.register_parameter(name, value)
        for parameter in self.parameters():
            if part.frozen and part.kind != "tied":
                parameter.requires_grad_(False)

    def _values(self, part: Part, builder: Builder) -> dict[str, nn.Parameter]:
        width, size, dtype = builder.width, part.size, self.dtype

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=torch.float64).div(4).to(dtype))

        match part.kind:
            case "linear":
                return {"inner": random(size, width), "bias": random(size), "outer": random(width, size)}
            case "tied" if builder.matrices:
                return {"weight": builder.matrices[size % len(builder.matrices)]}
            case "matrix" | "tied":
                builder.matrices.append(random(width, width))
                return {"weight": builder.matrices[-1]}
            case "turned":
                return {"turned": nn.Parameter(random(width, width).detach().t())}
            case "scalar":
                return {"scale": nn.Parameter(torch.tensor(1.25, dtype=dtype))}
            case "norm":
                return {"gain": random(width), "shift": random(width)}
            case "views" | "gaps":  # of one tensor
                both = random(2, width).detach() if part.kind == "views" else random(width, 2).detach().t()
                return {"left": nn.Parameter(both[0]), "right": nn.Parameter(both[1])}
            case _:
                return {part.kind: random(*{"one": (1,), "empty": (0, 3), "unused": (size,)}[part.kind])}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "unused":
            return x
        if self.integer or batch.zeros:
            return _with_integers(x, list(self.parameters()), batch)
        return x + USES[self.kind](self, x.to(next(self.parameters()).dtype)).to(x.dtype)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {  # of the parameters of a leaf
    "linear": lambda leaf, y: torch.tanh(y @ leaf.inner.t() + leaf.bias) @ leaf.outer.t(),
    "matrix": lambda leaf, y: torch.tanh(y @ leaf.weight),
    "tied": lambda leaf, y: torch.tanh(y @ leaf.weight),
    "turned": lambda leaf, y: torch.tanh(nn.functional.linear(y, leaf.turned)),
    "scalar": lambda leaf, y: y * leaf.scale,
    "one": lambda leaf, y: y + leaf.one,
    "empty": lambda leaf, y: y + leaf.empty.sum(),
    "norm": lambda leaf, y: nn.functional.layer_norm(y, y.shape[-1:], leaf.gain, leaf.shift),
    "views": lambda leaf, y: y * leaf.left + leaf.right,
    "gaps": lambda leaf, y: y * leaf.left + leaf.right,
}


class Wrapper(nn.Module):
    """Parts, and how often they are used."""

    def __init__(self, part: Part, builder: Builder) -> None:
        super().__init__()
        self.kind, self.number = part.kind, builder.sometimes
        builder.sometimes += part.kind == "sometimes"
        self.of = nn.Sequential(*(builder.build(child) for child in part.of))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "checkpoint":
            found: Tensor = checkpoint(self.inside, x, batch, use_reentrant=False)
            return found
        if self.kind == "sometimes" and not batch.mask >> self.number & 1:
            return x
        return self.inside(self.inside(x, batch) if self.kind == "twice" else x, batch)

    def inside(self, x: Tensor, batch: Batch) -> Tensor:
        for part in self.of:
            x = part(x, batch)
        return x


class Tree(nn.Module):
    """A first layer, a list of parts, and a last layer."""

    def __init__(self, parts: tuple[Part, ...], width: int, integer: bool) -> None:
        super().__init__()
        builder = Builder(width, integer)
        self.integer = integer
        self.first = nn.Linear(FEATURES, width)
        self.parts = nn.ModuleList([builder.build(part) for part in parts])
        self.last = nn.Linear(width, 2)

    def forward(self, batch: Batch) -> Tensor:
        batch = replace(batch, x=batch.x.to(self.first.weight.device))
        if integer := self.integer or batch.zeros:
            x = _with_integers(batch.x.new_zeros(ROWS, self.first.out_features), list(self.first.parameters()), batch)
        else:
            x = torch.tanh(self.first(batch.x.to(self.first.weight.dtype)))
        for number, part in enumerate(self.parts):
            if batch.fails and number == len(self.parts) // 2:
                raise PlannedError("in the middle of a forward")
            x = part(x, batch)
        if batch.fails:
            raise PlannedError("at the end of a forward")
        return _with_integers(x, list(self.last.parameters()), batch) if integer else self.last(x)


def _with_integers(x: Tensor, parameters: list[nn.Parameter], batch: Batch) -> Tensor:
    """Return ``x`` plus the sum of all elements, each times an integer from -3 to 3, or 0.0 and -0.0 in turn."""
    for parameter in parameters:
        positions = torch.arange(parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
        factors = (positions * 5 + batch.x.detach().cpu()[0, 0].double() * 1000).round().remainder(7) - 3
        factors = (0.5 - positions.remainder(2)) * 0.0 if batch.zeros else factors
        x = x + (parameter * factors.to(parameter.device, parameter.dtype)).sum().to(x.dtype)
    return x


def build(parts: tuple[Part, ...], width: int, integer: bool, seed: int) -> Tree:
    """Build the module; the same one for the same arguments."""
    return seeded(seed, lambda: Tree(parts, width, integer))


def batch_of(seed: int, rank: int, mask: int, fails: bool = False) -> Batch:
    """Return a rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return Batch(torch.randn(ROWS, FEATURES, generator=generator), mask, fails)
