"""Classes with states, options and arguments of every kind, whose bits are expected or which are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..support.loops import seeded
from ..support.narrowed import BF16
from ..support.updates import Updates, WithRate

LARGE = 64  # elements from which on `Codes` keeps another state


class Codes(WithRate):
    """Keeps the momentum of a large parameter in whole numbers of 8 bits, as 8-bit classes do, with a scale in bf16.

    Also a copy in bf16, and something without elements.
    """

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        wide = p.grad + (0.9 * state["momentum"].float() * state["scale"] if state else 0)
        state.update(momentum=wide, scale=1.0, none=[torch.empty(0, 3)], narrow=wide.bfloat16())
        if p.numel() >= LARGE:
            scale = (wide.abs().amax().clamp_min(1e-12) / 127).bfloat16()
            state.update(momentum=(wide / scale).round().to(torch.int8), scale=scale)
        p.sub_(wide, alpha=group["lr"])


class Products(WithRate):
    """Multiplies gradients and parameters where they lie, so that bits may depend on their alignment."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad @ (p.grad.T @ p.grad).tanh() + p @ (p.T @ p.grad), alpha=group["lr"])


class Scaled(Updates, torch.optim.SGD):
    """Its updates are scaled by what its constructor was given, which no param group holds."""

    def __init__(self, params: Any, lr: float = 0.05, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)
        self.scale = scale

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(self.scale * group["lr"] * p.grad)


class Popping(Scaled):
    def __init__(self, params: Any, lr: float, **kwargs: Any) -> None:
        super().__init__(params, lr, scale=kwargs.pop("factor", 1.0))


class Flagged(Updates):
    """Wants a flag in each group, as classes of Muon's kind do: for matrices, which it normalizes, or the rest."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        for group in params:
            if "matrices" not in group:
                raise ValueError("'matrices' must be set")
            if unknown := group.keys() - {"params", "matrices", "lr"}:
                raise ValueError(f"{unknown} are no options")
            group["lr"] = group.get("lr", lr if group["matrices"] else lr / 2)
        super().__init__(params, {})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        if group["matrices"]:
            rows, columns = p.shape
            p.grad.div_(p.grad.norm() * columns / rows + 1e-6)
        momentum: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
        p.sub_(momentum.mul_(0.9).add_(p.grad) * group["lr"])


class Ours(Updates, torch.optim.SGD):
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

    def update(self, p: Any, group: dict[str, Any]) -> None:
        scale = (group["stage"] - group["partition"]) / group["divisor"] * self.units
        p.sub_(scale * group["lr"] * p.grad)


class Momentum(Updates):
    """Gradient descent with a momentum that ``kept`` makes anew in each step, of the one before and the gradient."""

    def __init__(self, params: Any, kept: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self._kept = kept

    def update(self, p: Any, group: dict[str, Any]) -> None:
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


# -- updates that look at more than an element -------------------------------------------------------------------------

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "begin": 0}


class Coupled(Updates):
    """SGD, with further work of a subclass in `couple` after ``begin`` steps."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, weight_decay: float = 0.0, begin: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "begin": begin})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] > group["begin"]:
            self.couple(p, group)
        p.sub_(p.grad * group["lr"])

    def couple(self, p: Any, group: dict[str, Any]) -> None:
        pass


def coupled(name: str, couple: Callable[[Any, Any, dict[str, Any]], object], base: Any = Coupled) -> type[Coupled]:
    """Return a class that calls ``couple(optimizer, p, group)`` before it steps a parameter."""
    return type(name, (base,), {"couple": couple})


def decaying(name: str, decays: Callable[[Tensor], bool]) -> type[Coupled]:
    """Return a class that decays only some parameters."""

    def couple(_: Any, p: Tensor, group: dict[str, Any]) -> None:
        if decays(p):
            p.mul_(1 - group["lr"] * group["weight_decay"])

    return coupled(name, couple)


def centralize(_: Any, p: Any, group: dict[str, Any]) -> None:
    """Subtract from a gradient the mean of each row."""
    if p.ndim > 1:
        p.grad.sub_(p.grad.mean(tuple(range(1, p.ndim)), keepdim=True))


def normalize_large_matrices(_: Any, p: Any, group: dict[str, Any]) -> None:
    """As classes do that factorize or quantize only where it pays."""
    if p.ndim == 2 and min(p.shape) >= 128:
        p.grad.div_(p.grad.square().mean().sqrt())


def keep_two_gradients(optimizer: Any, p: Any, group: dict[str, Any]) -> None:
    """In a list."""
    kept = optimizer.state[p].setdefault("kept", [])
    kept[:] = [*kept, p.grad.clone()][-2:]
    p.sub_(sum(kept) * group["lr"])


class Keeper:
    def __init__(self) -> None:
        self.sums: list[Tensor] = []


class ClippedTogether(Coupled):
    """Uses the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm())
        super().step()


class OwnBuffers(Coupled):
    """Creates momentum for the parameters with which it is built, outside `state`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.momentum = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for (p, group), momentum in zip(parameters, self.momentum, strict=False):
            if p.grad is not None:
                momentum.copy_(momentum * 0.9 + p.grad)
                p.sub_(momentum * group["lr"])


class EstimatesTogether(Coupled):
    """Like D-adaptation: adds up over all parameters, and raises the rate when the sum is large enough."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            seen = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["seen"] = group.get("seen", 0.0) + seen
        super().step()


class Wraps(torch.optim.SGD):
    """Takes another optimizer, and steps it."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 5) -> None:
        super().__init__(optimizer.param_groups)


class Shares(torch.optim.SGD):
    """Has the param groups of another optimizer, which it makes itself."""

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.other.param_groups


class TakesModel(torch.optim.SGD):
    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), lr)


class Gathers(torch.optim.SGD):
    """Steps a share of the parameters, and gathers the others, as classes of Muon's kind do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        dist.all_gather([], self.param_groups[0]["params"][0])


class OwnCounter(Coupled):
    """Counts its steps in `state`, where parameters are."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.state["steps"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> None:
        self.state["steps"] += 1  # type: ignore[index]
        super().step()


DecayMatricesOnly = decaying("DecayMatricesOnly", lambda p: p.ndim > 1)
Centralized = coupled("Centralized", centralize)
Draws = coupled("Draws", lambda _, p, group: p.sub_(torch.randn_like(p) * group["lr"]))
ALONE: dict[str, type[Coupled]] = {  # they step a parameter in a way of its own
    cls.__name__: cls
    for cls in (
        *(DecayMatricesOnly, Centralized, coupled("History", keep_two_gradients)),
        decaying("DecayKernelsOnly", lambda p: p.ndim == 4),
        decaying("DecaySignalsOnly", lambda p: p.ndim == 3),
        decaying("DecayScalarsToo", lambda p: p.ndim != 1),
        coupled("LargeMatricesApart", normalize_large_matrices),
        coupled("OwnObjects", lambda optimizer, p, _: optimizer.state[p].setdefault("keeper", Keeper())),
    )
}
Rebinds = coupled("Rebinds", lambda _, p, group: setattr(p, "data", p.data.clone()))  # a slice keeps the old memory
TOGETHER: dict[str, type[Coupled]] = {  # a step of one parameter depends on others, or fails by itself
    cls.__name__: cls for cls in (ClippedTogether, OwnBuffers, EstimatesTogether, Rebinds)
}


class Net(nn.Module):
    """Parameters of no, one, two, three and four dimensions: classes tell these apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.matrix = nn.Linear(8, 17)
        self.signals = nn.Conv1d(1, 3, 2)
        self.kernels = nn.Conv2d(1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.matrix(x) * self.scale
        return hidden + self.signals(hidden[:, None]).mean() + self.kernels(hidden[None, None]).mean()


def net() -> Any:
    return seeded(0, Net)
