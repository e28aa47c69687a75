"""Ranks of stage 3: alone, sent to each other, or in memory that they share; two small models, and their plain loops.

With equal batches two ranks take the step of one, so that one plain loop is right for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.cases import Case, check_rank, plain_loop
from ..support.limits import BOUND
from ..support.sockets import on_sockets

T = TypeVar("T")
WORLDS = {"one": (on_threads, 1), "travel": (on_threads, 2), "several": (on_threads, 3), "common": (on_sockets, 2)}
TOGETHER = pytest.mark.parametrize("world", ["one", "common"])  # where no unit is sent


def on(world: str, program: Callable[[Transport], T]) -> list[T]:
    """Run a program on the ranks of a world."""
    ranks, size = WORLDS[world]
    return ranks(size, program, timeout=2 * BOUND)


def size_of(world: str) -> int:
    return WORLDS[world][1]


def check_in(world: str, case: Case) -> None:
    """Train a case on the ranks of a world, and compare each step with the plain loop."""
    _, expected = plain_loop(case, size_of(world))
    on(world, lambda transport: check_rank(case, transport, expected))


INPUTS = torch.linspace(-1, 1, 6).view(2, 3)


class Block(nn.Module):
    """A unit with a matrix and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.25)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight) * self.scalar


class Net(nn.Module):
    """Three units behind a layer of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        nn.init.constant_(self.first.weight, 0.5)

    def block(self, number: int) -> Block:
        found = self.blocks[number]
        assert isinstance(found, Block)
        return found

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def zero(model: Any, group: Any, stage: int = 3, **arguments: Any) -> ZeroOptimizer:
    given = {"optimizer_class": torch.optim.SGD, "lr": 0.5, **arguments}
    return ZeroOptimizer(model, stage=stage, process_group=group, **given)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = INPUTS) -> None:
    torch.autograd.backward(loss_of(model, inputs))
    optimizer.step()
    model.zero_grad()


def plain(steps: int, *, doubled: bool = False) -> Net:
    """Return the net after some steps of the plain loop, whose ``blocks.1.weight`` was doubled before or not."""
    model = Net()
    if doubled:
        model.block(1).weight.data.mul_(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        train(model, optimizer)
    return model


def on_ranks(
    world: str, act: Callable[[Any, ZeroOptimizer], Any], build: Callable[[], Any] = Net, **arguments: Any
) -> list[tuple[Any, Any]]:
    """Return each rank's result of an action, and its model after one further step."""

    def program(transport: Transport) -> tuple[Any, Any]:
        model = build()
        optimizer = zero(model, transport, **arguments)
        found = act(model, optimizer)
        optimizer.zero_grad()
        train(model, optimizer, getattr(model, "inputs", INPUTS))
        optimizer.close()
        return found, model

    return on(world, program)


class Run:
    """A rank that trains by parts of a step."""

    def __init__(self, group: Any, **arguments: Any) -> None:
        self.model = Net()
        self.optimizer = zero(self.model, group, **arguments)
        self.rank = self.optimizer.rank

    def loss(self) -> Any:
        return loss_of(self.model, INPUTS)

    @torch.no_grad()
    def evaluate(self) -> Any:
        return self.loss()

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss().backward()
        self.end_step()


class Blocks(nn.Sequential):
    """Three units of one size, the same every time. Small ones lie in one page of memory, those of 40 in several."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(3)))
        for number, parameter in enumerate(self.parameters()):
            values = torch.linspace(-0.5, 0.5 + number, parameter.numel()) / width
            parameter.data = values.view(parameter.shape)
        self.inputs = torch.ones(2, width)

    def weight(self, number: int) -> nn.Parameter:
        weight = self[number].weight
        assert isinstance(weight, nn.Parameter)
        return weight


SLOWLY = 1e-3  # a learning rate at which `Blocks` do not diverge


def on_blocks(
    world: str, width: int, act: Callable[[Any, ZeroOptimizer], Any], **arguments: Any
) -> list[tuple[Any, Blocks]]:
    return on_ranks(world, act, lambda: Blocks(width), lr=SLOWLY, **arguments)


def plain_blocks(width: int, steps: int, *, doubled: int | None = None) -> Blocks:
    model = Blocks(width)
    if doubled is not None:
        model.weight(doubled).data.mul_(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=SLOWLY)
    for _ in range(steps):
        train(model, optimizer, model.inputs)
    return model
