"""The reference of `zero.verify`: the plain loop, without this library, in one process.

Knows: one division, a clip, a step; with mixed precision also the casts between a 16-bit model and its fp32 weights.
Does not know: micro-batches, ranks, or the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Dtypes
from ...core.parameter_specs import is_laid_out
from ...core.rounding import StochasticRounding
from ...parameters.casting import cast, put_casts
from ...precision import Precisions
from ...step.arguments import arguments_of
from ...step.clip import clip_grad_norm_

_OF_LIBRARY = ("optimizer_class", "partition", "blocks")  # options of a param group that no class sees
Groups = list[dict[str, Any]]  # of parameters, as of torch.optim; a group may name its own ``optimizer_class``


class ReferenceLoop:
    """Parameters, and an optimizer of torch for them, or one of each class that groups name."""

    def __init__(
        self,
        groups: Groups,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        rounding: StochasticRounding | None = None,
    ) -> None:
        self._parameters = [e[1] if isinstance(e, tuple) else e for group in groups for e in group["params"]]
        self._stacks: list[tuple[Tensor, Any, list[Tensor]]] = []  # parameters with blocks, and these as parameters
        self._rounding = rounding
        by_class: dict[Any, Groups] = {}
        for group in groups:
            options = {key: value for key, value in group.items() if key not in _OF_LIBRARY}
            if group.get("blocks") is not None:
                options["params"] = [
                    block for entry in group["params"] for block in self._in_blocks(entry, group["blocks"])
                ]
            by_class.setdefault(group.get("optimizer_class"), []).append(options)
        self._optimizers: list[torch.optim.Optimizer] = [
            optimizer_class(own, **defaults) if cls is None else cls(own, **_arguments(cls, own[0]))
            for cls, own in by_class.items()
        ]

    def _in_blocks(self, entry: Any, blocks: Any) -> list[Tensor]:
        parameter = entry[1] if isinstance(entry, tuple) else entry
        found = [block.requires_grad_(parameter.requires_grad) for block in _cut(parameter.detach(), blocks)]
        self._stacks.append((parameter, blocks, found))
        return found

    def end_micro_batch(self) -> None:
        """Finish a micro-batch, after its backward has added to the gradients."""

    def update(self, divisor: float, max_norm: float | None) -> None:
        """Divide, clip, step, and clear the gradients."""
        _average(self._parameters, divisor, max_norm)
        self._step()

    def _step(self, gradients: Mapping[Tensor, Tensor | None] | None = None) -> None:
        for parameter, blocks, found in self._stacks:
            cut = None if parameter.grad is None else _cut(parameter.grad, blocks)
            for number, block in enumerate(found):
                block.grad = None if cut is None else cut[number]
        for optimizer in self._optimizers:
            if self._rounding is None:
                optimizer.step()
            else:
                self._rounding.step(optimizer, gradients, self._parameters)
        for parameter in self._parameters:
            parameter.grad = None


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
        rounding: StochasticRounding | None = None,
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
        super().__init__(of_masters, optimizer_class, defaults, rounding)

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
        means: dict[Tensor, Tensor | None] = {self._masters[number]: total.grad for number, total in self._sums.items()}
        for master, mean in means.items() if self._rounding is None else ():
            assert mean is not None
            master.grad = mean.to(master)
        self._step(means)
        for number in self._sums:
            self._model[number].copy_(self._masters[number])
        self._sums.clear()


def _cut(tensor: Tensor, blocks: Any) -> Sequence[Tensor]:
    """Return the blocks of a parameter or of its gradient, as views."""
    if isinstance(blocks, int):
        return tensor.view(tensor.shape[blocks % tensor.dim() :]).unbind()
    found: Sequence[Tensor] = torch.split(tensor, list(blocks))
    return found


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
