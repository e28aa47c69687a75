"""Three equal layers with known values, a step of them in which two ranks do what one does, and what users change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.limits import BOUND
from ..support.small import blocks as build

BATCH = torch.linspace(-1, 1, 8).view(2, 4)


def zero(model: Any, group: Any, stage: int = 3, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=group, lr=0.5, **arguments)


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(BATCH.to(dtype)).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run a step. With equal batches, two ranks take the step of one."""
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def plain(steps: int = 1) -> nn.Sequential:
    """Return the model after steps of the plain loop."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        train(model, optimizer)
    return model


Act = Callable[[Any, ZeroOptimizer], Any]


def on_ranks(act: Act, stage: int, world_size: int = 2, **arguments: Any) -> list[Any]:
    """Build on each rank, act there, and return the results."""

    def program(transport: Transport) -> Any:
        model = build()
        return act(model, zero(model, transport, stage, **arguments))

    return on_threads(world_size, program, timeout=BOUND)


def replace(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.full((4, 4), 0.125))


def assign(model: nn.Sequential) -> None:
    model[1].weight.data = torch.full((4, 4), 0.125)


def widen(model: nn.Module) -> None:
    model.double()


def narrow(model: nn.Module) -> None:
    model.bfloat16()
