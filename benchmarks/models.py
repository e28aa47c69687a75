"""The models, by name: the GPTs of `benchmarks.steps`, and three families that grow along one axis.

    gpt-LxF        a GPT of L layers of width F, and one sequence of 32 tokens for input
    tensors-N      N tensors of 64 elements, and next to no arithmetic: the cost of a tensor
    layers-UxLxF   U units of L matrices of F x F elements each, for one row of input: the cost of an element

Knows: how a model is made, its input, and its loss. Does not know: systems, processes, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zero.commands.train.model import Shape, build, loss_fn

from .step_job import MODELS, Model

NUMEL = 64  # elements of each of the small tensors
UNITS = 8  # the units over which the tensors are spread, if there are as many


class Trainable(Protocol):
    """A model, a rank's input in a step, and its loss."""

    def build(self) -> nn.Module: ...

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...

    def loss(self, output: Tensor, targets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Text:
    """A GPT on random tokens."""

    model: Model

    def build(self) -> nn.Module:
        return build(self.model.shape, self.model.sequence, seed=0)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (self.model.batch, self.model.sequence + 1)
        tokens = torch.randint(self.model.shape.vocabulary, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(output, targets)


class _Unit(nn.Module):
    """A unit whose output is the sum of the squares of its tensors, scaled by the input."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(NUMEL, generator=generator)) for _ in range(count))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.cat([tensor * scale for tensor in self.tensors]).square().sum()


class _Units(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        units = min(UNITS, count)
        sizes = (count * (unit + 1) // units - count * unit // units for unit in range(units))
        self.units = nn.ModuleList(_Unit(size, generator) for size in sizes)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([unit(scale) for unit in self.units]).sum()


@dataclass(frozen=True)
class Tensors:
    """A model of ``count`` small tensors."""

    count: int

    @property
    def name(self) -> str:
        return f"tensors-{self.count}"

    def build(self) -> nn.Module:
        return _Units(self.count)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.rand((), generator=generator) + 0.5, torch.zeros(())

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return output / (self.count * NUMEL) - targets


class _Layer(nn.Linear):
    """A matrix whose output is scaled like its input, so that any number of layers can follow each other."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__(width, width, bias=False, device="meta")
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(super().forward(x), (self.in_features,))


@dataclass(frozen=True)
class Layers:
    """A model of ``units`` times ``each`` matrices of ``width`` x ``width``, one after another."""

    units: int
    each: int
    width: int

    @property
    def name(self) -> str:
        return f"layers-{self.units}x{self.each}x{self.width}"

    @property
    def numel(self) -> int:
        return self.units * self.each * self.width**2

    def build(self) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        units = [[_Layer(self.width, generator) for _ in range(self.each)] for _ in range(self.units)]
        return nn.Sequential(*(nn.Sequential(*layers) for layers in units))

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(1, self.width, generator=generator), torch.randn(1, self.width, generator=generator)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)


def trainable(name: str) -> Trainable:
    """Return the model of this name."""
    if name in MODELS:
        return Text(MODELS[name])
    family, _, numbers = name.partition("-")
    if family == "gpt":
        layers, width = map(int, numbers.split("x"))
        return Text(Model(name, Shape(layers, 4, width), 1, 32, "", ""))
    if family == "tensors":
        return Tensors(int(numbers))
    if family == "layers":
        units, each, width = map(int, numbers.split("x"))
        return Layers(units, each, width)
    raise ValueError(f"{name!r} is no model")
