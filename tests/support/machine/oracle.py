"""The plain loop of a program: one process, torch's own optimizer, and of this library only `clip_grad_norm_`.

Loading: torch casts the states beside the element-wise ones (ASGD's `eta`, NAdam's `mu_product`) to the parameter's
dtype, so that its own loop continues differently than without saving. Here they keep their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from zero import clip_grad_norm_

from ..sides import AsPlain
from . import program as p
from .classes import PlainClasses
from .player import Player
from .program import Config


class Oracle(AsPlain, Player):
    """Plays all ranks; `do` returns the result that each rank must have."""

    def __init__(self, config: Config) -> None:
        self.config, self.setting = config, config.setting
        model, ranks = config.model(config.seed), config.setting.world_size
        super().__init__(model, self._optimizer_of, ranks, config.mixed, rounding=config.rounding)
        self._start()

    def _start(self) -> None:
        self.scheduler = p.scheduler_of(self.optimizer)
        self.kept = []
        self.averages: dict[str, AveragedModel] = {}
        self.classes.train()

    def _optimizer_of(self, updated: Sequence[Tensor]) -> PlainClasses:
        cls, arguments = self.config.optimizer_class
        groups = self.config.groups(self.model)
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        listed = [places[id(parameter)] for group in groups for _, parameter in group["params"]]
        for group in groups:
            if not group["params"]:
                group["param_names"] = []  # torch's own classes want them of every group
            group["params"] = [(name, updated[places[id(q)]]) for name, q in group["params"]]
        self.updated = [updated[index] for index in listed]
        self.held = [self.numbers.held[index] for index in listed]
        self.listed = [self.parameters[index] for index in listed]
        self.classes = PlainClasses(cls, arguments, groups)
        return self.classes

    def run(self, rank: int, backwards: list[Any], sync: bool) -> None:
        for backward in backwards:
            self.backward(rank, backward, sync)

    def check(self) -> None:
        self.meet()

    def fail(self, command: p.Fail) -> None:
        if command.in_block:  # a whole micro-batch came before the failure
            self.do(p.Backward(command.seed, sync=False))

    def reset(self, parameters: Sequence[Tensor]) -> None:
        self.meet()
        for q, updated in zip(self.parameters, self.numbers.updated, strict=True):
            if any(q is each for each in parameters):
                self.classes.reset(updated)

    def lend(self) -> None:
        self.meet()

    def averaged(self, command: p.Average) -> Any:
        self.meet()
        weights = nn.ParameterList([q.detach() for q in self.numbers.followed()])
        if command.kind not in self.averages:
            self.averages[command.kind] = AveragedModel(weights, **p.AVERAGES[command.kind])
        self.averages[command.kind].update_parameters(weights)
        listed, names = {id(q) for q in self.listed}, {q: name for name, q in self.model.named_parameters()}
        pairs = zip(self.parameters, self.averages[command.kind].module.parameters(), strict=True)
        found = {q: average.detach().clone() for q, average in pairs if id(q) in listed}
        before = {q: q.detach().clone() for q in found}
        self._put(found)
        seen = self.forward(p.Evaluate(7))
        self._put(before)
        return {names[q]: p.laid_out(value) for q, value in found.items()}, seen

    @staticmethod
    @torch.no_grad()
    def _put(values: Mapping[Tensor, Tensor]) -> None:
        """Write values into parameters."""
        for q, value in values.items():
            q.copy_(value)

    def roll_back(self, command: p.RollBack) -> None:
        self.numbers.follow()  # see `load`
        self.whole_step(command.seed + 1)

    def fail_to_add(self, command: p.FailToAdd) -> None:
        self.meet()

    def edit(self, parameter: Tensor, factor: float) -> None:
        if self.setting.stage < 3:
            super().edit(parameter, factor)

    def full_gradient(self, index: int) -> Tensor | None:
        self.meet()
        if self.settled:
            gradient = self.numbers.held[index].grad
        else:
            gradient = self.sums().get(index)
            gradient = None if gradient is None else gradient / self.divisor
        return None if gradient is None else gradient.clone()

    def set_gradient(self, index: int, gradient: Tensor | None, *, alike: bool = False) -> None:
        self.replace(index, None if gradient is None else self.numbers.wide(index, gradient))

    def scaled_step(self, command: p.Scaled) -> Any:
        self.clear()
        scaler = torch.amp.GradScaler(self.config.device, init_scale=command.scale)
        parts = [p.part_of(command, rank) for rank in self.ranks]
        for rank, part in zip(self.ranks, parts, strict=True):
            loss = scaler.scale(p.loss_to_scale(self.model, self.setting, command, rank, part))
            self.backward(rank, loss.backward)
        if command.sets:
            self._set(p.SetGrad(0, command.seed))
        self.settle()
        beside = [q for part in parts if part is not None for q in part.parameters()]
        for gradient in (q.grad for q in beside if q.grad is not None):
            gradient.div_(self.divisor if command.beside == "also" else 1)
        norms = list[Tensor]()
        found = self._unscale(scaler, self.held)
        also = self._unscale(scaler, beside)
        if command.beside == "also":
            found = also = found or also
            norms.append(clip_grad_norm_([*self.held, *beside], 1.0))
        elif command.unscale:
            norms += [self.clip(1.0), *([clip_grad_norm_(beside, 1.0)] if beside else [])]
        if not found:
            self.step()
        if beside and not also:
            torch.optim.SGD(beside, lr=0.1).step()
        self.clear()
        seen = norms, found or also, self.read(None)
        return p.ByRank((*seen, None if part is None else p.values(list(part.parameters()))) for part in parts)

    @staticmethod
    def _unscale(scaler: torch.amp.GradScaler, updated: Sequence[Tensor]) -> bool:
        """Unscale gradients in place. Return whether one is not finite."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for each in updated:
            if each.grad is not None:
                by_dtype.setdefault(each.grad.dtype, []).append(each.grad)
        found = torch.zeros(1, device=updated[0].device) if updated else torch.zeros(1)
        for gradients in by_dtype.values():
            inverse = torch.tensor(scaler.get_scale()).double().reciprocal().float().to(found.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return bool(found)

    def consolidated(self, to: int) -> dict[str, Any]:
        """Return the dict of each class, with the master weights with which the next step would begin."""
        self.meet()
        found = self.classes.state_dict()
        followed = dict(zip(map(id, self.numbers.updated), self.numbers.followed(), strict=True))
        narrow = dict(zip(map(id, self.updated), self.listed, strict=True))
        self.narrow = {name: [narrow[id(wide)] for wide in self.classes.of(name)] for name in found}
        for name, of_class in found.items():
            # a class may leave empty ones
            of_class["state"] = {index: state for index, state in of_class["state"].items() if state}
            pairs = enumerate(zip(self.narrow[name], self.classes.of(name), strict=True))
            of_class["masters"] = {index: followed[id(wide)] for index, (q, wide) in pairs if q.dtype is not wide.dtype}
        return found

    def full_state(self, to: int, *, masters: bool) -> dict[str, Any]:
        found: dict[str, Any] = self.model.state_dict(keep_vars=True)
        wide = {id(q): followed for q, followed in zip(self.parameters, self.numbers.followed(), strict=True)}
        chosen = {id(q) for q in self.listed} if masters else set[int]()
        return {
            name: wide[id(value)] if id(value) in chosen else value.detach().clone() for name, value in found.items()
        }

    def load(self, command: p.Load) -> None:
        self.numbers.follow()  # saved master weights have followed what was written: a later edit may undo it in bf16
        saved = copy.deepcopy(self.classes.state_dict())
        self.setting, averages = command.setting, self.averages if command.folder else {}
        self.world_size = self.divisor = self.setting.world_size
        self.model.zero_grad()
        self.optimizer = self._optimizer_of(self.numbers.updated)
        self.forget()
        self._start()
        self.averages = averages
        self.classes.load_state_dict(saved)
