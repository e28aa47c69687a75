"""The classes of one optimizer: `optimizer_class`, and those that param groups name for themselves.

Knows: which class steps which param group, and the lists of parameters in the live groups, which are fixed, as memory
and classes were laid out for them. Does not know: how a class is stepped, ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.layout import ParameterSpec
from ..core.runs import Rules
from ..runtime.flat_states import Options
from .arguments import KEY, arguments_of, check_class, different_argument
from .user_optimizer import NO_OPTIONS, BucketUpdate, Call, Mode, UserOptimizer, unhooked_step

REMEDY = (
    "the lists of param groups are fixed, unlike their options: put it back as it was; requires_grad_(False) ends the "
    "training of a parameter, add_param_group() adds one, and for other groups build a new optimizer"
)
PARTITION, BLOCKS = "partition", "blocks"  # keys of a param group that are given, and are options of this library
TRAIN_MODE = "train_mode"  # the option in which schedule-free classes keep their mode, True or False
_SWITCHES = ("foreach", "fused", "capturable", "differentiable", "maximize")


class UserOptimizers:
    """The classes, in the order in which they were named. Number 0 is that of the groups that name none."""

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: Options, groups: Sequence[Options] = ()
    ) -> None:
        """``groups``: as the user gave them; a class may want an option in each."""
        check_class(optimizer_class)
        example = next((given for given in groups if KEY not in given), {})
        self._all = [UserOptimizer(optimizer_class, defaults, _options_in(example))]
        _check_options(self.main)
        self._of_groups: list[int] = []  # the class of each param group
        self._requested: list[Options] = []  # of each param group: its partition and its blocks, if it asked for them
        self._tried: set[tuple[Any, ...]] = set()  # options of a group, on or off, with which its class was tried
        self.lists = ParamLists()

    @property
    def main(self) -> UserOptimizer:
        """The class of the groups that name none."""
        return self._all[0]

    def __getitem__(self, number: int) -> UserOptimizer:
        return self._all[number]

    def __iter__(self) -> Iterator[UserOptimizer]:
        return iter(self._all)

    def number(self, group: int) -> int:
        """Return the number of a group's class. ``group``: its number."""
        return self._of_groups[group]

    def requested_partition(self, group: int, default: Any) -> Any:
        """Return the partition that a group, given by its number, asked for; ``default`` if it did not."""
        return self._requested[group].get(PARTITION, default)

    def requested_blocks(self, group: int) -> Any:
        """Return the blocks that a group, given by its number, asked for; None if it did not."""
        return self._requested[group].get(BLOCKS)

    def rules_of(self, spec: ParameterSpec) -> Rules:
        """Return how the states of a parameter are divided."""
        return self._all[spec.optimizer_class].rules_of(spec)

    def of(self, group: int) -> UserOptimizer:
        """Return a group's class."""
        return self._all[self._of_groups[group]]

    def groups_of(self, number: int, groups: Sequence[Options]) -> dict[int, Options]:
        """Return the param groups of a class, by their numbers."""
        return {place: group for place, group in enumerate(groups) if self._of_groups[place] == number}

    def used(self) -> list[tuple[int, UserOptimizer]]:
        """Return the classes that groups have, with their numbers, in order."""
        return [(number, self._all[number]) for number in sorted(set(self._of_groups))]

    def changed(self, groups: Sequence[Options] | None = None) -> str | None:
        """Return an error text if the class or the parameters of a live group were edited, else None.

        ``groups``: the live ones; None: those that were registered.
        """
        groups = self.lists.groups if groups is None else groups
        if edited := self.lists.changed(groups):
            return edited
        for place, (group, number) in enumerate(zip(groups, self._of_groups, strict=True)):
            if group.get(KEY, self.main.qualified_name if number == 0 else None) != self._all[number].qualified_name:
                return (
                    f"param group {place} is stepped by {self._all[number].qualified_name}, and its {KEY} is now "
                    f"{group.get(KEY)!r}: leave it as it was, and build a new optimizer for another class"
                )
        return None

    @contextmanager
    def unchanged_on_error(self, *others: object) -> Iterator[None]:
        """Return a context after which, if it raises, the classes and ``others`` have what they had before.

        They replace what they note inside of it, and edit none of it in place."""
        kept = [(each, dict(vars(each))) for each in (self, *self._all, *others)]
        try:
            yield
        except BaseException:
            for each, attributes in kept:
                vars(each).update(attributes)
            raise

    def forget(self, groups: int) -> None:
        """Forget the groups from this number on, which could not be added, and the classes that they alone had."""
        del self._of_groups[groups:], self._requested[groups:]
        del self._all[max([0, *self._of_groups]) + 1 :]

    def with_modes(self) -> list[UserOptimizer]:
        """Return the classes of groups that have `train` and `eval`."""
        return [inner for _, inner in self.used() if inner.has_modes]

    def modes(self, groups: Sequence[Options] | None = None) -> set[Mode | None]:
        """Return the modes of the groups of these classes; with None if the options of one do not tell.

        ``groups``: the live ones; None: those that were registered.
        """
        return {mode for _, mode in self._modes(self.lists.groups if groups is None else groups)}

    def _modes(self, groups: Sequence[Options]) -> Iterator[tuple[int, Mode | None]]:
        for number, (place, group) in enumerate(zip(self._of_groups, groups, strict=False)):  # lists may be edited
            if self._all[place].has_modes:
                in_train_mode = group.get(TRAIN_MODE)
                yield number, ("train" if in_train_mode else "eval") if isinstance(in_train_mode, bool) else None

    def why_no_step(self, groups: Sequence[Options]) -> str | None:
        """Return an error text if a live group is in eval mode, whose weights are not to be trained; else None."""
        for number, mode in self._modes(groups):
            if mode == "eval":
                return (
                    f"step() in eval mode: param group {number}, of {self.of(number).name}, has the weights that are "
                    "evaluated. Call optimizer.train() on all ranks before training, and after each evaluation"
                )
        return None

    def were_tried(self, groups: Sequence[Options]) -> bool:
        """Return whether the classes were tried with the options of live groups that are on. One that was off may let
        a class keep further states."""
        return all(self._switches(number, group) in self._tried for number, group in enumerate(groups))

    def note_trial(self, groups: Sequence[Options], first: int, names: Mapping[int, frozenset[str]]) -> None:
        """Note that the classes were tried with the options of the groups from ``first`` on.

        ``names``: of the states that are as large as their parameters, by the number of the class.
        """
        self._tried = self._tried | {self._switches(number, groups[number]) for number in range(first, len(groups))}
        for number, found in names.items():
            self._all[number].note_elementwise(found)

    def _switches(self, number: int, group: Options) -> tuple[Any, ...]:
        """Return a group's class, and which options that the class has are on."""
        known = ((key, group.get(key)) for key in sorted(self.of(number).defaults))
        return self.number(number), *(key for key, value in known if isinstance(value, Tensor) or value)

    def names(self) -> str:
        """Return the names of the classes that groups have, as text."""
        return " and ".join(inner.name for _, inner in self.used()) or self.main.name

    def option_names(self) -> set[str]:
        """Return the names of the options of all classes."""
        return {name for inner in self._all for name in inner.defaults}

    def complete(self, group: Options) -> Options:
        """Add the next param group, as a user gave it. Return it with the options that its class makes of these, and
        with the name of the class if it names one.

        Raises `TypeError` or `ValueError` if it names none that can be used.
        """
        named, asked = group.get(KEY), {key: value for key, value in group.items() if key in (PARTITION, BLOCKS)}
        group = {key: value for key, value in group.items() if key not in asked}
        given = _options_in(group)
        if named is None:
            self._of_groups.append(0)
            self._requested.append(asked)
            return {**{key: value for key, value in group.items() if key != KEY}, **self.main.options_of(given)}
        place = f"param group {len(self._of_groups)}: "
        check_class(named, place)
        arguments = arguments_of(named, given)
        try:
            inner = UserOptimizer(named, arguments)
        except Exception as error:
            try:
                inner, arguments = UserOptimizer(named, {}, given), {}
            except Exception:
                raise ValueError(f"{place}{named.__name__} cannot be built with its options ({error})") from error
        for option in _SWITCHES:
            if given.get(option) and option not in inner.defaults:
                raise ValueError(f"{place}{inner.name} has no option {option!r}: leave it out")
        _check_options(inner, place)
        foreign = arguments.keys() - inner.defaults.keys()  # of the constructor alone: torch has them in no param group
        kept = {key: value for key, value in group.items() if key not in foreign}
        options = inner.options_of({key: value for key, value in given.items() if key not in foreign})
        self._of_groups.append(self._number_of(inner, place))
        self._requested.append(asked)
        return {**inner.defaults, **kept, **options, KEY: inner.qualified_name}

    def _number_of(self, inner: UserOptimizer, place: str) -> int:
        """Return the number of a class that a param group names; add it if it is new. ``place``: begins each error."""
        for number, known in enumerate(self._all):
            if known.optimizer_class is inner.optimizer_class:
                different = different_argument(inner.optimizer_class, known.arguments, inner.arguments)
                if different is None:
                    known.note_options(inner)
                    return number
                raise ValueError(
                    f"{place}{different} of {inner.name} is another one than for the other parameters of that class. "
                    "It acts in the constructor of the class, which is called once: give it the same value for all "
                    "parameters of the class"
                )
            if known.qualified_name == inner.qualified_name:
                raise ValueError(
                    f"{place}two classes have the name {inner.qualified_name}, by which state dicts and checkpoints "
                    "know them: rename one"
                )
        self._all.append(inner)
        return len(self._all) - 1

    def drop_foreign(self, completed: Options, given: Options) -> None:
        """Drop the options that torch has added to a completed group, but its own class does not have."""
        if KEY in completed:
            own = next(inner for inner in self._all if inner.qualified_name == completed[KEY])
            for key in self.main.defaults.keys() - own.defaults.keys() - (given.keys() - {PARTITION, BLOCKS}):
                del completed[key]

    def step(
        self, updates: Sequence[BucketUpdate], groups: Sequence[Options], call: Call = unhooked_step
    ) -> dict[int, Options]:
        """Step the buckets of each class. Arguments and result are those of `UserOptimizer.step`, for all groups."""
        changed: dict[int, Options] = {}
        for number, inner in enumerate(self._all):
            mine = [update for update in updates if update.optimizer_class == number]
            if mine:
                changed |= inner.step(mine, self.groups_of(number, groups), call)
        return changed


def _options_in(group: Options) -> Options:
    """Return the options in a param group as a user gave it."""
    return {key: value for key, value in group.items() if key not in (*NO_OPTIONS, PARTITION, BLOCKS)}


def _check_options(inner: UserOptimizer, place: str = "") -> None:
    """Raise `ValueError` if a class has an option that the library takes for its own. ``place``: begins the error."""
    if KEY in inner.defaults:
        raise ValueError(
            f"{place}{inner.name} has an option {KEY!r}, which in a param group is the name of the group's class: give "
            "the option another name"
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
