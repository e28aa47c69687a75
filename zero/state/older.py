"""Completes a state dict that an older version of its class has saved, as `torch.optim.Optimizer.load_state_dict` does.

Knows: `__setstate__`, in which a class of torch.optim adds the options that its older versions did not have, and makes
tensors of plain numbers. Does not know: ranks, where states are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.layout import ParameterSpec
from ..core.rounding import STEPS
from ..core.stage import step_device
from ..runtime.flat_states import Options
from ..step.classes import UserOptimizers
from ..step.user_optimizer import NO_OPTIONS, UserOptimizer

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")


def completed(
    state_dict: Mapping[str, Any],
    groups: Sequence[Options],
    user_optimizers: UserOptimizers,
    listed: Sequence[ParameterSpec],
) -> dict[str, Any]:
    """Return a plain dict with what the classes of its param groups add to it. Changes nothing, of the dict neither.

    Each class is given its groups and their states once, on an instance whose parameters have no memory. Of a tensor of
    more than one element it sees the shape alone, so one on the meta device serves, too. If a class refuses what it is
    given, its groups stay as they are; `plain_dicts.fitted` names what they lack.

    Args:
        state_dict: one of all param groups, with as many parameters in each as this optimizer has.
        groups: the live param groups.
        user_optimizers: their classes.
        listed: their parameters.

    Raises:
        ValueError: the dict belongs to another class, or a class makes other large states of those that it is given.
    """
    saved, states = list(state_dict["param_groups"]), dict(state_dict["state"])
    members: dict[int, list[ParameterSpec]] = {place: [] for place in range(len(groups))}
    for spec in sorted(listed, key=lambda spec: spec.index):
        members[spec.group].append(spec)
    for number, inner in user_optimizers.used():
        if inner.optimizer_class.__setstate__ is torch.optim.Optimizer.__setstate__:
            continue
        places = list(user_optimizers.groups_of(number, groups))
        throw_away = _ThrowAway(inner, [(saved[place], members[place]) for place in places], states)
        try:
            found = throw_away.complete()
        except Exception:  # these are not its states, or it cannot load what it saves itself
            continue
        for place, options in zip(places, found, strict=True):
            _check_options(inner, place, saved[place], options, groups[place])
            saved[place] = {**saved[place], **options}
        for index, added in throw_away.added():
            states[index] = {**states[index], **added}
    return {**state_dict, "state": states, "param_groups": saved}


def _check_options(inner: UserOptimizer, place: int, saved: Options, after: Options, live: Options) -> None:
    """Raise `ValueError` if the class has added options to a group that has others, which it does not know."""
    added = live.keys() & after.keys() - saved.keys()
    unknown = saved.keys() - live.keys() - {*inner.defaults, *NO_OPTIONS, *_OF_SCHEDULERS, STEPS}
    if added and unknown:
        raise ValueError(
            f"param group {place}: the state dict has no {min(added)!r}, but {min(unknown)!r}, which {inner.name} does "
            f"not know: it belongs to another class, or {min(unknown)!r} is yours: then put it into the param group"
        )


class _ThrowAway:
    """A throw-away instance of a class, and what it is given of a state dict."""

    def __init__(
        self,
        inner: UserOptimizer,
        groups: Sequence[tuple[Options, Sequence[ParameterSpec]]],
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """``groups``: of the dict, with their parameters. ``states``: by the dict's indices."""
        self._inner, self._instance = inner, inner.instance(None)
        self._groups: list[Options] = []
        self._parameters: dict[int, tuple[Tensor, ParameterSpec]] = {}  # by the dict's index
        self._given: dict[int, dict[str, Any]] = {}
        for group, specs in groups:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key not in NO_OPTIONS}
            made = [_zeros(spec.shape, spec.dtypes.master_dtype, step_device(spec)) for spec in specs]
            self._groups.append({**options, "params": made})
            for index, parameter, spec in zip(group["params"], made, specs, strict=True):
                self._parameters[index] = (parameter, spec)
                if states.get(index):
                    self._given[index] = {
                        name: _copied(value, step_device(spec)) for name, value in states[index].items()
                    }

    def complete(self) -> list[Options]:
        """Let the class complete what was added, and return the options of each group."""
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        state.update((self._parameters[index][0], dict(given)) for index, given in self._given.items())
        self._instance.__setstate__({"state": state, "param_groups": self._groups})
        return [{key: group[key] for key in group if key != "params"} for group in self._instance.param_groups]

    def added(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the states that the class has added or replaced, by the dict's index. Call `complete` before."""
        found = []
        for index, given in self._given.items():
            parameter, spec = self._parameters[index]
            after = self._instance.state[parameter]
            added = {name: value for name, value in after.items() if name not in given or value is not given[name]}
            for name, value in added.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise ValueError(
                        f"{self._inner.name} makes the state {name!r} of {spec.name!r} anew when it loads a dict: load "
                        "the dict into the plain class, and give what its state_dict() returns then"
                    )
            found.append((index, added))
        return found


def _copied(value: Any, device: str) -> Any:
    """Return a copy of a state; of a tensor of more than one element its shape, on the device of its parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().clone() if value.numel() <= 1 else _zeros(value.shape, value.dtype, device)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros of which all share the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
