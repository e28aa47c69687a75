"""The runs of an interval: neighbouring pieces that an optimizer's class steps as one parameter.

Knows: pieces, param groups, which parameters have no dimensions, what equal states are. Does not know: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .layout import Piece

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
