"""A prediction of the unit that will be needed next."""

from __future__ import annotations

import torch


class PrefetchOrder:
    """The order in which units were used last, as the prediction for the next time. Unit 0 is the root's own.

    The prediction decides only when a gather begins, never a result. It is equal on all ranks, since they enter the
    same units.
    """

    def __init__(self, units: int) -> None:
        self._forward = list(range(1, units))  # units in the last forward of the root; at first a guess
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
        self._back = self._path[::-1]
        self.close()

    def forward(self, unit: int) -> int | None:
        """Note that a forward enters ``unit``; return the unit that will probably follow, or None."""
        position, self._position = self._position, self._position + 1
        if self._closed:
            self._path, self._closed = [], False
        if torch.is_grad_enabled():
            self._path.append(unit)
        known = self._forward[position : position + 2]
        if known[:1] == [unit]:
            return known[1] if len(known) > 1 else None
        self._forward[position:] = [unit]
        return None

    def backward(self, unit: int) -> int | None:
        """Note that a backward reaches ``unit``; return the unit that will probably follow, or None."""
        if unit not in self._back:
            return None
        del self._back[: self._back.index(unit) + 1]
        return next((other for other in self._back if other != unit), None)
