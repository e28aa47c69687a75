"""Mixed precision in a plain loop, by hand: a model that computes in 16 bits, master weights, and casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero import MixedPrecision

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (torch.float64, FP32, BF16, FP16)
PRECISIONS = {
    "bf16": MixedPrecision(BF16, buffer_dtype=BF16),
    "fp16": MixedPrecision(FP16, buffer_dtype=FP16),
    "bf16, sent in fp32": MixedPrecision(BF16, reduce_dtype=FP32, buffer_dtype=BF16),
    "bf16, added up in bf16": MixedPrecision(BF16, accumulate_dtype=BF16, buffer_dtype=BF16),
    "fp32, sent in bf16": MixedPrecision(FP32, reduce_dtype=BF16, buffer_dtype=FP32),
    "fp32, added up in bf16": MixedPrecision(FP32, reduce_dtype=BF16, accumulate_dtype=BF16, buffer_dtype=FP32),
}


def _is_plain(parameter: Tensor) -> bool:
    """Return False for a frozen tensor subclass, whose values no cast reaches."""
    return type(parameter) is nn.Parameter


class Narrowed:
    """A model in mixed precision, and its master weights.

    ``parameters`` are the model's. ``updated`` are what an optimizer steps: the master weights, or the parameters
    themselves. Mean gradients are the ``grad`` of ``held``, in the dtype in which they are added up.
    """

    def __init__(self, model: nn.Module, precision: MixedPrecision | None) -> None:
        self.parameters = [p for p in model.parameters() if p.dtype in FLOATS and (p.requires_grad or _is_plain(p))]
        self.precision = precision
        self.held = self.updated = list[Tensor](self.parameters)
        if precision is None:
            return
        self.updated = []
        for p in self.parameters:
            wide, narrow = p.detach().clone(), p.detach().to(precision.param_dtype)
            master = torch.float64 if wide.dtype is torch.float64 else torch.float32
            p.data = narrow  # a frozen parameter has no master weights until it is trained
            self.updated.append((wide if p.requires_grad else narrow).to(master).requires_grad_())
        if precision.buffer_dtype is not None:
            for buffer in model.buffers():
                buffer.data = buffer.to(precision.buffer_dtype)
        dtype = precision.accumulate_dtype
        self.held = [wide if wide.dtype is dtype else torch.zeros_like(wide, dtype=dtype) for wide in self.updated]

    def travelling(self, gradient: Tensor) -> Tensor:
        """Return a contribution as the owner adds it up: cast to the reduce dtype, and then to the accumulate dtype."""
        if self.precision is None:
            return gradient
        return self.wide(gradient.to(self.precision.reduce_dtype or self.precision.param_dtype))

    def wide(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the dtype in which gradients are added up."""
        return gradient if self.precision is None else gradient.to(self.precision.accumulate_dtype)

    def contributed(self, before: Tensor | None, gradient: Tensor, *, travels: bool) -> Tensor:
        """Return a rank's contribution after a further gradient. One that is reduced at once is rounded once."""
        if before is None:
            return gradient if travels else self.wide(gradient)
        return before + self.wide(gradient)

    @torch.no_grad()
    def followed(self) -> list[Tensor]:
        """Return the weights with which the next step begins: values that the user wrote into the model take effect."""
        found = []
        for p, wide in zip(self.parameters, self.updated, strict=True):
            as_integers = INTEGERS[p.itemsize]
            rounded = wide.detach().to(p.dtype)
            written = p.detach().view(as_integers) != rounded.view(as_integers)
            written &= ~(p.detach().isnan() & rounded.isnan())
            found.append(torch.where(written, p.to(wide.dtype), wide))
        return found

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        if self.precision is not None:
            for wide, followed, held in zip(self.updated, self.followed(), self.held, strict=True):
                wide.detach().copy_(followed)
                wide.grad = None if held.grad is None else held.grad.to(wide.dtype)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        if self.precision is not None:
            for p, wide in zip(self.parameters, self.updated, strict=True):
                if wide.grad is not None:
                    p.data.copy_(wide.detach())

    def show(self, gradients: Sequence[Tensor | None]) -> None:
        """Set the mean gradients, or None, as the ``grad`` that a loop clips."""
        for held, gradient in zip(self.held, gradients, strict=True):
            held.grad = gradient
