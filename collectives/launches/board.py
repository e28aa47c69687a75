"""What the sentinels of several ranks write and read: named values, of which each operation is atomic.

Knows: names and values. Does not know: ranks, or what the values mean. `collectives.backends` has a board of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class Board(Protocol):
    """Operations may raise `ConnectionError` if the board will never be reached again, and other `OSError` or
    `RuntimeError` if it is not reached now.

    ``holder``: the rank whose process keeps the values; None if none does.
    """

    holder: int | None

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return values, all of which were written before."""

    def write(self, name: str, value: bytes) -> None: ...

    def swap(self, name: str, expected: bytes, value: bytes) -> bytes:
        """Write a value if the present one is ``expected``, or empty and never written. Return the one that is there
        then."""

    def count(self, name: str, more: int) -> int:
        """Add to a number, which begins at 0, and return the sum."""


class MemoryBoard:
    """A board of threads."""

    holder: int | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}

    def read(self, names: Sequence[str]) -> list[bytes]:
        with self._lock:
            return [self._values[name] for name in names]

    def write(self, name: str, value: bytes) -> None:
        with self._lock:
            self._values[name] = value

    def swap(self, name: str, expected: bytes, value: bytes) -> bytes:
        with self._lock:
            if self._values.get(name, b"") == expected:
                self._values[name] = value
            return self._values.get(name, b"")

    def count(self, name: str, more: int) -> int:
        with self._lock:
            self._numbers[name] = self._numbers.get(name, 0) + more
            return self._numbers[name]
