"""The plain loop of a program: one process, torch's own optimizer, and of this library only `clip_grad_norm_`.

Loading: torch casts the states beside the element-wise ones (ASGD's `eta`, NAdam's `mu_product`) to the parameter's
dtype, so that its own loop continues differently than without saving. Here they keep their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plain import PlainRanks
from . import program as p
from .classes import PlainClasses
from .program import Command, Config, Setting


class Oracle(PlainRanks):
    """Executes the commands for all ranks; `do` returns the result that each rank must have."""

    def __init__(self, config: Config) -> None:
        self.config, self.setting = config, config.setting
        super().__init__(config.model(config.seed), self._optimizer_of, config.setting.world_size, config.mixed)
        self.scheduler = p.scheduler_of(self.optimizer)
        self.kept: list[list[Any]] = []

    def _optimizer_of(self, updated: Sequence[Tensor]) -> PlainClasses:
        cls, arguments = self.config.optimizer_class
        groups = self.config.groups(self.model)
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        listed = [places[id(parameter)] for group in groups for _, parameter in group["params"]]
        for group in groups:
            group["params"] = [(name, updated[places[id(q)]]) for name, q in group["params"]]
        self.updated = [updated[index] for index in listed]
        self.held = [self.numbers.held[index] for index in listed]
        self.listed = [self.parameters[index] for index in listed]
        self.classes = PlainClasses(cls, arguments, groups)
        return self.classes

    def do(self, command: Command) -> Any:
        """Execute a command.

        Return the result that every rank must have (after `Consolidate`, only its rank ``to``).
        """
        match command:
            case p.Backward():
                for rank in range(self.setting.world_size):
                    self._micro_batch(rank, command)
            case p.Uneven():
                for rank in range(self.setting.world_size):
                    for turn in command.of(rank):
                        self._micro_batch(rank, turn)
                self.meet()
            case p.Keep():
                self.kept = [
                    p.backwards(self.model, self.setting, p.Backward(command.seed, "one", command.mask), rank)
                    for rank in range(self.setting.world_size)
                ]
            case p.BackwardOfKept():
                for rank, kept in enumerate(self.kept):
                    for backward in kept:
                        self.backward(rank, backward, command.sync)
                self.kept = []
            case p.Fail(seed=seed, in_block=True):
                return self.do(p.Backward(seed, sync=False))
            case p.Clip():
                return self.clip(command.max_norm, command.norm_type)
            case p.Divide():
                self.divisor = command.by
            case p.Step():
                self.step()
                return p.values(self.parameters) if command.look else None
            case p.Scaled():
                return self._scaled_step(command)
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
                self.meet()
                return p.values(p.chosen(self.model, command.numbers))
            case p.Write():
                self.meet()
                for parameter in p.chosen(self.model, command.numbers):
                    p.edit(parameter, command.seed, 0)
            case p.Edit():
                if self.setting.stage < 3:
                    with torch.no_grad():
                        p.chosen(self.model, (command.number,))[0].mul_(command.factor)
            case p.FullGrad():
                self.meet()
                return self._full_gradient(command.number % len(self.parameters))
            case p.Consolidate():
                self.meet()
                return self.classes.state_dict() | self._masters()
            case p.Load():
                return self._load(command.setting)
        return None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _micro_batch(self, rank: int, command: p.Backward) -> None:
        for backward in p.backwards(self.model, self.setting, command, rank):
            self.backward(rank, backward, command.sync)

    def _full_gradient(self, index: int) -> Tensor | None:
        if self.settled:
            gradient = self.numbers.held[index].grad
        else:
            gradient = self.sums().get(index)
            gradient = None if gradient is None else gradient / self.divisor
        return None if gradient is None else gradient.clone()

    def _scaled_step(self, command: p.Scaled) -> Any:
        self.clear()
        scaler = p.scaler_of(command)
        for rank in range(self.setting.world_size):
            loss = scaler.scale(p.loss_to_scale(self.model, self.setting, command, rank))
            self.backward(rank, loss.backward, True)
        self.settle()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for held in self.held:
            if held.grad is not None:
                by_dtype.setdefault(held.grad.dtype, []).append(held.grad)
        found = torch.zeros(1)
        for gradients in by_dtype.values():
            inverse = torch.tensor(scaler.get_scale()).double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        norm = self.clip(1.0)
        if not found:
            self.step()
        self.clear()
        return norm, bool(found), p.values(self.parameters)

    def _joined_steps(self, command: p.Joined) -> Any:
        self.clear()
        ranks = range(self.setting.world_size)
        for step in range(max(map(command.of, ranks))):
            for rank in ranks:
                if step < command.of(rank):
                    self._micro_batch(rank, p.Backward(command.seed + step))
            self.clip(1.0)
            self.step()
            self.clear()
        return p.values(self.parameters)

    def _masters(self) -> dict[str, Any]:
        """Return the master weights with which the next step would begin, by the optimizer's index."""
        if self.config.mixed is None:
            return {}
        followed = dict(zip(map(id, self.numbers.updated), self.numbers.followed(), strict=True))
        pairs = enumerate(zip(self.listed, self.updated, strict=True))
        return {"masters": {index: followed[id(wide)] for index, (q, wide) in pairs if q.dtype is not wide.dtype}}

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load(self, setting: Setting) -> None:
        saved = copy.deepcopy(self.classes.state_dict())
        self.setting, self.world_size, self.divisor = setting, setting.world_size, setting.world_size
        self.model.zero_grad()
        self.optimizer = self._optimizer_of(self.numbers.updated)
        self.scheduler = p.scheduler_of(self.optimizer)
        self.forget()
        self.kept = []
        self.classes.load_state_dict(saved)
        for number, state in saved["state"].items():
            self.classes.state_of(self.updated[number]).update({k: v for k, v in state.items() if k != "step"})
