"""Classes whose update looks at more than an element, for the tests of the trial and of partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..support.loops import seeded

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "begin": 0}


class Coupled(torch.optim.Optimizer):
    """SGD, with further work of a subclass in `couple` after ``begin`` steps."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, weight_decay: float = 0.0, begin: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "begin": begin})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] > group["begin"]:
                        self.couple(p, group)
                    p.sub_(p.grad * group["lr"])

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
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
