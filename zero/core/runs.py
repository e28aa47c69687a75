"""The runs of an interval: neighbouring pieces that an optimizer's class steps as one parameter. And how the states of
pieces, each stepped by itself, form those of the whole parameter, if they have values for blocks of elements.

Knows: pieces, param groups, which parameters have no dimensions, what equal states are. Does not know: ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import Piece
from .parameter_specs import flattened, parts_of
from .statetree import rebuilt

CUT = 1 << 16


def runs(pieces: Sequence[Piece], present: Sequence[int], joins: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Yield (first piece, last piece + 1) of each run.

    Args:
        pieces: of the interval, in order.
        present: whether each of them is stepped, 0 or 1.
        joins: returns whether a piece, given by its index, continues the run of the one before it.
    """
    index = 0
    while index < len(pieces):
        last = index + 1
        if present[index]:
            while last < len(pieces) and present[last] and joins(last):
                last += 1
            yield index, last
        index = last


def adjoins(pieces: Sequence[Piece], groups: Sequence[int], scalars: Sequence[bool], index: int) -> bool:
    """Return whether a piece may continue the run of the one before it, if their states are equal.

    Args:
        pieces: of the interval, in order.
        groups: the number of each piece's param group.
        scalars: of each slot of the bucket, whether its parameter has no dimensions.
        index: of the piece.
    """
    before, piece = pieces[index - 1], pieces[index]
    if scalars[piece.slot] or scalars[before.slot]:
        return False
    return before.end == piece.begin and groups[index - 1] == groups[index]


def parts(begin: int, end: int, size: int | None) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each part of a run. ``size``: elements of a part; None: the run is not cut."""
    begins = part_begins(begin, end, size)
    for low in begins:
        yield low, min(low + begins.step, end)


def part_begins(begin: int, end: int, size: int | None) -> range:
    """Return the begins of the parts of a run. A run without elements has one part."""
    return range(begin, max(end, begin + 1), max(1, end - begin) if size is None else size)


@dataclass(frozen=True)
class PieceState:
    """The state of a piece: the names of its flat tensors, and its scalars."""

    elementwise: tuple[str, ...]
    scalars: Mapping[str, Any]

    def same(self, other: PieceState | None) -> bool:
        return other is not None and self.elementwise == other.elementwise and _plain(self) == _plain(other)


def _plain(state: PieceState) -> dict[str, Any]:
    # host synchronisation: of step counts on a device, only if other parameters were used than before
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in state.scalars.items()}


@dataclass(frozen=True)
class BlockRule:
    """How a tensor of a state is divided where its parameter is.

    Attributes:
        per: the elements of the parameter for each of its values.
        shaped: whether that of a whole parameter has its shape. Else it is divided along its first dimension.
    """

    per: int
    shaped: bool


Rules = Mapping[str, BlockRule]  # by the state's name, "state" or "state.tensor inside it"; others are not divided


def joined(pieces: Sequence[Mapping[str, Any]], shape: Sequence[int], rules: Rules) -> dict[str, Any]:
    """Return the states of a parameter of this ``shape``, given those of all its ``pieces``, in order."""

    def whole(values: Sequence[Any], name: str) -> Any:
        inner, facts = flattened(values[0]) if isinstance(values[0], Tensor) else ((), None)
        if inner:
            parts = {key: whole([getattr(value, key) for value in values], f"{name}.{key}") for key in inner}
            return _of_shape(values[0], parts, facts, shape)
        if name not in rules:
            return values[0]
        return torch.cat([v.reshape(-1) for v in values]).view(shape) if rules[name].shaped else torch.cat([*values])

    return {name: whole([piece[name] for piece in pieces], name) for name in pieces[0]}


def part_of(states: Mapping[str, Any], begin: int, end: int, numel: int, rules: Rules) -> dict[str, Any]:
    """Return the states of the elements ``[begin, end)`` of a parameter of ``numel`` elements, given those of the
    whole: the inverse of `joined`. They may share memory with those."""

    def part(value: Any, name: str) -> Any:
        inner, facts = flattened(value) if isinstance(value, Tensor) else ((), None)
        if inner:
            parts = {key: part(getattr(value, key), f"{name}.{key}") for key in inner}
            return _of_shape(value, parts, facts, (end - begin,))
        if name not in rules:
            return value
        rule = rules[name]
        last = value.numel() if end == numel else end // rule.per
        flat = value.reshape(-1)[begin // rule.per : last]
        return flat if rule.shaped else flat.view(-1, *value.shape[1:])

    return {name: part(value, name) for name, value in states.items()}


def whole_like(states: Mapping[str, Any], numel: int, shape: Sequence[int], rules: Rules) -> dict[str, Any]:
    """Return states like those of a parameter of this ``shape``, given those of a piece of ``numel`` elements. Tensors
    that are divided are empty, on the CPU."""
    size = math.prod(shape)

    def whole(value: Any, name: str) -> Any:
        inner, facts = flattened(value) if isinstance(value, Tensor) else ((), None)
        if inner:
            parts = {key: whole(getattr(value, key), f"{name}.{key}") for key in inner}
            return _of_shape(value, parts, facts, shape)
        if name not in rules:
            return value
        of_all = shape if rules[name].shaped else (value.shape[0] + _added(name, value), *value.shape[1:])
        return torch.empty(of_all, dtype=value.dtype, device="cpu")

    def _added(name: str, value: Tensor) -> int:  # the other pieces consist of whole blocks
        return (-(-size // rules[name].per) - value.numel()) // math.prod(value.shape[1:])

    return {name: whole(value, name) for name, value in states.items()}


def misfit(states: Mapping[str, Any], numel: int, rules: Rules) -> str | None:
    """Return the name of a divided tensor that is not that of a parameter of ``numel`` elements; None if all are."""
    for name, value in states.items():
        inner, _ = flattened(value) if isinstance(value, Tensor) else ((), None)
        found = misfit({f"{name}.{key}": getattr(value, key) for key in inner}, numel, rules)
        if found is not None:
            return found
        if name in rules and (not isinstance(value, Tensor) or value.numel() != -(-numel // rules[name].per)):
            return name
    return None


def _of_shape(like: Any, parts: dict[str, Any], facts: Any, shape: Sequence[int]) -> Any:
    """Return a tensor subclass as ``like``, of another shape, that wraps ``parts``."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return type(like).__tensor_unflatten__(parts, _renewed(facts, like.shape, shape), torch.Size(shape), stride)


def _renewed(facts: Any, old: Sequence[int], new: Sequence[int]) -> Any:
    """Return the metadata of a subclass with another shape, wherever it has the ``old`` one."""
    if isinstance(facts, (list, tuple)):
        if tuple(facts) == tuple(old):
            return type(facts)(new)
        return type(facts)([_renewed(each, old, new) for each in facts])
    return {key: _renewed(each, old, new) for key, each in facts.items()} if isinstance(facts, dict) else facts


def copied_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of states. A tensor subclass need not know how to copy itself."""
    return {
        name: rebuilt(value, copy.deepcopy) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in states.items()
    }


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with ``change`` of each of its plain tensors."""
    if isinstance(value, Tensor):
        return rebuilt(value, change)
    if isinstance(value, dict):
        return type(value)((key, with_tensors(inside, change)) for key, inside in value.items())
    return type(value)(with_tensors(inside, change) for inside in value) if type(value) in (list, tuple) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of a state: in lists, tuples and dicts, and those that a subclass wraps."""
    if isinstance(value, Tensor):
        yield from parts_of(value)
    elif isinstance(value, (list, tuple, dict)):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inside)
