"""The model, the two optimizer classes and the gradients of the checkpoints of this folder.

Knows: all their values. Does not know: checkpoints, ranks. The classes are here, since the options of torch's own are
others in other releases. All values are small multiples of powers of two: no processor rounds them differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class HalfMomentum(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.5, bounds: tuple[float, float] = (-64.0, 64.0)) -> None:
        super().__init__(params, {"lr": lr, "bounds": bounds})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"], state["step"] = torch.zeros_like(parameter), torch.tensor(0)
                state["momentum"].div_(2).add_(parameter.grad)
                state["step"] += 1
                parameter.sub_(state["momentum"] * group["lr"]).clamp_(*group["bounds"])


class OtherShapes(torch.optim.Optimizer):
    """A class whose states have another shape, dtype and number than their parameter.

    A matrix has sums of its rows and columns and the signs of the last gradient; any other parameter has its last two
    gradients, and if it has no dimensions only a count.
    """

    DTYPES: ClassVar = {"rows": torch.float32, "columns": torch.float32, "signs": torch.int8, "history": torch.bfloat16}

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give states their dtypes again: torch loads them in the dtype of the parameter."""
        super().__setstate__(state)
        for found in self.state.values():
            found.update((name, found[name].to(dtype)) for name, dtype in self.DTYPES.items() if name in found)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self._begin(parameter))
                state["step"] += 1
                parameter.sub_(self._update(parameter.grad, state) * group["lr"])

    def _begin(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.tensor(0)}
        if parameter.dim() == 2:
            rows, columns = parameter.shape
            state |= {"rows": torch.zeros(rows), "columns": torch.zeros(columns), "limit": math.inf}
            state["signs"] = torch.zeros(rows * columns, 1, dtype=torch.int8)
        elif parameter.dim():
            state["history"] = torch.zeros(2, *parameter.shape, dtype=torch.bfloat16)
        return state

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        update: Tensor = gradient * state["step"]
        if "rows" in state:
            state["rows"] += gradient.abs().sum(1)
            state["columns"] += gradient.abs().sum(0)
            update = gradient + state["signs"].view(gradient.shape) + (state["rows"][:, None] - state["columns"]) / 4
            state["signs"] = gradient.sign().to(torch.int8).view(-1, 1)
        elif "history" in state:
            state["history"] = torch.stack([state["history"][1], gradient.bfloat16()])
            update = state["history"].float().sum(0)
        return update


class Small(nn.Module):
    """A matrix with two names, a vector, a scalar, a parameter that is never used, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.bias = nn.Parameter(torch.tensor([1.0, -1.0, 0.5]))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.tensor([[8.0]]))
        self.frozen = nn.Parameter(torch.tensor([0.25, -0.0]), requires_grad=False)
        self.inner = nn.Module()
        self.inner.weight = self.weight
        self.register_buffer("seen", torch.tensor([3, 4]))

    def forward(self, step: int) -> Tensor:
        named = {"weight": self.weight, "bias": self.bias, "scale": self.scale}
        return torch.stack([(named[name] * g.to(named[name].dtype)).sum() for name, g in gradients(step).items()]).sum()


def gradients(step: int) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, -1.0]]) + step,
        "bias": torch.tensor([2.0, 0.0, -4.0 + step]),
        "scale": torch.tensor(1.0 - 2.0 * step),
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first = [(name, p) for name, p in model.named_parameters() if name != "bias" and p.requires_grad]
    return [{"params": first}, {"params": [("bias", dict(model.named_parameters())["bias"])], "lr": 2**-10}]


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
