"""The reference of `zero.verify`: the plain loop, without this library, in one process.

Knows: one division, a clip, a step; with mixed precision also the casts between a 16-bit model and its fp32 weights.
Does not know: micro-batches, ranks, or the comparison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...config import MixedPrecision
from ...core.parameter_specs import is_laid_out
from ...parameters.casting import InputCast, cast
from ...step.arguments import arguments_of
from ...step.clip import clip_grad_norm_

Groups = list[dict[str, Any]]  # of parameters, as of torch.optim; a group may name its own ``optimizer_class``


def plain_optimizers(
    groups: Groups, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Return an optimizer of torch for each class: ``optimizer_class``, and those that groups name."""
    by_class: dict[Any, Groups] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("optimizer_class", "partition")}
        by_class.setdefault(group.get("optimizer_class"), []).append(options)
    return [
        optimizer_class(own, **defaults) if cls is None else cls(own, **_arguments(cls, own[0]))
        for cls, own in by_class.items()
    ]


def _arguments(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class has from a param group that names it."""
    return arguments_of(cls, {key: value for key, value in group.items() if key != "params"})


class ReferenceLoop:
    """Parameters, and an optimizer of torch for them, or one of each class."""

    superseded = False

    def cast_problem(self) -> str | None:
        return None

    def __init__(self, groups: Groups, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
        self._optimizers = plain_optimizers(groups, optimizer_class, defaults)
        self._parameters: list[Tensor] = [
            parameter for each in self._optimizers for group in each.param_groups for parameter in group["params"]
        ]

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def end_micro_batch(self) -> None:
        """Finish a micro-batch, after its backward has added to the gradients."""

    def update(self, divisor: float, max_norm: float | None) -> None:
        """Divide, clip, step, and clear the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        if max_norm is not None:
            clip_grad_norm_(self._parameters, max_norm)
        self._step()


class MixedReferenceLoop(ReferenceLoop):
    """The plain loop in mixed precision: a 16-bit model, master weights in fp32, gradients summed in a dtype of their
    own. The optimizer's parameters are the master weights."""

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        precision: MixedPrecision,
    ) -> None:
        self._model, self._precision = list(model.parameters()), precision
        masters: list[Tensor] = []
        for parameter in self._model:
            if not is_laid_out(parameter):
                masters.append(parameter.detach())
                continue
            wide = parameter.detach().clone()
            cast([parameter], precision.param_dtype)
            known = wide if parameter.requires_grad else parameter.detach()  # a frozen parameter has no wide copy
            masters.append(known.to(precision.of(wide.dtype).master_dtype).requires_grad_())
        if precision.buffer_dtype is not None:
            cast(model.buffers(), precision.buffer_dtype)
        if precision.cast_forward_inputs:
            InputCast.put(model, precision.param_dtype, self)
        self._sums = dict[int, Tensor]()
        self._masters = masters
        place = {id(parameter): number for number, parameter in enumerate(self._model)}
        of_masters = [
            {**group, "params": [masters[place[id(_parameter(entry))]] for entry in group["params"]]}
            for group in groups
        ]
        super().__init__(of_masters, optimizer_class, defaults)

    def end_micro_batch(self) -> None:
        for number, parameter in enumerate(self._model):
            if parameter.grad is not None:
                arrived = parameter.grad.to(self._precision.travel).to(self._precision.accumulate_dtype)
                self._sums[number] = self._sums[number].add_(arrived) if number in self._sums else arrived
                parameter.grad = None

    @torch.no_grad()
    def update(self, divisor: float, max_norm: float | None) -> None:
        held = [nn.Parameter(torch.empty_like(total)) for total in self._sums.values()]
        for holder, total in zip(held, self._sums.values(), strict=True):
            holder.grad = total.div_(divisor)
        if max_norm is not None:
            clip_grad_norm_(held, max_norm)
        for number, holder in zip(self._sums, held, strict=True):
            assert holder.grad is not None
            self._masters[number].grad = holder.grad.to(self._masters[number].dtype)
        self._step()
        for number in self._sums:
            self._model[number].copy_(self._masters[number])
        self._sums = {}


def _parameter(entry: Any) -> Tensor:
    """Return the parameter of an entry of a group, which may be a (name, parameter) pair."""
    found: Tensor = entry[1] if isinstance(entry, tuple) else entry
    return found
