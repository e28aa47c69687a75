"""Models for plans, under 10,000 parameters each, and their description without values.

Each model runs its units in order of registration, and a backward reaches every unit, as the formulas assume.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.parameter_specs import bindings
from zero.core.units import find_units
from zero.planning.model import Model, ParameterShape

WIDTH = 24


class _Block(nn.Module):
    """A unit with a matrix, a vector, a scalar, and parameters that no forward uses."""

    def __init__(self, width: int, unused: int = 0) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(width, width) / width)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(width))
        if unused:
            self.unused = nn.Parameter(torch.ones(unused))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.scale + self.shift


class Tied(nn.Module):
    """A model whose head is its embedding, with empty, scalar, one-element and unused parameters in the root's rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(17, WIDTH))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([_Block(WIDTH, unused=5), _Block(WIDTH, unused=1500)])
        self.unused = nn.Parameter(torch.ones(1400))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embedding

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embedding * self.one + self.empty.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Aligned(nn.Module):
    """A model whose parameters leave no padding, so that runs cross them; with two param groups."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class Frozen(nn.Module):
    """A model with a frozen unit, and with frozen parameters in the root's rest, one of them without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(WIDTH) for _ in range(2))
        self.blocks[1].requires_grad_(False)
        self.frozen = nn.Parameter(torch.ones(9, 9), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(3, 0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.frozen.sum() + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Planned:
    """A model to plan and to train.

    Attributes:
        name: of the model.
        make: builds it.
        features: of its input.
        bucket_cap_mb: of its buckets.
        groups: returns the number of the param group of a parameter, by its name.
    """

    name: str
    make: Callable[[], nn.Module]
    features: int
    bucket_cap_mb: float
    groups: Callable[[str], int] = lambda _: 0

    def built(self, count: int) -> list[nn.Module]:
        """Return equal copies of the model."""
        first = self.make()
        return [first, *(copy.deepcopy(first) for _ in range(count - 1))]

    def param_groups(self, module: nn.Module, *, of_muon: bool = False) -> list[dict[str, Any]]:
        """Return the param groups of a copy. ``of_muon``: and one of Muon, for the matrices of units."""
        named, units = list(module.named_parameters()), find_units(module).numbers()
        count = 1 + max(self.groups(name) for name, _ in named)
        matrices = [p for _, p in named if of_muon and units[id(p)] and p.dim() == 2]
        taken = {id(p) for p in matrices}
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if self.groups(name) == group and id(p) not in taken]}
            for group in range(count)
        ]
        muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "partition": "parameter"}
        return [*groups, *([muon] if matrices else [])]


def _sequential() -> nn.Module:
    return nn.Sequential(*(nn.Linear(29, 29) for _ in range(3)))


PLANNED = {
    planned.name: planned
    for planned in (
        Planned("sequential", _sequential, 29, 0.007),
        Planned("frozen", Frozen, WIDTH, 0.003),
        Planned("tied", Tied, 17, 0.006),
        Planned("aligned", Aligned, 32, 25.0, lambda name: int("bias" in name)),
    )
}


def described(planned: Planned) -> Model:
    """Return the description of a model."""
    module = planned.make()
    units = find_units(module)
    numbers, names = units.numbers(), dict[int, list[str]]()
    for binding in bindings(module):
        names.setdefault(id(binding.parameter), []).append(binding.name)
    return Model(
        planned.name,
        tuple(
            ParameterShape(
                tuple(names[id(parameter)]),
                tuple(parameter.shape),
                numbers[id(parameter)],
                parameter.requires_grad,
                planned.groups(name),
                used="unused" not in name,
            )
            for name, parameter in module.named_parameters()
        ),
        units.names,
    )
