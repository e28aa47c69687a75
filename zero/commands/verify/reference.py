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
from ...step.clip import clip_grad_norm_


class ReferenceLoop:
    """Parameters, and an optimizer of torch for them."""

    superseded = False

    def cast_problem(self) -> str | None:
        return None

    def __init__(
        self, parameters: list[Tensor], optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer_class(parameters, **defaults)

    def end_micro_batch(self) -> None:
        """Finish a micro-batch, after its backward has added to the gradients."""

    def update(self, divisor: float, max_norm: float | None) -> None:
        """Divide, clip, step, and clear the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        if max_norm is not None:
            clip_grad_norm_(self._parameters, max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


class MixedReferenceLoop(ReferenceLoop):
    """The plain loop in mixed precision: a 16-bit model, master weights in fp32, gradients summed in a dtype of their
    own. The optimizer's parameters are the master weights."""

    def __init__(
        self,
        model: nn.Module,
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
        super().__init__(masters, optimizer_class, defaults)

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
            self._parameters[number].grad = holder.grad.to(self._parameters[number].dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for number in self._sums:
            self._model[number].copy_(self._parameters[number])
        self._sums = {}
