"""The solutions of the first exercise of zero/TOUR.md: what a step may look at, one class each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """A step of each element looks at nothing but that element."""

    def __init__(self, params: Any, lr: float = 1e-3, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                w.mul_(1 - group["lr"] * group["weight_decay"])
                w.sub_(group["lr"] * torch.sign(group["b1"] * m + (1 - group["b1"]) * w.grad))
                m.mul_(group["b2"]).add_((1 - group["b2"]) * w.grad)


class Normalized(torch.optim.Optimizer):
    """A step of a parameter looks at its whole gradient."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    def norms(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return what each gradient is divided by."""
        return [gradient.norm() for gradient in gradients]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [w for w in group["params"] if w.grad is not None]
            gradients = [w.grad for w in used]
            for w, gradient, norm in zip(used, gradients, self.norms(gradients), strict=True):
                w.sub_(group["lr"] * gradient / norm)


class GloballyNormalized(Normalized):
    """A step of a parameter looks at the gradients of all parameters."""

    def norms(self, gradients: list[Tensor]) -> list[Tensor]:
        return [torch.stack([gradient.norm() for gradient in gradients]).norm()] * len(gradients)
