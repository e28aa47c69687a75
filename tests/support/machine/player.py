"""Executes the commands of a program: on a rank, or in the plain loop, which plays all ranks.

Knows: what is done alike. Does not know: how either trains, or how results are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import program as p
from .program import Command, Setting


class Player:
    """A `sides.Side` that executes commands. ``ranks``: those that it plays."""

    model: Any
    optimizer: Any
    scheduler: Any
    setting: Setting
    divisor: float
    ranks: Sequence[int]
    kept: list[tuple[int, list[Any]]]  # the backwards of each rank that `Keep` left

    def do(self, command: Command) -> Any:
        """Execute a command; return the result that every rank must have (after `Consolidate`, its rank ``to``)."""
        match command:
            case p.Backward():
                for rank in self.ranks:
                    self._micro_batch(rank, command)
            case p.Uneven():
                for rank in self.ranks:
                    for turn in command.of(rank):
                        self._micro_batch(rank, turn)
                self.check()
            case p.Keep():
                kept = p.Backward(command.seed, "one", command.mask)
                self.kept = [(rank, p.backwards(self.model, self.setting, kept, rank)) for rank in self.ranks]
            case p.BackwardOfKept():
                for rank, backwards in self.kept:
                    self.run(rank, backwards, command.sync)
                self.kept = []
            case p.Fail():
                self.fail(command)
            case p.Clip():
                return self.clip(command.max_norm, command.norm_type)
            case p.Divide():
                self.divisor = command.by
            case p.Step():
                self.step()
                return self.read(None) if command.look else None
            case p.Scaled():
                return self.scaled_step(command)
            case p.Joined():
                return self._joined_steps(command)
            case p.ZeroGrad():
                self.clear(command.how)
            case p.Freeze():
                for parameter in p.chosen(self.model, command.numbers):
                    parameter.requires_grad_(not parameter.requires_grad)
            case p.Change():
                p.change(self.optimizer, command)
            case p.Schedule():
                self.scheduler.step()
                return [group["lr"] for group in self.optimizer.param_groups]
            case p.Evaluate():
                return p.evaluate(self.model, self.setting, command)
            case p.Read():
                return self.read(command.numbers)
            case p.Write():
                parameters = p.chosen(self.model, command.numbers)
                with self.gathered(None if command.numbers is None else parameters, write=True):
                    for parameter in parameters:
                        p.edit(parameter, command.seed, self.ranks[0])
            case p.Edit():
                self.edit(p.chosen(self.model, (command.number,))[0], command.factor)
            case p.FullGrad():
                return self.full_gradient(command.number % len(list(self.model.parameters())))
            case p.Describe():
                self.check()
            case p.Consolidate():
                return self.consolidated(command.to)
            case p.Load():
                self.load(command.setting)
        return None

    def _micro_batch(self, rank: int, command: p.Backward) -> None:
        self.run(rank, p.backwards(self.model, self.setting, command, rank), command.sync)

    def _joined_steps(self, command: p.Joined) -> Any:
        self.clear("zero_grad")
        with self.join():
            for step in range(max(map(command.of, self.ranks))):
                for rank in self.ranks:
                    if step < command.of(rank):
                        self._micro_batch(rank, p.Backward(command.seed + step))
                self.clip(1.0)
                self.step()
                self.clear("zero_grad")
        return self.read(None)

    def read(self, numbers: p.Numbers) -> list[Tensor]:
        """Return the values of parameters."""
        parameters = p.chosen(self.model, numbers)
        with self.gathered(None if numbers is None else parameters):
            return p.values(parameters)

    def edit(self, parameter: Tensor, factor: float) -> None:
        """Edit a parameter outside `gathered`."""
        with torch.no_grad():
            parameter.mul_(factor)

    def load(self, setting: Setting) -> None:
        """Save, and load with another setting."""
        raise NotImplementedError("new ranks are built")

    def run(self, rank: int, backwards: list[Any], sync: bool) -> None:
        """Run the backwards of a micro-batch."""
        raise NotImplementedError

    def check(self) -> None:
        """Let the ranks meet."""
        raise NotImplementedError
