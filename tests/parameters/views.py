"""A net whose parameters and buffers are views of one tensor, and share no element. Ranks have batches of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from ..support.plain import plain_step

INPUTS = torch.linspace(-1, 1, 8).view(2, 4)


class Layer(nn.Module):
    """A unit: a trained, a frozen and an empty parameter, and a buffer."""

    def __init__(self, weight: Tensor, frozen: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(weight), nn.Parameter(frozen, requires_grad=False)
        self.empty = nn.Parameter(weight[:0])
        self.register_buffer("offset", offset)

    offset: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight @ self.frozen) + self.offset


class Views(nn.Module):
    """Two layers over one tensor, whose buffers each forward edits. Two parameters were made of alternate columns of a
    second one, and then got memory of their own. One is a buffer, too, and a frozen parameter lies in two places."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.linspace(-1, 1, 96).view(6, 4, 4)
        self.layers = nn.ModuleList(Layer(*base[first : first + 2], base[first + 2, 0]) for first in (0, 3))
        columns = torch.linspace(1, -1, 32).view(4, 8)
        self.even, self.odd = nn.Parameter(columns[:, ::2]), nn.Parameter(columns[:, 1::2])
        for parameter in (self.even, self.odd):
            parameter.data = parameter.data.contiguous()
        self.tied = self.layer(0).frozen
        self.register_buffer("again", self.even)

    again: Tensor

    def layer(self, number: int) -> Layer:
        found = self.layers[number]
        assert isinstance(found, Layer)
        return found

    def forward(self, inputs: Tensor) -> Any:
        for layer in self.layers:
            layer.offset.add_(0)  # the edit of a buffer later would be one of all weights, for autograd
        hidden = inputs @ self.again + (inputs @ self.odd) @ self.tied
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def batches(step: int, ranks: int) -> list[Tensor]:
    return [INPUTS * (1 + step + 0.5 * rank) for rank in range(ranks)]


def plain_views(ranks: int, steps: int, model: Any = None) -> Any:
    """Return the net, or another model, after steps of the plain loop over the ranks' batches."""
    model = Views() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        plain_step(model, optimizer, loss_of, batches(step, ranks), ranks)
        optimizer.zero_grad()
    return model


def train_views(group: Any, steps: int, model: Any = None, **arguments: Any) -> Any:
    """Return the net, or another model, after steps of this rank."""
    model = Views() if model is None else model
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, process_group=group, lr=0.1, **arguments)
    for step in range(steps):
        loss_of(model, batches(step, optimizer.world_size)[optimizer.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model


def views_of_process(group: Any, rank: int, collective: str) -> Any:
    """Return the net after three steps at stage 3."""
    return train_views(group, 3, stage=3, collective=collective)
