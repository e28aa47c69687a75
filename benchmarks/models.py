"""The models, by name: four GPTs, and two families.

    gpt-LxF      a GPT of L layers of width F, and one sequence of 32 tokens for input
    tensors-N    N tensors of 64 elements, and next to no arithmetic: the cost of a tensor

Knows: how a model is made, its input, and its loss. Does not know: systems, processes, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .gpt import Shape, build, loss_fn

NUMEL = 64  # elements of each of the small tensors
UNITS = 8  # the units over which the tensors are spread, if there are as many


class Trainable(Protocol):
    """A model, a rank's input in a step, and its loss."""

    def build(self) -> nn.Module: ...

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...

    def loss(self, output: Tensor, targets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Text:
    """A GPT on random tokens: in a step, a rank takes ``sequences`` of ``length`` tokens."""

    shape: Shape
    sequences: int = 1
    length: int = 32
    says: str = ""

    def build(self) -> nn.Module:
        return build(self.shape, self.length, seed=0)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (self.sequences, self.length + 1)
        tokens = torch.randint(self.shape.vocabulary, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(output, targets)


MODELS = {
    "compute": Text(Shape(6, 4, 256), 8, 128, "much work for each parameter"),
    "wide": Text(Shape(4, 8, 768), says="one sequence a rank: little work for each parameter"),
    "deep": Text(Shape(48, 4, 64), says="many small tensors"),
    "embedding": Text(Shape(2, 4, 256, 32768), 1, 64, "most parameters in one tensor"),
}


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

    def build(self) -> nn.Module:
        return _Units(self.count)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.rand((), generator=generator) + 0.5, torch.zeros(())

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return output / (self.count * NUMEL) - targets


def trainable(name: str) -> Trainable:
    """Return the model of this name. Raises `ValueError`."""
    family, _, numbers = name.partition("-")
    if name in MODELS:
        return MODELS[name]
    if family == "gpt":
        layers, width = map(int, numbers.split("x"))
        return Text(Shape(layers, 4, width))
    if family == "tensors":
        return Tensors(int(numbers))
    raise ValueError(f"{name!r} is no model: there are {', '.join(MODELS)}, gpt-LxF and tensors-N")
