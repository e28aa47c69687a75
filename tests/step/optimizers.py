"""Classes with states, options and arguments of every kind, of which the plain loop's bits are expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..support.narrowed import BF16

LARGE = 64  # elements from which on `Codes` keeps another state


class Codes(torch.optim.Optimizer):
    """Keeps the momentum of a large parameter in whole numbers of 8 bits, as 8-bit classes do, with a scale in bf16.

    Also a copy in bf16, and something without elements.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    wide = p.grad + (0.9 * state["momentum"].float() * state["scale"] if state else 0)
                    state.update(momentum=wide, scale=1.0, none=[torch.empty(0, 3)], narrow=wide.bfloat16())
                    if p.numel() >= LARGE:
                        scale = (wide.abs().amax().clamp_min(1e-12) / 127).bfloat16()
                        state.update(momentum=(wide / scale).round().to(torch.int8), scale=scale)
                    p.sub_(wide, alpha=group["lr"])


class Products(torch.optim.Optimizer):
    """Multiplies gradients and parameters where they lie, so that bits may depend on their alignment."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad @ (p.grad.T @ p.grad).tanh() + p @ (p.T @ p.grad), alpha=group["lr"])


class Scaled(torch.optim.SGD):
    """Its updates are scaled by what its constructor was given, which no param group holds."""

    def __init__(self, params: Any, lr: float = 0.05, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.scale * group["lr"] * parameter.grad)


class Popping(Scaled):
    def __init__(self, params: Any, lr: float, **kwargs: Any) -> None:
        super().__init__(params, lr, scale=kwargs.pop("factor", 1.0))


class Flagged(torch.optim.Optimizer):
    """Wants a flag in each group, as classes of Muon's kind do: for matrices, which it normalizes, or the rest."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        for group in params:
            if "matrices" not in group:
                raise ValueError("'matrices' must be set")
            if unknown := group.keys() - {"params", "matrices", "lr"}:
                raise ValueError(f"{unknown} are no options")
            group["lr"] = group.get("lr", lr if group["matrices"] else lr / 2)
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if group["matrices"]:
                        rows, columns = p.shape
                        p.grad.div_(p.grad.norm() * columns / rows + 1e-6)
                    momentum: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad) * group["lr"])


class Ours(torch.optim.SGD):
    """Its arguments, options of param groups but for the last, have names of the library's own."""

    def __init__(
        self, params: Any, stage: float = 0, partition: float = 1, divisor: float = 1, units: float = 1
    ) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        for key, value in {"stage": stage, "partition": partition, "divisor": divisor}.items():
            self.defaults[key] = value
            for group in self.param_groups:
                group.setdefault(key, value)
        self.units = units

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = (group["stage"] - group["partition"]) / group["divisor"] * self.units
                    parameter.sub_(scale * group["lr"] * parameter.grad)


class Momentum(torch.optim.Optimizer):
    """Gradient descent with a momentum that ``kept`` makes anew in each step, of the one before and the gradient."""

    def __init__(self, params: Any, kept: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self._kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._kept(self.state[p], p)
                    p.sub_(self.state[p].get("momentum", p.grad), alpha=group["lr"])


def narrow(state: Any, p: Any) -> None:
    state["momentum"] = (state.get("momentum", torch.zeros_like(p)) * 0.9 + p.grad).to(BF16)


def every_second(state: Any, p: Any) -> None:
    if "momentum" in state:
        del state["momentum"]
    else:
        state["momentum"] = p.grad * 0.5


def gram(state: Any, p: Any) -> None:
    state["momentum"] = state["gram"] = state.get("gram", torch.zeros(len(p), len(p))) + p.grad @ p.grad.T
