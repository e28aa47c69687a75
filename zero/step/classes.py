"""The classes of one optimizer: `optimizer_class`, and those that param groups name for themselves.

Knows: which param group is stepped by which class. Does not know: how a class is stepped, ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from ..runtime.flat_states import Options
from .inner import BucketUpdate, InnerOptimizer

KEY = "optimizer_class"  # of a param group: a class when it is given, and its qualified name from then on
_OF_TORCH = ("foreach", "fused", "capturable", "differentiable", "maximize")


class InnerOptimizers:
    """The classes, in the order in which they were named. Number 0 is that of the groups that name none."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], defaults: Options) -> None:
        self._all = [InnerOptimizer(optimizer_class, defaults)]

    @property
    def main(self) -> InnerOptimizer:
        """The class of the groups that name none."""
        return self._all[0]

    def __getitem__(self, number: int) -> InnerOptimizer:
        return self._all[number]

    def number(self, group: Options) -> int:
        """Return the number of a group's class."""
        name, names = group.get(KEY), [inner.qualified_name for inner in self._all]
        if name is not None and name not in names:
            raise ValueError(f"a param group has the {KEY} {name!r}, and none was built with it: {', '.join(names)}")
        return 0 if name is None else names.index(name)

    def of(self, group: Options) -> InnerOptimizer:
        """Return a group's class."""
        return self._all[self.number(group)]

    def groups_of(self, number: int, groups: Sequence[Options]) -> dict[int, Options]:
        """Return the param groups of a class, by their numbers."""
        return {place: group for place, group in enumerate(groups) if self.number(group) == number}

    def used(self, groups: Sequence[Options]) -> list[tuple[int, InnerOptimizer]]:
        """Return the classes of these param groups, with their numbers, in order."""
        return [(number, self._all[number]) for number in sorted({self.number(group) for group in groups})]

    def names(self, groups: Sequence[Options]) -> str:
        """Return the names of the classes of these param groups, as text."""
        return " and ".join(inner.name for _, inner in self.used(groups))

    def option_names(self) -> set[str]:
        """Return the names of the options of all classes."""
        return {name for inner in self._all for name in inner.defaults}

    def complete(self, group: Options, number: int) -> Options:
        """Return a group that a user gave, with the name of its class and the class's defaults, if it names a class.

        ``number``: that of the group, in errors. Raises `TypeError` or `ValueError` if it names none that can be used.
        """
        named = group.get(KEY)
        if named is None:
            return {key: value for key, value in group.items() if key != KEY}
        if not isinstance(named, type) or not issubclass(named, torch.optim.Optimizer):
            raise TypeError(f"param group {number}: {KEY} must be a class of optimizers, not {named!r}")
        if named is torch.optim.Optimizer or inspect.isabstract(named):
            raise TypeError(f"param group {number}: {KEY} is {named.__name__}, which is abstract: name one that steps")
        inner = next((inner for inner in self._all if inner.optimizer_class is named), None)
        if inner is None:
            try:
                inner = InnerOptimizer(named, {})
            except Exception as error:
                raise ValueError(f"param group {number}: {named.__name__} cannot be built: {error}") from error
        defaults = inner.class_defaults()
        for option in _OF_TORCH:
            if group.get(option) and option not in defaults:
                raise ValueError(f"param group {number}: {inner.name} has no option {option!r}: leave it away")
        if inner not in self._all:
            self._all.append(inner)
        return {**defaults, **group, KEY: inner.qualified_name}

    def drop_foreign(self, completed: Options, given: Options) -> None:
        """Drop the options that torch has added to a completed group, but its own class does not have."""
        if KEY in completed:
            for key in self.main.defaults.keys() - self.of(completed).defaults.keys() - given.keys():
                del completed[key]

    def step(self, updates: Sequence[BucketUpdate], groups: Sequence[Options]) -> dict[int, Options]:
        """Step the buckets of each class. Arguments and result are those of `InnerOptimizer.step`, for all groups."""
        changed: dict[int, Options] = {}
        for number, inner in enumerate(self._all):
            mine = [update for update in updates if update.optimizer_class == number]
            if mine:
                changed |= inner.step(mine, self.groups_of(number, groups))
        return changed
