"""Several classes of optimizers in one program: the plain loop's, and their state dicts as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Class = type[torch.optim.Optimizer]


def name_of(cls: Class) -> str:
    """Return the name by which a state dict knows a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


class PlainClasses(torch.optim.Optimizer):
    """An optimizer of each class, whose param groups are in the order in which they are given."""

    def __init__(self, cls: Class, arguments: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """``cls``, ``arguments``: for the groups without an "optimizer_class". "partition" is left out."""
        self.classes = [group.get("optimizer_class", cls) for group in groups]
        known = [{k: v for k, v in group.items() if k not in ("optimizer_class", "partition")} for group in groups]
        super().__init__([p for group in groups for _, p in group["params"]], {"lr": 0.0})
        self.all: dict[Class, torch.optim.Optimizer] = {}
        for each in dict.fromkeys(self.classes):
            mine = [group for group, of in zip(known, self.classes, strict=True) if of is each]
            self.all[each] = each(mine, **(arguments if each is cls else {}))
        turns = {each: iter(optimizer.param_groups) for each, optimizer in self.all.items()}
        self.param_groups = [next(turns[each]) for each in self.classes]

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.all.values():
            optimizer.step()

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the states of a parameter."""
        return next(optimizer.state[parameter] for optimizer in self.all.values() if parameter in optimizer.state)

    def state_dict(self) -> dict[str, Any]:
        """Return one dict, whose indices count the parameters of all groups."""
        return merged({name_of(each): found.state_dict() for each, found in self.all.items()}, self.classes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, optimizer in self.all.items():
            groups = [g for g, of in zip(state_dict["param_groups"], self.classes, strict=True) if of is each]
            own = {index: place for place, index in enumerate(i for group in groups for i in group["params"])}
            states = {own[index]: state for index, state in state_dict["state"].items() if index in own}
            packed = [{**group, "params": [own[index] for index in group["params"]]} for group in groups]
            optimizer.load_state_dict({"state": states, "param_groups": packed})
        turns = {each: iter(optimizer.param_groups) for each, optimizer in self.all.items()}
        self.param_groups = [next(turns[each]) for each in self.classes]


def merged(dicts: Mapping[str, dict[str, Any]], classes: Sequence[Class]) -> dict[str, Any]:
    """Return the dicts of several classes, by name, as one. ``classes``: of each param group."""
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    groups = {name: iter(found["param_groups"]) for name, found in dicts.items()}
    indices: dict[str, dict[int, int]] = {name: {} for name in dicts}
    count = itertools.count()
    for each in classes:
        name = name_of(each)
        group = dict(next(groups[name]))
        assert group.pop("optimizer_class", name) == name
        indices[name].update((index, next(count)) for index in group["params"])
        whole["param_groups"].append({**group, "params": [indices[name][index] for index in group["params"]]})
    assert all(next(rest, None) is None for rest in groups.values()), "a group that nobody has"
    for key in ("state", "masters"):
        for name, found in dicts.items():
            whole.setdefault(key, {}).update({indices[name][i]: value for i, value in found.get(key, {}).items()})
    if not whole["masters"]:
        del whole["masters"]
    return whole
