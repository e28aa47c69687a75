"""Shampoo, as Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018), Algorithm 2.

For each dimension of a parameter it keeps a preconditioner: a matrix of that dimension's size, in a list in its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .updates import Updates


class Shampoo(Updates):
    """Args: ``lr``; ``momentum`` of the gradient; ``eps``, times the identity, is where preconditioners begin."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, eps: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps})

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
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
    """Steps the momentum in the eigenbasis of its products, scaled by place, as SOAP does.

    It keeps the eigenvectors in the memory order in which `torch.linalg.eigh` makes them, column-major, for three
    steps: in a list, a tuple and a dict, of a square parameter in a state of the parameter's shape, and once expanded.
    Each column is turned by itself, since products with one vector have other last bits in another memory order.
    """

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(parameter)
        update = state["momentum"].mul_(group["momentum"]).add_(gradient).float()
        if state["step"] % 3 == 0:
            sides = [_rows(update, dimension).nan_to_num(0.0, 1e9, -1e9) for dimension in range(update.dim())]
            bases = [torch.linalg.eigh(rows @ rows.t())[1] for rows in sides]
            state["bases"], state["again"] = bases, ({"bases": tuple(bases)},)
            state["first"] = bases[0] if bases else torch.ones(())
            state["one"] = torch.ones(1, device=parameter.device).expand(3, 4)
        state["step"] += 1
        for dimension, back in enumerate(state["again"][0]["bases"]):
            basis = state["bases"][dimension] if dimension else state["first"]
            scale = torch.arange(1.0, len(basis) + 1) / len(basis)
            turned = update.transpose(0, dimension)
            columns = [back @ (scale * (basis.t() @ column)) for column in _rows(update, dimension).unbind(1)]
            update = torch.stack(columns, 1).view(turned.shape).transpose(0, dimension)
        parameter.sub_((group["lr"] * state["one"].sum() / 12 * update).to(parameter.dtype))


def _rows(tensor: Tensor, dimension: int) -> Tensor:
    return tensor.transpose(0, dimension).flatten(1) if tensor.dim() > 1 else tensor[:, None]
