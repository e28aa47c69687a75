"""The reference of `zero.verify`: the plain loop, without this library, in one process.

Knows: one division, a clip, a step; with mixed precision also the casts between a 16-bit model and its fp32 weights.
Does not know: micro-batches, ranks, or the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Dtypes
from ...core.parameter_specs import is_laid_out
from ...parameters.casting import cast, put_casts
from ...precision import Precisions
from ...step.arguments import arguments_of
from ...step.clip import clip_grad_norm_

Groups = list[dict[str, Any]]  # of parameters, as of torch.optim; a group may name its own ``optimizer_class``


class ReferenceLoop:
    """Parameters, and an optimizer of torch for them, or one of each class that groups name."""

    def __init__(self, groups: Groups, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
        by_class: dict[Any, Groups] = {}
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("optimizer_class", "partition")}
            by_class.setdefault(group.get("optimizer_class"), []).append(options)
        self._optimizers: list[torch.optim.Optimizer] = [
            optimizer_class(own, **defaults) if cls is None else cls(own, **_arguments(cls, own[0]))
            for cls, own in by_class.items()
        ]
        self._parameters = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]

    def end_micro_batch(self) -> None:
        """Finish a micro-batch, after its backward has added to the gradients."""

    def update(self, divisor: float, max_norm: float | None) -> None:
        """Divide, clip, step, and clear the gradients."""
        _average(self._parameters, divisor, max_norm)
        self._step()

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


class MixedReferenceLoop(ReferenceLoop):
    """The plain loop in mixed precision: a 16-bit model, master weights in fp32, gradients summed in a dtype of their
    own. The optimizer's parameters are the master weights. They may be on another device, also in a single dtype."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Groups,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        precisions: Precisions,
        device: str | None = None,
    ) -> None:
        """``parameters``: those of the model to which ``precisions`` apply. ``device``: of the master weights; None:
        that of the parameters."""
        self._model, self._device = list(parameters), device
        self._dtypes = [precisions.of(parameter) for parameter in self._model]
        self._masters = [self._master(*known) for known in zip(self._model, self._dtypes, strict=True)]
        self._sums = dict[int, nn.Parameter]()  # by number of a parameter; each is the ``grad`` of an empty tensor
        for buffer, dtype in precisions.buffers():
            cast(buffer, dtype)
        for border in precisions.borders:
            put_casts(border, None)
        masters = {id(parameter): master for parameter, master in zip(self._model, self._masters, strict=True)}
        of_masters = [
            {**group, "params": [masters[id(e[1] if isinstance(e, tuple) else e)] for e in group["params"]]}
            for group in groups
        ]
        super().__init__(of_masters, optimizer_class, defaults)

    def _master(self, parameter: Tensor, dtypes: Dtypes) -> Tensor:
        """Cast a parameter of the model, and return its master weights."""
        if not is_laid_out(parameter):
            return parameter.detach()
        wide = parameter.detach().clone()
        cast(parameter, dtypes.param_dtype)
        known = wide if parameter.requires_grad else parameter.detach()  # a frozen parameter has no wide copy
        return known.to(self._device, dtypes.master_dtype).requires_grad_()

    def end_micro_batch(self) -> None:
        for number, parameter in enumerate(self._model):
            if parameter.grad is not None:
                dtypes = self._dtypes[number]
                arrived = parameter.grad.to(dtypes.reduce_dtype).to(dtypes.accumulate_dtype)
                total = self._sums.setdefault(number, nn.Parameter(torch.empty_like(arrived)))
                total.grad = arrived if total.grad is None else total.grad.add_(arrived)
                parameter.grad = None

    @torch.no_grad()
    def update(self, divisor: float, max_norm: float | None) -> None:
        _average(self._sums.values(), divisor, max_norm)
        for number, total in self._sums.items():
            assert total.grad is not None
            self._masters[number].grad = total.grad.to(self._masters[number])
        self._step()
        for number in self._sums:
            self._model[number].copy_(self._masters[number])
        self._sums.clear()


def _arguments(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class has from a param group that names it."""
    return arguments_of(cls, {key: value for key, value in group.items() if key != "params"})


def _average(parameters: Iterable[Tensor], divisor: float, max_norm: float | None) -> None:
    """Divide and clip the gradients of parameters."""
    held = list(parameters)
    for parameter in held:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
    if max_norm is not None:
        clip_grad_norm_(held, max_norm)
