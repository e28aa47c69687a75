"""Classes of optimizers by name; several in one program: the plain loop's, and their state dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shampoo import Shampoo

Class = type[torch.optim.Optimizer]
CLASSES: dict[str, tuple[Class, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}

BY_PARAMETER: dict[str, tuple[Class, dict[str, Any]]] = {  # they step whole parameters alone
    "shampoo": (Shampoo, {"lr": 0.05}),
}
MATRICES = {"muon": (torch.optim.Muon, {"lr": 1e-2})}  # it takes matrices alone, and steps them whole
FOR_LOOP = {"adamw for-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False})}  # torch's default only on the CPU


def nothing() -> None:
    """Is a mode of a class that has none."""


def name_of(cls: Class) -> str:
    """Return the name by which a state dict knows a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


class PlainClasses(torch.optim.Optimizer):
    """An optimizer of each class, whose param groups are in the order in which they are given."""

    def __init__(self, cls: Class, arguments: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """``cls``, ``arguments``: for groups without an "optimizer_class". The library's options are left out."""
        self.classes = [group.get("optimizer_class", cls) for group in groups]
        own = ("optimizer_class", "partition", "blocks")
        known = [{k: v for k, v in group.items() if k not in own} for group in groups]
        super().__init__([p for group in groups for _, p in group["params"]], {"lr": 0.0})
        self.all: dict[str, torch.optim.Optimizer] = {}
        for each in dict.fromkeys(self.classes):
            mine = [group for group, of in zip(known, self.classes, strict=True) if of is each]
            self.all[name_of(each)] = self.made(each, mine, arguments if each is cls else {})
        self._show_groups()

    def made(self, cls: Class, groups: list[dict[str, Any]], arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        return cls(groups, **arguments)

    def _show_groups(self) -> None:
        turns = {name: iter(optimizer.param_groups) for name, optimizer in self.all.items()}
        self.param_groups = [next(turns[name_of(each)]) for each in self.classes]

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.all.values():
            optimizer.step()

    def train(self) -> None:
        for optimizer in self.all.values():
            getattr(optimizer, "train", nothing)()

    def eval(self) -> None:
        for optimizer in self.all.values():
            getattr(optimizer, "eval", nothing)()

    def reset(self, parameter: Tensor) -> None:
        """Forget the states of a parameter."""
        for optimizer in self.all.values():
            optimizer.state.pop(parameter, None)

    def round(self, rounding: Any, gradients: Mapping[Tensor, Tensor | None]) -> None:
        """Step, and round what is in bf16. ``rounding``: a `zero.StochasticRounding`."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for optimizer in self.all.values():
            rounding.step(optimizer, gradients, every)

    def of(self, name: str) -> list[Tensor]:
        """Return the parameters of a class, by the index in its state dict."""
        return [parameter for group in self.all[name].param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the dict of each class."""
        return {name: optimizer.state_dict() for name, optimizer in self.all.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, optimizer in self.all.items():
            optimizer.load_state_dict(state_dict[name])
            for index, state in state_dict[name]["state"].items():  # in the dtype in which they were saved
                optimizer.state[self.of(name)[index]].update({k: v for k, v in state.items() if k != "step"})
        self._show_groups()


class InBlocks(PlainClasses):
    """Steps the blocks of parameters in groups with "blocks" as parameters of their own, which are views."""

    def __init__(self, cls: Class, arguments: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        self.cut: list[tuple[Tensor, Any, Sequence[Tensor]]] = []  # parameters, how they are cut, and their blocks
        for group in groups:
            for _, p in group["params"] if "blocks" in group else ():
                parts = [part.requires_grad_(p.requires_grad) for part in cut(p.detach(), group["blocks"])]
                self.cut.append((p, group["blocks"], parts))
        super().__init__(cls, arguments, [self._in_parts(group) if "blocks" in group else group for group in groups])

    def parts_of(self, p: Tensor) -> Sequence[Tensor]:
        """Return the blocks of a parameter, or the parameter if it has none."""
        return next((parts for q, _, parts in self.cut if q is p), [p])

    def _in_parts(self, group: dict[str, Any]) -> dict[str, Any]:
        parts = [(f"{name}.{n}", part) for name, p in group["params"] for n, part in enumerate(self.parts_of(p))]
        return {**group, "params": parts}

    def step(self, closure: Any = None) -> None:
        for p, blocks, parts in self.cut:
            gradients = [None] * len(parts) if p.grad is None else cut(p.grad, blocks)
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for p, _, _ in self.cut:
            p.grad = None


def cut(tensor: Tensor, blocks: Any) -> Sequence[Tensor]:
    """Return the blocks of a tensor, as views: of so many rows each, or of the indices of the dimension 0 or 1."""
    if isinstance(blocks, list):
        return tensor.split(blocks)  # type: ignore[no-any-return]
    return tensor[0].unbind() if blocks else tensor.unbind()
