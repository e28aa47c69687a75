"""Calls that may never return, made in a thread of their own, and the end of a process while one is under way.

Knows: threads. Does not know: what is called.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")
PATIENCE = 5.0  # seconds for which a process waits at its end: torch ends it if a thread is inside a call then


class SlowError(OSError):
    """A call has not returned in time, or an earlier one has not returned yet."""


class _Made:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self.done = call, threading.Event()
        self.result: object = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class Caller:
    """Makes one call at a time, each with a limit."""

    def __init__(self) -> None:
        self._under_way: _Made | None = None

    def call(self, limit: float, call: Callable[[], T]) -> T:
        """Return the result of a call. Raise its error, or `SlowError`; it is then left to itself, and others are slow
        until it has returned."""
        if self._under_way is not None and not self._under_way.done.is_set():
            raise SlowError("an earlier call has not returned")
        made = _Made(call)
        self._under_way = made
        LEFT.start(made)
        if not made.done.wait(limit):
            raise SlowError(f"no answer in {limit:g} s")
        self._under_way = None
        if made.error is not None:
            raise made.error
        return cast("T", made.result)


class _Left:
    """The threads of calls under way in this process."""

    def __init__(self) -> None:
        self._threads = weakref.WeakSet[threading.Thread]()

    def start(self, call: _Made) -> None:
        thread = threading.Thread(target=call.run, name="zero: a call of the sentinel", daemon=True)
        self._threads.add(thread)
        thread.start()

    def alone(self, call: Callable[[], object]) -> None:
        """Make a call that nobody waits for."""
        self.start(_Made(call))

    def finish(self, patience: float = PATIENCE) -> None:
        """Wait for the calls under way, at the end of the process."""
        end = time.monotonic() + patience
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))


LEFT = _Left()
