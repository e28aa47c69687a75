"""The user's optimizer class, run over the flat pieces of parameters that this rank steps, bucket by bucket.

Knows: the class's instances, their options, and what a step changes in these. Does not know: runs and states (`runs`),
ranks, gradients' origin, communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .flat_states import BucketStates, Options, PieceState


class InnerOptimizer:
    """The user's class: an instance for each bucket, whose parameters are runs.

    So buckets are stepped one after the other, and what a class counts or keeps for itself is as if it had been called
    once. ``groups`` given to its methods are the user's live param groups: their options count, their parameters do
    not.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], defaults: Options) -> None:
        plain = optimizer_class([torch.zeros(1, 1)], **defaults)  # torch's own errors about the arguments
        self.defaults: Options = dict(plain.defaults)
        self._class, self._arguments = optimizer_class, defaults
        try:
            self._begins_with_state = bool(optimizer_class([torch.zeros(1)], **defaults).state)
        except Exception as error:
            raise not_elementwise(optimizer_class.__name__, f"it refuses a flat parameter ({error})") from error
        self.states: list[BucketStates] = []
        self.elementwise: frozenset[str] = frozenset()  # names of the states that are as large as the parameter

    @property
    def name(self) -> str:
        """The class's."""
        return self._class.__name__

    def plain(self, groups: Sequence[Options]) -> torch.optim.Optimizer:
        """The class itself over param groups, as in a plain loop."""
        return self._class(groups, **copy.deepcopy(self._arguments))

    def another(self, **changed: Any) -> InnerOptimizer:
        """One of the same class and arguments but for those that are ``changed``, which has taken up nothing."""
        return InnerOptimizer(self._class, {**copy.deepcopy(self._arguments), **changed})

    def instance(self) -> torch.optim.Optimizer:
        """One that has no parameters, and counts on from where the others are."""
        made = self._class([torch.zeros(1)], **self._arguments)
        made.param_groups.clear()
        made.state.clear()
        if self.states:
            kept = {"state", "param_groups", "defaults"}
            for key, value in vars(self.states[0].instance).items():
                if key not in kept and not key.startswith("_optimizer_"):
                    vars(made)[key] = copy.deepcopy(value)
        return made

    def add(self, states: BucketStates, groups: Sequence[Options]) -> None:
        """Take up a bucket. A class that makes its state when it is built (Adagrad) makes it here."""
        self.states.append(states)
        if not self._begins_with_state:
            return
        late = states.master is not None and not states.master.exists
        states.plan((True,) * len(states.pieces), (False,) * len(groups))
        if states.runs:
            built = self._class(_param_groups(states, groups), **self._arguments)
            states.instance.state.update(built.state)
        states.adopt_states(self.elementwise)
        if late and states.master is not None:
            states.snapshot()  # the runs are views of weights that may never be updated
            states.master.forget()

    def step(
        self,
        gradients: Sequence[Tensor | None],
        present: Sequence[tuple[bool, ...]],
        groups: Sequence[Options],
        stepped: Callable[[int], None],
        stepping: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> dict[int, Options]:
        """Step every piece that is ``present``, by bucket, with the gradients of the buckets' intervals, 1-D.

        Each instance is stepped once, with all groups, also those of which this rank holds nothing: a class may count
        its steps. ``stepped`` is told the number of each bucket after it, and ``stepping`` is entered around each.
        Returns what the class changed in each group's options, by group.
        """
        cut = tuple(not group.get("fused") for group in groups)
        found: list[tuple[BucketStates, list[tuple[Options, Options]]]] = []
        ahead = (states for states, pieces in zip(self.states, present, strict=True) if any(pieces))
        _prefetch(next(ahead, None))
        before: BucketStates | None = None  # whose states may be on their way back while the next one is stepped
        try:
            for number, states in enumerate(self.states):
                if any(present[number]):
                    _prefetch(next(ahead, None))
                with stepping(number):
                    found.append((states, _step(states, gradients[number], present[number], cut, groups)))
                    states.adopt_states(self.elementwise)
                    states.unstage()
                    states.cast(present[number])
                    states.evict()
                if any(present[number]):
                    if before is not None:
                        before.let_go()
                    before = states
                stepped(number)
        finally:
            for states in self.states:
                states.let_go()
        changed = {number: _changed(number, group, found) for number, group in enumerate(groups)}
        return {number: options for number, options in changed.items() if options}

    def state_of(self, index: int, piece: int) -> PieceState | None:
        return self.states[index].state_of(piece)

    def tensors_of(self, states: BucketStates) -> list[Tensor]:
        """The tensors of a bucket's states: the flat ones, and the scalars of its runs."""
        scalars = [
            value
            for run in states.runs
            for name, value in states.instance.state.get(run.parameter, {}).items()
            if isinstance(value, Tensor) and name not in run.views
        ]
        wide = [states.master.master] if states.master is not None and states.master.exists else []
        return [*states.flat.values(), *scalars, *wide]

    def close(self) -> None:
        """Let go of all states."""
        self.states = []

    def snapshot(self) -> None:
        """Forget the runs, before states are replaced."""
        for states in self.states:
            states.snapshot()


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The class's own ``step``, without the hooks that torch wraps around it: these belong to the user's object."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def not_elementwise(optimizer_class: str, why: str) -> ValueError:
    """What to raise where a class cannot be sharded."""
    return ValueError(
        f"{optimizer_class} is not element-wise: {why}. A rank steps flat pieces of parameters, so only "
        "classes whose update of an element depends on nothing but that element's gradient and state can be sharded "
        "(SGD, Adam, AdamW, Adagrad, RMSprop, ...)"
    )


def _prefetch(states: BucketStates | None) -> None:
    if states is not None:
        states.prefetch()


def _step(
    states: BucketStates,
    gradient: Tensor | None,
    present: tuple[bool, ...],
    cut: tuple[bool, ...],
    groups: Sequence[Options],
) -> list[tuple[Options, Options]]:
    """Step a bucket; of each group the options after it, and those that its instance was given, which it may edit."""
    groups = [_apart(group) for group in groups]
    if states.master is not None:
        states.master.sync_from_param()
    states.plan(present, cut)
    states.stage()
    wide = None if gradient is None else gradient.to(states.bucket.dtypes.master_dtype)
    for run in states.runs:
        assert wide is not None
        run.parameter.grad = wide[run.begin : run.end].view(run.parameter.shape)
    states.instance.param_groups = param_groups = _param_groups(states, groups)
    try:
        unhooked_step(states.instance)()
    finally:
        for run in states.runs:
            run.parameter.grad = None
        states.instance.param_groups = []
    return list(zip(param_groups, groups, strict=True))


def _changed(
    number: int, live: Options, found: Sequence[tuple[BucketStates, list[tuple[Options, Options]]]]
) -> Options:
    """What the class put into a group; what it edited in place is edited. As told by an instance that stepped a
    parameter of the group, if one did."""
    of_it = [told for states, told in found if number in states.stepped_groups]
    changed: Options = {}
    for after, given in [(of_it or [told for _, told in found])[0][number]] if found else []:
        for key, value in after.items():
            if key != "params" and value is not given.get(key):
                changed[key] = value
            elif isinstance(value, Tensor):
                live[key].copy_(value)
    return changed


def _param_groups(states: BucketStates, groups: Sequence[Options]) -> list[Options]:
    """The groups with a bucket's runs as their parameters."""
    result = []
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        runs = [run.parameter for run in states.runs if states.groups[run.first] == number]
        result.append({**options, "params": runs})
    return result


def _apart(group: Options) -> Options:
    """A group whose options may be edited in place, once for each bucket, without the next one's seeing it."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
