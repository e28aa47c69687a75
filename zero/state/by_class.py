"""The state dict of an optimizer with several classes: one plain dict for each, by its name.

Knows: torch.optim's dicts. Does not know: ranks, where states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.names import MASTERS


def split(whole: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the plain dict of each class, by its name, whose indices begin at 0. ``names``: of each group's class."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        groups = [group for group, of in zip(whole["param_groups"], names, strict=True) if of == name]
        indices = {index: place for place, index in enumerate(index for group in groups for index in group["params"])}
        found[name] = {
            **_renumbered(whole, indices),
            "param_groups": [
                {**group, "optimizer_class": name, "params": [indices[index] for index in group["params"]]}
                for group in groups
            ],
        }
    return found


def merged(dicts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return one dict of the plain dicts of each class: what `split` was given. ``names``: of each group's class.

    Raises `ValueError` if there is not one for each class, with as many groups as it has.
    """
    if not isinstance(dicts, Mapping) or dicts.keys() != set(names):
        raise ValueError(
            f"the state dict must hold one dict for each class, by its name: {', '.join(sorted(set(names)))}; it has "
            f"{', '.join(map(repr, dicts)) or 'nothing'}"
        )
    for name, plain in dicts.items():
        if not isinstance(plain, Mapping) or not {"state", "param_groups"} <= plain.keys():
            raise ValueError(f"the dict of {name} must be one of torch.optim, with 'state' and 'param_groups'")
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    groups: dict[str, Iterator[Any]] = {}
    indices: dict[str, dict[int, int]] = {name: {} for name in dicts}
    for name, plain in dicts.items():
        if len(plain["param_groups"]) != names.count(name):
            raise ValueError(
                f"the state dict has {len(plain['param_groups'])} param groups of {name}, this optimizer "
                f"{names.count(name)}"
            )
        groups[name] = iter(plain["param_groups"])
    count = 0
    for name in names:
        group = next(groups[name])
        for index in group["params"]:
            indices[name][index] = count
            count += 1
        whole["param_groups"].append({**group, "params": [indices[name][index] for index in group["params"]]})
    for name, plain in dicts.items():
        for key, values in _renumbered(plain, indices[name]).items():
            whole.setdefault(key, {}).update(values)
    return whole


def _renumbered(plain: Mapping[str, Any], indices: Mapping[int, int]) -> dict[str, dict[int, Any]]:
    """Return what a dict has by index, with other indices."""
    return {
        key: {indices[index]: value for index, value in plain[key].items() if index in indices}
        for key in ("state", MASTERS)
        if key in plain
    }
