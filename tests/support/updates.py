"""The step of tests' classes of optimizers, which update one parameter after the other."""

from __future__ import annotations

from typing import Any

import torch


class Updates(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError


class WithRate(Updates):
    """Has a learning rate, and no other option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
