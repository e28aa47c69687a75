"""Optimizer classes that exchange the weights between training and evaluation."""

from __future__ import annotations

from typing import Any

import torch

from .updates import Updates


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., "The Road Less Scheduled"). In a group are its mode and its count of steps."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state.get(p):
                        self.state[p]["z"] = p.clone()
                    z = self.state[p]["z"]
                    p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                    z.sub_(p.grad, alpha=group["lr"])

    def train(self) -> None:
        self._exchange(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._exchange(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _exchange(self, train_mode: bool, share: Any) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not train_mode else ():
                if self.state.get(p):
                    p.lerp_(self.state[p]["z"], share(group["beta"]))
            group["train_mode"] = train_mode


class Averaged(Updates):
    """SGD that is evaluated with an average. A state, which it has in eval mode alone, is its mode."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])
        if "average" in self.state[p]:
            self.state[p]["average"].lerp_(p, 0.3)
        else:
            self.state[p]["average"] = p.clone()

    @torch.no_grad()
    def train(self) -> None:
        for p, state in self.state.items():
            if "kept" in state:
                p.copy_(state.pop("kept"))

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            if "average" in state and "kept" not in state:
                state["kept"] = p.clone()
                p.copy_(state["average"])


class Centred(ScheduleFree):
    def eval(self) -> None:
        for p, state in self.state.items():
            if self.param_groups[0]["train_mode"]:
                state["mean"] = p.mean().detach()
                p.data.sub_(state["mean"])
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        for p, state in self.state.items():
            if "mean" in state:
                p.data.add_(state.pop("mean"))
        self.param_groups[0]["train_mode"] = True


TWO_MODES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "schedule-free": (ScheduleFree, {}),
    "averaged": (Averaged, {}),
    "centred": (Centred, {}),
}
