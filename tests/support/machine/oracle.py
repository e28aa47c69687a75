"""The plain loop of a program: one process, torch's own optimizer, and of this library only `clip_grad_norm_`.

The contract's order of a sum: a rank's i-th contribution is the gradient of its i-th backward outside `no_sync`, added
to the gradients of the `no_sync` blocks before it. The sum takes every rank's first contribution, rank by rank, then
every rank's second one, and so on. Gradients of blocks after the last such backward come last. Some commands
synchronize the ranks: there, a rank that ran fewer backwards catches up with empty contributions, the first of which
takes along its `no_sync` gradients.

Loading: torch casts the states beside the element-wise ones (ASGD's `eta`, NAdam's `mu_product`) to the parameter's
dtype, so that its own loop continues differently than without saving. Here they keep their dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from zero import clip_grad_norm_

from ..narrowed import Narrowed
from ..programs import clear
from . import program as p
from .classes import PlainClasses
from .program import Command, Config, Setting

Gradients = dict[int, Tensor]


class Oracle:
    """Executes the commands for all ranks; `do` returns the result that each rank must have."""

    def __init__(self, config: Config) -> None:
        self.config, self.setting = config, config.setting
        self.model = config.model(config.seed)
        self.numbers = Narrowed(self.model, config.mixed)
        self._build()

    def _build(self) -> None:
        cls, arguments = self.config.optimizer_class
        groups = self.config.groups(self.model)
        places = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        listed = [places[id(parameter)] for group in groups for _, parameter in group["params"]]
        for group in groups:
            group["params"] = [(name, self.numbers.updated[places[id(q)]]) for name, q in group["params"]]
        self.optimizer = PlainClasses(cls, arguments, groups)
        self.scheduler = p.scheduler_of(self.optimizer)
        self.updated = [self.numbers.updated[index] for index in listed]
        self.held = [self.numbers.held[index] for index in listed]
        self.listed = [self.parameters[index] for index in listed]
        self.divisor: float = self.setting.world_size
        self._clear()

    def _clear(self) -> None:
        size = self.setting.world_size
        self.rounds: list[list[Gradients]] = [[] for _ in range(size)]  # for each rank
        self.local: list[Gradients] = [{} for _ in range(size)]
        self.before: Gradients = {}  # the zeros of `zero_grad(set_to_none=False)`
        self.settled = False
        self.kept: list[list[Any]] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

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
                return clip_grad_norm_(self.held, command.max_norm, command.norm_type)
            case p.Divide():
                self.divisor = command.by
            case p.Step():
                self._settle()
                self.numbers.step(self.optimizer)
                return p.values(self.parameters) if command.look else None
            case p.Scaled():
                return self._scaled_step(command)
            case p.Joined():
                return self._joined_steps(command)
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
                return self.optimizer.state_dict() | self._masters()
            case p.Load():
                return self._load(command.setting)
        return None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _micro_batch(self, rank: int, command: p.Backward) -> None:
        for backward in p.backwards(self.model, self.setting, command, rank):
            self._backward(rank, backward, command.sync)

    def _backward(self, rank: int, backward: Any, sync: bool) -> None:
        """Run one backward of a rank, on top of the gradients of its `no_sync` blocks."""
        shown = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        backward()
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                before = self.local[rank].get(index)
                self.local[rank][index] = self.numbers.contributed(before, parameter.grad, travels=sync)
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
                for index, contributed in contribution.items():
                    gradient = self.numbers.travelling(contributed)
                    total[index] = total[index] + gradient if index in total else gradient
        return total

    def _settle(self) -> None:
        self._meet()
        if self.settled:
            return
        self.settled, total = True, self._sums()
        count = len(self.parameters)
        self.numbers.show([total[i].clone().div_(self.divisor) if i in total else None for i in range(count)])

    def _full_gradient(self, index: int) -> Tensor | None:
        if self.settled:
            gradient = self.numbers.held[index].grad
        else:
            gradient = self._sums().get(index)
            gradient = None if gradient is None else gradient / self.divisor
        return None if gradient is None else gradient.clone()

    def _scaled_step(self, command: p.Scaled) -> Any:
        self._zero_grad(p.ZeroGrad())
        scaler = p.scaler_of(command)
        for rank in range(self.setting.world_size):
            loss = scaler.scale(p.loss_to_scale(self.model, self.setting, command, rank))
            self._backward(rank, loss.backward, True)
        self._settle()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for held in self.held:
            if held.grad is not None:
                by_dtype.setdefault(held.grad.dtype, []).append(held.grad)
        found = torch.zeros(1)
        for gradients in by_dtype.values():
            inverse = torch.tensor(scaler.get_scale()).double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        norm = clip_grad_norm_(self.held, 1.0)
        if not found:
            self.numbers.step(self.optimizer)
        self._zero_grad(p.ZeroGrad())
        return norm, bool(found), p.values(self.parameters)

    def _joined_steps(self, command: p.Joined) -> Any:
        self._zero_grad(p.ZeroGrad())
        ranks = range(self.setting.world_size)
        for step in range(max(map(command.of, ranks))):
            for rank in ranks:
                if step < command.of(rank):
                    self._micro_batch(rank, p.Backward(command.seed + step))
            self._settle()
            clip_grad_norm_(self.held, 1.0)
            self.numbers.step(self.optimizer)
            self._zero_grad(p.ZeroGrad())
        return p.values(self.parameters)

    def _masters(self) -> dict[str, Any]:
        """Return the master weights with which the next step would begin, by the optimizer's index."""
        if self.config.mixed is None:
            return {}
        followed = dict(zip(map(id, self.numbers.updated), self.numbers.followed(), strict=True))
        pairs = enumerate(zip(self.listed, self.updated, strict=True))
        return {"masters": {index: followed[id(wide)] for index, (q, wide) in pairs if q.dtype is not wide.dtype}}

    def _zero_grad(self, command: p.ZeroGrad) -> None:
        self._meet()
        zeros = {index: torch.zeros_like(gradient) for index, gradient in self._sums().items()}
        clear(self.model, self.optimizer, command.how)
        kept = self.kept
        self._clear()
        self.kept = kept
        self.before = zeros if "zeros" in command.how else {}

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load(self, setting: Setting) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.setting = setting
        self.model.zero_grad()
        self._build()
        self.optimizer.load_state_dict(saved)
        for number, state in saved["state"].items():
            self.optimizer.state_of(self.updated[number]).update({k: v for k, v in state.items() if k != "step"})
