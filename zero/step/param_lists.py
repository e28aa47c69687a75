"""The lists of parameters in the live param groups. They are fixed: memory and classes were laid out for them.

Knows: which parameters a group had when it was added. Does not know: the options of groups, which are live.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..core.layout import ParameterSpec
from ..runtime.flat_states import Options

REMEDY = (
    "the lists of param groups are fixed, unlike their options: put it back as it was; requires_grad_(False) ends the "
    "training of a parameter, add_param_group() adds one, and for other groups build a new optimizer"
)


class ParamLists:
    """The parameters of each param group, in order."""

    def __init__(self) -> None:
        self.groups: Sequence[Options] = ()  # the live ones
        self._known: list[list[Tensor]] = []
        self._names: list[str] = []  # of all of them, one group after the other

    def keep(self, groups: Sequence[Options], listed: Iterable[ParameterSpec]) -> None:
        """Note the lists of new groups. ``groups``: all live ones; ``listed``: their parameters, in any order."""
        self.groups = groups
        self._known += [list(group["params"]) for group in groups[len(self._known) :]]
        self._names = [spec.name for spec in sorted(listed, key=lambda spec: spec.index)]

    def changed(self, groups: Sequence[Options]) -> str | None:
        """Return an error text if a list was edited since, else None. ``groups``: the live ones."""
        lists = [group.get("params", ()) for group in groups]
        if len(lists) == len(self._known) and all(map(_same, lists, self._known)):
            return None
        return f"{self._difference(lists)}: {REMEDY}"

    def _difference(self, lists: Sequence[Any]) -> str:
        """Return how ``lists`` differ from what is known."""
        for number, now in enumerate(lists):
            if not isinstance(now, (list, tuple)):
                return f"the parameters of param group {number} are a {type(now).__name__}, and no list"
        names = iter(self._names)
        known = {id(parameter): (next(names), number) for number, has in enumerate(self._known) for parameter in has}
        listed = {id(parameter): number for number, has in enumerate(lists) for parameter in has}
        for key, (name, number) in known.items():
            if key not in listed:
                return f"{name!r} is in param group {number} no more"
            if listed[key] != number:
                return f"{name!r} of param group {number} is now in param group {listed[key]}"
        if len(lists) != len(self._known):
            return f"there are {len(lists)} param groups, not {len(self._known)}"
        for number, (now, before) in enumerate(zip(lists, self._known, strict=True)):
            for parameter in now:
                if id(parameter) not in known:
                    return f"param group {number} has a further parameter, of shape {tuple(parameter.shape)}"
            for parameter, other in zip(now, before, strict=False):
                if parameter is not other:
                    return f"{known[id(parameter)][0]!r} has another place in param group {number}"
            if len(now) > len(before):
                break
        return f"param group {number} has {known[id(now[-1])][0]!r} twice"


def _same(now: Any, before: list[Tensor]) -> bool:
    return isinstance(now, (list, tuple)) and len(now) == len(before) and all(map(operator.is_, now, before))
