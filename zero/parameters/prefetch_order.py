"""Which unit will probably be needed next."""

from __future__ import annotations

import torch


class PrefetchOrder:
    """In which order units are used, as far as the last time tells. What it says decides when a gather begins, never
    what is right; it is equal on all ranks, since they enter the same units."""

    def __init__(self, units: int) -> None:
        self._forward = list(range(1, units))  # of the last forward of the root; at first a guess
        self._position = 0
        self._path: list[int] = []  # forwards since the last backward or step
        self._closed = False
        self._back: list[int] = []

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._position = 0

    def close(self) -> None:
        """A backward or a step: the next forward begins another path."""
        self._closed = True

    def begin_backward(self) -> None:
        self._back = self._path[::-1]
        self.close()

    def forward(self, unit: int) -> int | None:
        """A forward comes to ``unit``; returns the one that will probably follow."""
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
        """A backward comes to ``unit``; returns the one that will probably follow."""
        if unit not in self._back:
            return None
        del self._back[: self._back.index(unit) + 1]
        return next((other for other in self._back if other != unit), None)
