"""Executes the commands of a program: on a rank, or in the plain loop, which plays all ranks.

Knows: what is done alike. Does not know: how either trains (`run`, `check`, `fail`, ...), or how results are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from . import program as p
from .program import Command, Config, Setting
from .trees import PlannedError


class Player:
    """A `sides.Side` that executes commands. ``ranks``: those that it plays."""

    model: Any
    optimizer: Any
    scheduler: Any
    config: Config
    setting: Setting
    divisor: float
    ranks: Sequence[int]
    kept: list[tuple[int, list[Any]]]  # the backwards of each rank that `Keep` left

    def do(self, command: Command) -> Any:
        """Execute a command; return the result that every rank must have (where a command has one, its rank ``to``)."""
        match command:
            case p.Backward():
                for rank in self.ranks:
                    self._micro_batch(rank, command)
            case p.Uneven():
                for rank in self.ranks:
                    for turn in command.of(rank):
                        self._micro_batch(rank, turn)
                self.check()
            case p.Dropped():
                for rank in self.ranks:
                    self._micro_batch(rank, p.Backward(command.seed, "one", command.mask, command.sync))
                self.clear(command.how)
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
                for parameter in self.chosen(command.numbers):
                    parameter.requires_grad_(not parameter.requires_grad)
            case p.Change():
                group = self.optimizer.param_groups[command.group % len(self.optimizer.param_groups)]
                if command.key in group:
                    group[command.key] = command.value
            case p.Schedule():
                self.scheduler.step()
                return [group["lr"] for group in self.optimizer.param_groups]
            case p.Evaluate():
                self.model.eval()
                found = self.forward(command)
                self.model.train()
                return found
            case p.Read():
                return self.read(command.numbers)
            case p.Write():
                with suppress(PlannedError):
                    self._write(command)
            case p.Edit():
                self.edit(self.chosen((command.number,))[0], command.factor)
            case p.FullGrad():
                return self.full_gradient(command.number % len(list(self.model.parameters())))
            case p.SetGrad():
                return self.full_gradient(self._set(command))
            case p.Describe():
                self.check()
                if command.exact:
                    self.check_bytes()
            case p.Modes():
                return self._in_eval_mode(command.seed)
            case p.Reset():
                self.reset(self.chosen(command.numbers))
            case p.Lend():
                self.lend()
            case p.Average():
                return self.averaged(command)
            case p.Measure():
                return self.measure(command)
            case p.Wrong():
                self.refuse(command)
            case p.RollBack():
                self.roll_back(command)
                return self.read(None)
            case p.FailToAdd():
                self.fail_to_add(command)
            case p.Consolidate():
                return self.consolidated(command.to)
            case p.FullState():
                return self.full_state(command.to, masters=command.masters)
            case p.Load():
                self.load(command)
        return None

    def _set(self, command: p.SetGrad, **given: Any) -> int:
        """Replace a gradient; return its number."""
        number = command.number % len(list(self.model.parameters()))
        self.set_gradient(number, p.replacement(self.chosen((number,))[0], command), **given)
        return number

    def _write(self, command: p.Write) -> None:
        parameters = self.chosen(command.numbers)
        with self.gathered(None if command.numbers is None else parameters, write=True), torch.no_grad():
            for parameter in parameters:
                generator = torch.Generator().manual_seed(command.seed + 77 * self.ranks[0])
                added = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8
                added.view(-1)[::3] = 0.0  # an element that keeps its value keeps its master weight
                parameter.add_(added.to(parameter.dtype))
            if command.raises:
                with suppress(PlannedError), self.gathered():
                    raise PlannedError
            if command.raises == "all" or (command.raises and self.ranks[0]):
                raise PlannedError

    def whole_step(self, seed: int) -> None:
        for rank in self.ranks:
            self._micro_batch(rank, p.Backward(seed))
        self.clip(1.0)
        self.step()
        self.clear("zero_grad")

    def forward(self, command: p.Evaluate) -> Tensor:
        with torch.inference_mode() if command.inference else torch.no_grad():
            found: Tensor = self.model(p.micro_batch(self.setting, command.seed, command.mask, 0)).clone()
        return found

    def _in_eval_mode(self, seed: int) -> list[Tensor]:
        """Return the weights and an output in eval mode of the optimizer."""
        self.set_mode("eval")
        found = [self.forward(p.Evaluate(seed)), *self.read(None)]
        self.set_mode("train")
        return found

    def _micro_batch(self, rank: int, command: p.Backward) -> None:
        self.run(rank, p.backwards(self.model, self.setting, command, rank), command.sync)

    def _joined_steps(self, command: p.Joined) -> Any:
        self.clear("zero_grad")
        with self.join():
            for step in range(max(map(command.of, self.ranks))):
                for rank in self.ranks:
                    if step < command.of(rank):
                        self._micro_batch(rank, p.Backward(command.seed + step))
                for number in (0, 6) if command.sets else ():  # 6: a scalar, as formulas know no runs of unlike states
                    self._set(p.SetGrad(number, command.seed, none=number == 6), alike=True)
                self.clip(1.0)
                self.step()
                self.clear("zero_grad")
        return self.read(None)

    def check_bytes(self) -> None:
        """Nothing: the plain loop has no formulas."""

    def measure(self, command: p.Measure) -> int:
        """Return the payload bytes that are sent less what is due: their sum over the ranks is 0."""
        for each in command.commands:
            self.do(each)
        return 0

    def refuse(self, command: p.Wrong) -> None:
        """Nothing: the plain loop refuses nothing."""

    def chosen(self, numbers: p.Numbers) -> list[nn.Parameter]:
        parameters = list(self.model.parameters())
        return parameters if numbers is None else [parameters[number % len(parameters)] for number in numbers]

    def read(self, numbers: p.Numbers) -> list[Tensor]:
        """Return the values of parameters."""
        parameters = self.chosen(numbers)
        with self.gathered(None if numbers is None else parameters):
            return p.values(parameters)

    def edit(self, parameter: Tensor, factor: float) -> None:
        """Edit a parameter outside `gathered`."""
        with torch.no_grad():
            parameter.mul_(factor)
