"""A prediction of the units that will be needed next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...core.units import Around


class PrefetchOrder:
    """The order in which units were used last, as the prediction for the next time. Unit 0 is the root's own.

    The prediction decides only when a gather begins, never a result. It is equal on all ranks, since they enter the
    same units.
    """

    def __init__(self, around: Around, most: int) -> None:
        """``around``: see `Units`; ``most``: how many units are predicted."""
        self._around, self._most = around, most
        self._forward = list(range(1, len(around)))  # units in the last forward of the root; at first a guess
        self._position = 0
        self._path: list[int] = []  # units entered by forwards since the last backward or step
        self._closed = False
        self._back: list[int] = []  # units that the backward under way has not reached yet

    def begin_forward(self) -> None:
        """Begin a forward of the root."""
        self._position = 0

    def close(self) -> None:
        """Note a backward or a step: the next forward begins another path."""
        self._closed = True

    def begin_backward(self) -> None:
        """Begin a backward. A forward leaves a unit after the units inside it, so a backward reaches it before them."""
        self._back, open_ = [], list[int]()
        for unit in self._path:
            while open_ and open_[-1] not in self._around[unit] - {unit}:
                self._back.append(open_.pop())
            open_.append(unit)
        self._back = [*self._back, *reversed(open_)][::-1]
        self.close()

    def forward(self, unit: int) -> list[int]:
        """Note that a forward enters ``unit``; return the units that will probably follow, the next one first."""
        position, self._position = self._position, self._position + 1
        if self._closed:
            self._path, self._closed = [], False
        if torch.is_grad_enabled():
            self._path.append(unit)
        known = self._forward[position : position + 1 + self._most]
        if known[:1] == [unit]:
            return _others(known, unit)
        self._forward[position:] = [unit]
        return []

    def backward(self, unit: int, here: Sequence[int], expected: list[int]) -> list[int]:
        """Note that a backward reaches ``unit``; return the units that will probably follow, the next one first.

        ``here``: the units that are gathered; those of them that follow are returned, however late they are needed.
        ``expected``: the last prediction. It stays if ``unit`` lies inside another one and was not predicted: a
        checkpoint computes such units anew, in the order of a forward.
        """
        if unit not in self._back:
            return expected if len(self._around[unit]) > 1 else []
        del self._back[: self._back.index(unit) + 1]
        following = _others(self._back, unit)
        return [*following[: self._most], *(other for other in here if other in following[self._most :])]


def _others(units: Iterable[int], unit: int) -> list[int]:
    return [other for other in dict.fromkeys(units) if other != unit]
