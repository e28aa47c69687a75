"""The runs of an interval: neighbouring pieces that an optimizer's class steps as one parameter. And how the states of
pieces, each stepped by itself, form those of the whole parameter: of pieces that consist of blocks of elements, and of
the blocks of a stack.

Knows: pieces, param groups, which parameters have no dimensions, what equal states are. Does not know: ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .bits import row_major_stride
from .grain import WHOLE, Grain
from .layout import ParameterSpec, Piece, Pieces, Slot
from .parameter_specs import flattened, parts_of
from .statetree import rebuilt

CUT = 1 << 16


def in_blocks(pieces: Sequence[Piece], slots: Sequence[Slot], grains: Sequence[Grain]) -> Pieces:
    """Return the pieces, those of stacks matrix by matrix. ``grains``: of each slot."""
    if not any(grain.stack for grain in grains):
        return Pieces(pieces)
    found = list[Piece]()
    for piece in pieces:
        begins = (slots[piece.slot].offset + begin for begin in grains[piece.slot].begins())
        within = [piece.begin, *(begin for begin in begins if piece.begin < begin < piece.end), piece.end]
        found += [Piece(piece.slot, begin, end) for begin, end in itertools.pairwise(within)]
    return Pieces(found)


def stepped_shape(spec: ParameterSpec, begin: int, numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides in which a class steps ``numel`` elements of a parameter from ``begin`` on.

    A parameter without dimensions keeps that shape: torch promotes dtypes as for numbers."""
    if spec.grain.stack:
        shape = spec.grain.stack[spec.grain.number(begin)]
        return shape, row_major_stride(shape)
    return (spec.shape, spec.stride) if spec.grain == WHOLE or not spec.shape else ((numel,), (1,))


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
    """How a tensor of a state is divided, if its parameter is cut between blocks of elements.

    Attributes:
        per: the elements of the parameter for each of its values.
        shaped: whether that of a whole parameter has its shape. Else it is divided along its first dimension.
    """

    per: int
    shaped: bool

    def join(self, values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Return the whole value of a parameter of this ``shape``, given those of its pieces."""
        return torch.cat([v.reshape(-1) for v in values]).view(*shape) if self.shaped else torch.cat([*values])

    def part(self, value: Tensor, begin: int, end: int, numel: int) -> Tensor:
        """Return the value of the elements ``[begin, end)`` of ``numel``, given that of all. It may share memory."""
        last = value.numel() if end == numel else end // self.per
        flat = value.reshape(-1)[begin // self.per : last]
        return flat if self.shaped else flat.view(-1, *value.shape[1:])

    def whole_shape(self, value: Tensor, numel: int, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of the whole value, given that of a piece of ``numel`` elements."""
        if self.shaped:
            return shape
        added = (-(-math.prod(shape) // self.per) - value.numel()) // math.prod(value.shape[1:])
        return (value.shape[0] + added, *value.shape[1:])  # the other pieces consist of whole blocks

    def fits(self, value: Tensor, numel: int) -> bool:
        """Return whether a whole value may be that of a parameter of ``numel`` elements."""
        return value.numel() == -(-numel // self.per)

    def before(self, value: Tensor, first: int) -> int:
        """Return how many elements the whole value has before that of the piece that begins at element ``first``."""
        return first // self.per


@dataclass(frozen=True)
class StackRule:
    """As `BlockRule`, of a parameter that is stepped block by block: states as large as a block are joined to the
    parameter's shape, and others are stacked.

    Attributes:
        shape: of the parameter.
        grain: of the parameter.
    """

    shape: tuple[int, ...]
    grain: Grain

    def join(self, values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        if all(tuple(value.shape) == block for value, block in zip(values, self.grain.stack, strict=True)):
            return torch.cat([value.reshape(-1) for value in values]).view(*shape)
        return torch.stack([*values])

    def part(self, value: Tensor, begin: int, end: int, numel: int) -> Tensor:
        block = self.grain.number(begin)
        return value.reshape(-1)[begin:end].view(self.grain.stack[block]) if self._is_whole(value) else value[block]

    def whole_shape(self, value: Tensor, numel: int, shape: Sequence[int]) -> Sequence[int]:
        return shape if tuple(value.shape) in self.grain.stack else (len(self.grain.stack), *value.shape)

    def fits(self, value: Tensor, numel: int) -> bool:
        return self._is_whole(value) or (value.dim() > 0 and len(value) == len(self.grain.stack))

    def before(self, value: Tensor, first: int) -> int:
        if tuple(value.shape) in self.grain.stack:
            return first
        return self.grain.number(first) * value.numel()

    def _is_whole(self, value: Tensor) -> bool:
        return tuple(value.shape) == self.shape


# By the state's name, "state" or "state.tensor inside it". Other states are not divided.
Rules = Mapping[str, BlockRule | StackRule]


def merged(rules: Mapping[str, BlockRule], more: Mapping[str, BlockRule]) -> dict[str, BlockRule]:
    """Return the rules of both. Raises `ValueError` if a state has a value for other numbers of elements in each."""
    for name, rule in more.items():
        if name in rules and rules[name].per != rule.per:
            raise ValueError(f"its state {name!r} has a value for {rules[name].per} elements, and for {rule.per}")
    # a state that always is a vector has the shape of a parameter that is one, too
    shaped = {name for name, rule in (*rules.items(), *more.items()) if not rule.shaped}
    return {name: replace(rule, shaped=name not in shaped) for name, rule in (*rules.items(), *more.items())}


def joined(pieces: Sequence[Mapping[str, Any]], shape: Sequence[int], rules: Rules) -> dict[str, Any]:
    """Return the states of a parameter of this ``shape``, given those of all its ``pieces``, in order."""

    def whole(values: Sequence[Any], name: str) -> Any:
        inner, facts = flattened(values[0]) if isinstance(values[0], Tensor) else ((), None)
        if inner:
            parts = {key: whole([getattr(value, key) for value in values], f"{name}.{key}") for key in inner}
            return _of_shape(values[0], parts, facts, shape)
        return rules[name].join(values, shape) if name in rules else values[0]

    return {name: whole([piece[name] for piece in pieces], name) for name in pieces[0]}


def part_of(states: Mapping[str, Any], place: slice, numel: int, rules: Rules) -> dict[str, Any]:
    """Return the states of some elements of a parameter of ``numel`` elements, given those of the whole: the inverse of
    `joined`. They may share memory with those."""

    def part(value: Any, name: str) -> Any:
        inner, facts = flattened(value) if isinstance(value, Tensor) else ((), None)
        if inner:
            parts = {key: part(getattr(value, key), f"{name}.{key}") for key in inner}
            return _of_shape(value, parts, facts, (place.stop - place.start,))
        return rules[name].part(value, place.start, place.stop, numel) if name in rules else value

    return {name: part(value, name) for name, value in states.items()}


def whole_like(states: Mapping[str, Any], numel: int, shape: Sequence[int], rules: Rules) -> dict[str, Any]:
    """Return states like those of a parameter of this ``shape``, given those of a piece of ``numel`` elements. Tensors
    that are divided are empty, on the CPU."""

    def whole(value: Any, name: str) -> Any:
        inner, facts = flattened(value) if isinstance(value, Tensor) else ((), None)
        if inner:
            parts = {key: whole(getattr(value, key), f"{name}.{key}") for key in inner}
            return _of_shape(value, parts, facts, shape)
        if name not in rules:
            return value
        return torch.empty(tuple(rules[name].whole_shape(value, numel, shape)), dtype=value.dtype, device="cpu")

    return {name: whole(value, name) for name, value in states.items()}


def misfit(states: Mapping[str, Any], numel: int, rules: Rules) -> str | None:
    """Return the name of a divided tensor that is not that of a parameter of ``numel`` elements; None if all are."""
    for name, value in states.items():
        inner, _ = flattened(value) if isinstance(value, Tensor) else ((), None)
        found = misfit({f"{name}.{key}": getattr(value, key) for key in inner}, numel, rules)
        if found is not None:
            return found
        if name in rules and not (isinstance(value, Tensor) and rules[name].fits(value, numel)):
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


def may_lie_flat(value: Tensor) -> bool:
    """Return whether a state of a whole parameter may be a view of a flat tensor, if it is as large as the parameter.

    Flat states have the dtype of the weights, to which a load from a dict casts them, as torch does. Integers, as of
    8-bit states, must not be cast, and a subclass has more than its elements.
    """
    return type(value) in (Tensor, torch.nn.Parameter) and value.is_floating_point()


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Return True for a state that is as large as the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def lies_flat(name: str, value: Any, spec: ParameterSpec, elementwise: Mapping[int, frozenset[str]]) -> bool:
    """Return whether a saved state goes into the flat tensor of its bucket. ``value`` is a tensor, or None.

    ``elementwise``: the names of the states that are as large as their parameter, by the number of the class. A state
    of a parameter with one owner may have another shape.
    """
    return (
        name in elementwise.get(spec.optimizer_class, ())
        and value is not None
        and (not spec.grain.alone or (tuple(value.shape) == spec.shape and may_lie_flat(value)))
    )
