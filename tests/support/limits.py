"""The seconds in which anything that must end has ended, scaled by the speed of this machine at import.

A test asks for an order by an event, and for a limit by a clock of its own or by a tenth of a second. What remains is
the bound of a wait that fails a test: `BOUND`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_IDLE = 0.009  # seconds of `_work` on an idle processor of the machine on which the bounds were chosen


def _work() -> float:
    """Return the seconds that a fixed piece of work takes now."""
    begin = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number & 7
    return time.perf_counter() - begin


BOUND = 10.0 * min(max(_work() / _IDLE, 1.0), 4.0)
"""Seconds for what must end at once. An error that comes later was brought by a time limit, not by a message."""

PATIENT = 6 * BOUND
"""Seconds of a time limit that must not be what ends a test."""


@contextmanager
def at_once() -> Iterator[None]:
    """Fail if the block takes longer than what must end at once: a time limit ended it then, and not a message."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < BOUND, "a time limit ended it"
