"""Shampoo, as Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018), Algorithm 2.

For each dimension of a parameter it keeps a preconditioner: a matrix of that dimension's size, in a list in its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """Args: ``lr``; ``momentum`` of the gradient; ``eps``, times the identity, is where preconditioners begin."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, eps: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter)
            state["preconditioners"] = [
                torch.eye(size, dtype=torch.float32, device=parameter.device) * group["eps"] for size in parameter.shape
            ]
        state["step"] += 1
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        update = state["momentum"].float()
        for dimension, preconditioner in enumerate(state["preconditioners"]):
            rows = (
                gradient.float().transpose(0, dimension).flatten(1) if gradient.dim() > 1 else gradient.float()[:, None]
            )
            preconditioner.add_(rows @ rows.t())
            values, vectors = torch.linalg.eigh(preconditioner.nan_to_num(0.0, 1e9, -1e9))
            root = vectors * values.clamp_min(1e-6).pow(-0.5 / len(state["preconditioners"])) @ vectors.t()
            turned = update.transpose(0, dimension)
            update = (root @ turned.flatten(1) if turned.dim() > 1 else root @ turned).view_as(turned)
            update = update.transpose(0, dimension)
        parameter.sub_((group["lr"] * update).to(parameter.dtype))


class Rotated(Shampoo):
    """Steps the momentum in the eigenbasis of the preconditioners, divided by roots, as SOAP does.

    It keeps the eigenvectors in the memory order in which `torch.linalg.eigh` makes them, column-major, for ``every``
    steps: in a list, a tuple and a dict, of a square parameter in a state of the parameter's shape, and once expanded.
    Each column is turned by itself, since products with one vector have other last bits in another memory order.
    """

    def __init__(self, params: Any, lr: float = 0.05, every: int = 3) -> None:
        super().__init__(params, lr)
        self.every = every

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter)
            state["factors"] = [torch.zeros(size, size, device=parameter.device) for size in parameter.shape]
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        for dimension, factor in enumerate(state["factors"]):
            rows = _rows(gradient.float(), dimension)
            factor.add_(rows @ rows.t())
        if state["step"] % self.every == 0:
            found = [torch.linalg.eigh(factor.nan_to_num(0.0, 1e9, -1e9)) for factor in state["factors"]]
            state["roots"] = [values.clamp_min(1e-3).pow(-0.5 / max(1, len(found))) for values, _ in found]
            state["bases"] = [vectors for _, vectors in found]
            state["again"] = ({"bases": tuple(vectors for _, vectors in found)},)
            state["first"] = found[0][1] if found else torch.ones(())
            state["one"] = torch.ones(1, device=parameter.device).expand(3, 4)
        state["step"] += 1
        update = state["momentum"].float()
        for dimension, root in enumerate(state["roots"]):
            basis = state["first"] if dimension == 0 else state["bases"][dimension]
            back = state["again"][0]["bases"][dimension]
            turned = update.transpose(0, dimension)
            columns = _rows(update, dimension).unbind(1)
            columns = [back @ (root * (basis.t() @ column)) for column in columns]
            update = torch.stack(columns, 1).view(turned.shape).transpose(0, dimension)
        parameter.sub_((group["lr"] * state["one"].sum() / 12 * update).to(parameter.dtype))


def _rows(tensor: Tensor, dimension: int) -> Tensor:
    return tensor.transpose(0, dimension).flatten(1) if tensor.dim() > 1 else tensor[:, None]
