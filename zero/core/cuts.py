"""The cuts of a bucket: which interval of its elements each rank owns.

Knows: numbers. Does not know: slots, dtypes, running ranks. Nothing here grows with the number of ranks: a bound is
computed where it is asked for.
"""

from __future__ import annotations

import bisect
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

CUT_EVERY = 1 << 12  # elements: a multiple of the blocks of 8-bit and 4-bit classes, and the least that they quantize


class Cuts(Sequence[int]):
    """The rule of cuts. Rank r owns the elements ``[bound(r), bound(r + 1))``.

    As a sequence, it is the W + 1 bounds, ascending from 0 to the number of elements: the ``bounds`` of a `Collective`.
    """

    world_size: int

    @abstractmethod
    def bound(self, rank: int) -> int:
        """Return the first element of ``rank``, which is 0 to W. That of W is the number of elements."""

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the begin and the end of the elements of ``rank``."""
        return self.bound(rank), self.bound(rank + 1)

    def largest(self) -> int:
        """Return the most elements that one rank owns."""
        return max(self.bound(rank + 1) - self.bound(rank) for rank in range(self.world_size))

    def __len__(self) -> int:
        return self.world_size + 1

    def __iter__(self) -> Iterator[int]:
        return map(self.bound, range(self.world_size + 1))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        ranks = range(self.world_size + 1)[index]
        return self.bound(ranks) if isinstance(ranks, int) else tuple(map(self.bound, ranks))


@dataclass(frozen=True)
class EvenCuts(Cuts):
    """Nearly equal intervals of ``numel`` elements, at multiples of ``align``. ``numel`` is one."""

    numel: int
    world_size: int
    align: int

    def largest(self) -> int:
        return self.align * -(-(self.numel // self.align) // self.world_size)

    def bound(self, rank: int) -> int:
        return self.align * (self.numel // self.align * rank // self.world_size)


@dataclass(frozen=True)
class OwnerCuts(Cuts):
    """Cuts between whole things that lie in the order of their owners.

    ``owners``: the ranks that own one, ascending. ``begins``: the first element of each of them. The other ranks own
    nothing.
    """

    numel: int
    world_size: int
    owners: tuple[int, ...]
    begins: tuple[int, ...]

    def largest(self) -> int:
        return max(end - begin for begin, end in itertools.pairwise((*self.begins, self.numel)))

    def bound(self, rank: int) -> int:
        place = bisect.bisect_left(self.owners, rank)
        return self.begins[place] if place < len(self.begins) else self.numel


@dataclass(frozen=True)
class BlockCuts(Cuts):
    """Cuts between slots, and within a slot at multiples of `CUT_EVERY` elements from its start.

    The last piece of a slot has at least so many elements, too. ``offsets``, ``sizes``: the first element of each slot,
    ascending from 0, and how many it has.
    """

    numel: int
    world_size: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def bound(self, rank: int) -> int:
        if rank >= self.world_size:
            return self.numel
        even = self.numel * rank // self.world_size
        slot = bisect.bisect_right(self.offsets, even) - 1
        last = max(self.sizes[slot] // CUT_EVERY - 1, 0)
        return self.offsets[slot] + CUT_EVERY * min((even - self.offsets[slot]) // CUT_EVERY, last)


@dataclass(frozen=True)
class PartOfCuts(Cuts):
    """The cuts of the elements ``[begin, end)`` of ``whole``, counted from ``begin``. Each element keeps its owner."""

    whole: Cuts
    begin: int
    end: int

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self.whole.world_size

    def bound(self, rank: int) -> int:
        return min(max(self.whole.bound(rank), self.begin), self.end) - self.begin
