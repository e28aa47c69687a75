"""The plain loop of a program: one process, torch's own optimizer, nothing of this library but `clip_grad_norm_`.

The contract's order of a sum: a rank's i-th contribution is that of its i-th backward outside `no_sync`, with what the
blocks before it left; the sum takes every rank's first one, rank by rank, then every rank's second one, and so on. What
blocks left at the end comes last. Where all ranks meet, a rank that ran fewer backwards counts as having run as many as
the others, with nothing to add but what blocks left, once.

Loading: torch casts what a class keeps beside the element-wise states (ASGD's `eta`, NAdam's `mu_product`) to the
parameter's dtype, so that its own loop goes on otherwise than it would have without saving. Here they keep their dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from zero import clip_grad_norm_

from ..programs import CLASSES, clear
from . import program as p
from .program import Command, Config, Setting

Gradients = dict[int, Tensor]


class Oracle:
    """Follows the commands for all ranks; `do` returns what each of them must see."""

    def __init__(self, config: Config) -> None:
        self.config, self.setting = config, config.setting
        self.model = config.model(config.seed)
        self._build()

    def _build(self) -> None:
        cls, arguments = CLASSES[self.config.optimizer]
        self.optimizer = cls(self.config.groups(self.model), **arguments)
        self.scheduler = p.scheduler_of(self.optimizer)
        self.listed = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.divisor: float = self.setting.world_size
        self._clear()

    def _clear(self) -> None:
        size = self.setting.world_size
        self.rounds: list[list[Gradients]] = [[] for _ in range(size)]  # of each rank
        self.local: list[Gradients] = [{} for _ in range(size)]
        self.before: Gradients = {}  # zeros that a clearing left
        self.settled = False
        self.kept: list[list[Any]] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def do(self, command: Command) -> Any:
        """What a rank sees; after `Consolidate` only that rank sees it."""
        match command:
            case p.Backward():
                for rank in range(self.setting.world_size):
                    self._micro_batch(rank, command)
            case p.Uneven():
                for rank in range(self.setting.world_size):
                    for turn in command.of(rank):
                        self._micro_batch(rank, turn)
                self._meet()
            case p.Keep():
                self.kept = [
                    p.backwards(self.model, self.setting, p.Backward(command.seed, "one", command.mask), rank)
                    for rank in range(self.setting.world_size)
                ]
            case p.BackwardOfKept():
                for rank, kept in enumerate(self.kept):
                    for backward in kept:
                        self._backward(rank, backward, command.sync)
                self.kept = []
            case p.Fail(seed=seed, in_block=True):
                return self.do(p.Backward(seed, sync=False))
            case p.Clip():
                self._settle()
                return clip_grad_norm_(self.listed, command.max_norm, command.norm_type)
            case p.Divide():
                self.divisor = command.by
            case p.Step():
                self._settle()
                self.optimizer.step()
                return p.values(self.parameters) if command.look else None
            case p.ZeroGrad():
                self._zero_grad(command)
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
                self._meet()
                return p.values(p.chosen(self.model, command.numbers))
            case p.Write():
                self._meet()
                for parameter in p.chosen(self.model, command.numbers):
                    p.edit(parameter, command.seed, 0)
            case p.Edit():
                if self.setting.stage < 3:
                    with torch.no_grad():
                        p.chosen(self.model, (command.number,))[0].mul_(command.factor)
            case p.FullGrad():
                self._meet()
                return self._full_gradient(command.number % len(self.parameters))
            case p.Consolidate():
                self._meet()
                return self.optimizer.state_dict()
            case p.Load():
                return self._load(command.setting)
        return None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _micro_batch(self, rank: int, command: p.Backward) -> None:
        for backward in p.backwards(self.model, self.setting, command, rank):
            self._backward(rank, backward, command.sync)

    def _backward(self, rank: int, backward: Any, sync: bool) -> None:
        """One backward of a rank, on top of what its `no_sync` blocks left."""
        shown = [parameter.grad for parameter in self.parameters]
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self.local[rank].get(index)
        backward()
        self.local[rank] = {i: q.grad for i, q in enumerate(self.parameters) if q.grad is not None}
        for parameter, gradient in zip(self.parameters, shown, strict=True):
            parameter.grad = gradient
        if sync:
            self.rounds[rank].append(self.local[rank])
            self.local[rank] = {}

    def _meet(self) -> None:
        longest = max(map(len, self.rounds))
        for rank, of_rank in enumerate(self.rounds):
            while len(of_rank) < longest:
                of_rank.append(self.local[rank])
                self.local[rank] = {}

    def _sums(self) -> Gradients:
        total = dict(self.before)
        for round_ in [*zip(*self.rounds, strict=True), self.local]:
            for contribution in round_:
                for index, gradient in contribution.items():
                    total[index] = total[index] + gradient if index in total else gradient
        return total

    def _settle(self) -> None:
        self._meet()
        if self.settled:
            return
        self.settled, total = True, self._sums()
        for index, parameter in enumerate(self.parameters):
            parameter.grad = total[index].clone().div_(self.divisor) if index in total else None

    def _full_gradient(self, index: int) -> Tensor | None:
        if self.settled:
            gradient = self.parameters[index].grad
        else:
            gradient = self._sums().get(index)
            gradient = None if gradient is None else gradient / self.divisor
        return None if gradient is None else gradient.clone()

    def _zero_grad(self, command: p.ZeroGrad) -> None:
        self._meet()
        zeros = {index: torch.zeros_like(gradient) for index, gradient in self._sums().items()}
        clear(self.model, self.optimizer, command.how)
        kept = self.kept
        self._clear()
        self.kept = kept
        self.before = zeros if "zeros" in command.how else {}

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _load(self, setting: Setting) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.setting = setting
        self.model.zero_grad()
        self._build()
        self.optimizer.load_state_dict(saved)
        for number, state in saved["state"].items():
            self.optimizer.state[self.listed[number]].update({k: v for k, v in state.items() if k != "step"})
