"""Finds the units of a module, and what an optimizer ignores of it. A unit is gathered as a whole for its forward.

Knows: modules. Does not know: ranks, memory, hooks.

    model                      unit 0: the root's rest (embedding, norm, head, parameters that several units share)
      embedding
      blocks   ModuleList
        0                      unit 1
        1                      unit 2
      norm, head

Without a predicate, units are the children of the outermost `ModuleList`s and `Sequential`s. A predicate may choose
modules that contain each other: a unit then has the parameters that no unit inside it has.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .conflicts import IGNORED
from .parameter_specs import (
    call_given,
    check_not_inference,
    child_name,
    is_laid_out,
    named_children,
    named_parts,
    named_tensors,
)

Predicate = Callable[[nn.Module], bool]
Given = nn.Module | Tensor | Iterable[nn.Module | Tensor]
Around = tuple[frozenset[int], ...]
_Parts = dict[int, tuple[str, nn.Module]]  # names and modules, by id
ROOT = 0  # the number of the root's rest


class Ignored:
    """The parameters and buffers of a model that an optimizer leaves to others, by identity: it neither shards nor
    synchronises them. An ignored module has all of its own in it."""

    def __init__(self, given: Given | None = None, module: nn.Module | None = None) -> None:
        """``given``: parameters and modules, or one; ``module``: the model that they are parts of.

        Raises:
            TypeError: an entry is neither a parameter nor a module.
            ValueError: there is no module, or a parameter is no part of it.
        """
        self._tensors: dict[int, Tensor] = {}  # the tensors themselves, so that no other one gets the id
        self._modules: dict[int, nn.Module] = {}
        if isinstance(given, nn.Module | Tensor | str) or not isinstance(given, Iterable | None):
            given = [given]
        entries: list[Any] = list(given or ())
        if entries and module is None:
            raise ValueError(IGNORED.text())
        known = set() if module is None else {id(each) for each in (*module.parameters(), *module.buffers())}
        for number, entry in enumerate(entries):
            if isinstance(entry, nn.Module):
                self._modules |= {id(part): part for part in entry.modules()}
            elif not isinstance(entry, Tensor):
                raise TypeError(f"ignored[{number}] is a {type(entry).__name__}, neither a parameter nor a module")
            for tensor in (*entry.parameters(), *entry.buffers()) if isinstance(entry, nn.Module) else (entry,):
                if id(tensor) not in known:
                    raise ValueError(f"ignored[{number}] is no part of the optimizer's module: leave it out")
                self._tensors[id(tensor)] = tensor

    def __contains__(self, tensor: object) -> bool:
        """Also of a tensor that an ignored module has registered since, as by ``self.seen = self.seen + 1``."""
        return id(tensor) in self._tensors or any(
            tensor is held
            for part in self._modules.values()
            for held in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        )

    def has_module(self, part: nn.Module) -> bool:
        """Return whether a module is ignored by itself, or as a part of such a module."""
        return id(part) in self._modules

    def covers(self, part: nn.Module) -> bool:
        """Return whether a module is ignored: by itself, or because it has parameters and all of them are."""
        if not self._tensors:
            return False
        parameters = list(part.parameters())
        return self.has_module(part) or (bool(parameters) and all(each in self for each in parameters))


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module whose forward needs units.

    ``needs`` has the module's own unit, and those around it (the root's rest, say) if the forward uses their
    parameters. It is empty if only modules below this one need units.
    """

    name: str
    module: nn.Module
    needs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a module.

    Attributes:
        names: the name of each unit; ROOT is first.
        parameters: the parameters of each unit, in order of registration.
        entries: the modules whose forwards need units.
        around: the units whose modules contain that of each unit, and the unit itself; never ROOT.
    """

    names: tuple[str, ...]
    parameters: tuple[tuple[Tensor, ...], ...]
    entries: tuple[UnitModule, ...]
    around: Around

    def numbers(self) -> dict[int, int]:
        """Return id of a parameter -> its unit. Valid as long as the parameters live."""
        return {id(p): number for number, members in enumerate(self.parameters) for p in members}


@dataclass(frozen=True)
class UnitSchedule:
    """Which units that are gathered may be whole at the same time.

    Attributes:
        around: see `Units`; () if no unit lies inside another.
        kept: those that stay whole between a forward and its backward, beside those of `whole_when_a_backward_begins`.
        depth: how many units are gathered ahead of their use.
    """

    around: Around = ()
    kept: frozenset[int] = frozenset()
    depth: int = 1

    def _chain(self, unit: int) -> frozenset[int]:
        return self.around[unit] if self.around else frozenset({unit})

    def at_once(self, sizes: Mapping[int, int]) -> int:
        """Return the most bytes of units that are whole at once. ``sizes``: the bytes of each unit.

        They are the root's rest, the units that are kept, one unit with those around it, and the largest others.
        """
        moving = sorted((unit for unit in sizes if unit != ROOT and unit not in self.kept), key=lambda u: -sizes[u])
        most = 0
        for unit in moving:
            chain = [other for other in self._chain(unit) if other in sizes and other not in self.kept]
            ahead = islice((other for other in moving if other not in chain), self.depth)
            most = max(most, sum(sizes[other] for other in (*chain, *ahead)))
        return sizes.get(ROOT, 0) + sum(sizes.get(unit, 0) for unit in self.kept) + most

    def whole_when_a_backward_begins(self, units: Iterable[int]) -> set[int]:
        """Return which of these units are whole: the root's rest, the last one with those around it, the kept ones."""
        found = set(units)
        last = max(found, default=ROOT)
        return found & {ROOT, *self.kept, *(() if last == ROOT else self._chain(last))}


ONE_AHEAD = UnitSchedule()


def find_units(root: nn.Module, predicate: Predicate | None = None, ignored: Ignored | None = None) -> Units:
    """Return the units of ``root``, without what is ``ignored``.

    Raises `ValueError` if a predicate matches no module, or one without a forward.
    """
    left = Ignored() if ignored is None else ignored
    if predicate is not None and (isinstance(predicate, type) or not callable(predicate)):
        raise TypeError(
            f"units must be a function of a module that returns a bool, not {predicate!r}: for a class, "
            "lambda module: isinstance(module, Block)"
        )
    if predicate is not None:
        found = _matching(root, predicate, left)
    else:
        found = list(callable_children(root, "", _is_list(root), left))
    chosen = list({id(module): (name, module) for name, module in reversed(found)}.values())[::-1]
    numbers = {id(module): number for number, (_, module) in enumerate(chosen, start=1)}
    parts = [
        {id(part): (below, part) for below, part in _outside(module, name, numbers)}
        for name, module in (("", root), *chosen)
    ]
    around = _around([module for _, module in chosen], numbers)
    users: dict[int, set[int]] = {}
    for number, of_unit in enumerate(parts):
        for parameter in _own(of_unit.values(), left):
            users.setdefault(id(parameter), set()).add(number)
    homes = {key: _home(whose, around) for key, whose in users.items()}
    members: list[list[Tensor]] = [[] for _ in range(len(chosen) + 1)]
    for parameter in _sharded(root, left):
        members[homes[id(parameter)]].append(parameter)
    entries = [UnitModule("", root, (ROOT,)), *_entries_outside(root, parts[ROOT], numbers, left)]
    for number, (name, module) in enumerate(chosen, start=1):
        elsewhere = {homes[id(parameter)] for parameter in _own(parts[number].values(), left)} - {number}
        entries.append(UnitModule(name, module, (*sorted(elsewhere), number)))
    names = ("the root's rest", *(name for name, _ in chosen))
    return Units(names, tuple(tuple(m) for m in members), tuple(entries), around)


def _around(modules: Sequence[nn.Module], numbers: Mapping[int, int]) -> Around:
    """Return the units around each unit. ``modules``: of all units but ROOT; ``numbers``: of them, by id."""
    found: list[set[int]] = [set() for _ in range(len(modules) + 1)]
    for number, module in enumerate(modules, start=1):
        for part in module.modules():
            if id(part) in numbers:
                found[numbers[id(part)]].add(number)
    return tuple(frozenset(units) for units in found)


def _home(whose: set[int], around: Around) -> int:
    """Return the unit of a parameter that several use: the innermost unit that contains all of them."""
    if len(whose) == 1:
        return next(iter(whose))
    common = frozenset.intersection(*(around[unit] for unit in whose))
    return max(common, key=lambda unit: (len(around[unit]), unit), default=ROOT)


def _entries_outside(
    root: nn.Module, outside: _Parts, numbers: Mapping[int, int], left: Ignored
) -> Iterator[UnitModule]:
    """Yield the modules outside all units whose forwards use the root's rest, or run those of several units."""
    for name, part in outside.values():
        if part is not root and _own([(name, part)], left):
            yield UnitModule(name, part, (ROOT,))
        elif part is not root and has_forward(part) and any(id(below) in numbers for below in part.modules()):
            yield UnitModule(name, part, ())


def kept_units(units: Units, resharded: Predicate | bool) -> frozenset[int]:
    """Return the units that stay whole between a forward and its backward.

    ``resharded``: whether units are resharded after a forward, or a function of a unit's module that says so. Raises
    `TypeError` if this returns neither True nor False.
    """
    if isinstance(resharded, bool):
        return frozenset() if resharded else frozenset(range(ROOT + 1, len(units.names)))
    found = {}
    for entry in units.entries:
        if entry.needs and entry.needs[-1] != ROOT:
            found[entry.needs[-1]] = answer = call_given(
                "reshard_after_forward", resharded, repr(entry.name), entry.module
            )
            if not isinstance(answer, bool):
                raise TypeError(
                    f"reshard_after_forward: the function must return True or False for {entry.name!r}, not "
                    f"{answer!r}; a number of ranks is for all units"
                )
    return frozenset(unit for unit, answer in found.items() if not answer)


def _outside(module: nn.Module, name: str, units: Container[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are reached from ``module`` without entering a unit. A unit may contain them, too."""
    yield name, module
    for below, child in () if is_scripted(module) else named_children(module, name):
        if id(child) not in units:
            yield from _outside(child, below, units)


def _sharded(module: nn.Module, left: Ignored) -> list[Tensor]:
    """Return the sharded parameters of a module: those that are laid out. Their dtypes have a NaN."""
    return [parameter for parameter in module.parameters() if parameter not in left and is_laid_out(parameter)]


def _own(parts: Iterable[tuple[str, nn.Module]], left: Ignored) -> list[Tensor]:
    """Return the sharded parameters that modules, given with their names, have themselves."""
    own = (parameter for _, part in parts for parameter in part.parameters(recurse=is_scripted(part)))
    return [parameter for parameter in own if parameter not in left and is_laid_out(parameter)]


def _matching(root: nn.Module, predicate: Predicate, left: Ignored) -> list[tuple[str, nn.Module]]:
    inside = {id(part) for outer in root.modules() if is_scripted(outer) for part in list(outer.modules())[1:]}
    parts = [(name, module) for name, module in named_parts(root) if module is not root and not left.covers(module)]
    outside = ((name, module) for name, module in parts if id(module) not in inside)
    found = [(name, module) for name, module in outside if call_given("units", predicate, repr(name), module)]
    if not found:
        raise ValueError("units: the predicate matches no module below the root; leave it out for the default")
    for name, module in found:
        if not has_forward(module):
            raise ValueError(f"units: {name!r} is a {type(module).__name__}, which is never called: match its children")
    return found


def callable_children(module: nn.Module, prefix: str, listed: bool, left: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """Yield the callable children of the outermost lists below ``module``, in order of registration."""
    for name, child in () if is_scripted(module) else named_children(module, prefix):
        if not (listed and has_forward(child)):
            yield from callable_children(child, name, listed or _is_list(child), left)
        elif any(True for _ in child.parameters()) and not left.covers(child):
            yield name, child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module was scripted or traced: its forward runs those of its parts without their hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def check_modules(module: nn.Module | None, ignored: Ignored) -> None:
    """Raise `ValueError` naming a part of the module that is a DistributedDataParallel, which reduces gradients itself,
    or a tensor that was made in inference mode, unless it is ``ignored``."""
    for name, part in () if module is None else named_parts(module):
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'!r} is a DistributedDataParallel, which would reduce gradients twice: pass the "
                "model inside it (its .module)"
            )
    for name, tensor in () if module is None else named_tensors(module):
        if tensor not in ignored:
            check_not_inference(tensor, name)


def check_scripted(module: nn.Module | None, borders: Container[int]) -> None:
    """Raise `ValueError` naming a part of a ScriptModule that is a border of precisions. ``borders``: their ids."""
    for name, outer in () if module is None else named_parts(module):
        for below, part in named_parts(outer) if is_scripted(outer) else ():
            if part is not outer and id(part) in borders:
                raise ValueError(
                    f"mixed_precision: {child_name(name, below)!r} has another precision than the ScriptModule around "
                    "it, in which nothing can cast its inputs: give both the same, or do not script it"
                )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward. Containers that only hold modules or parameters have none.

    A module that `torch.compile` returned has its own forward.
    """
    return getattr(getattr(module, "forward", None), "__name__", "") != "_forward_unimplemented"
