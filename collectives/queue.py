"""Launches buckets strictly in layout order, however they become ready, and bounds how many are in flight.

    ready:     2   0       1          end
    launched:      0       1 2        3 ...        never 2 before 0 and 1
    in flight:     at most `limit`; launching one more waits for the oldest, or passes it on (`StagedWork`)
    passed on:     at most `behind`; passing on one more waits for the oldest

Every rank launches the same buckets in the same order, so that collectives match. The order in which they become ready
may differ between ranks.

Knows: the order of buckets. Does not know: what a launch does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .messages import Work, pass_on


class BucketQueue:
    """Launches the collectives of buckets in a fixed order, round by round. Each rank has one, with the same order."""

    def __init__(self, launch: Callable[[int], Work], limit: int, behind: int = 0) -> None:
        """``launch``: starts the collective of a bucket, given by its index, and returns its work. ``limit``: the most
        collectives that hold their input, at least 1, else `ValueError`. ``behind``: the most collectives that are
        passed on and not complete; 0: none is passed on."""
        if limit < 1:
            raise ValueError(f"at least one bucket must be allowed in flight, not {limit}")
        self._launch, self._limit, self._behind = launch, limit, behind
        self._order: tuple[int, ...] = ()
        self._next = 0
        self._ready: set[int] = set()
        self._flying: deque[Work] = deque()
        self._passed_on: deque[Work] = deque()

    @property
    def done(self) -> bool:
        """True if every bucket of the round was launched."""
        return self._next == len(self._order)

    def begin_round(self, order: Sequence[int]) -> None:
        """Begin a round over the buckets in ``order``. Raises `RuntimeError` if buckets of the last one remain."""
        if not self.done:
            raise RuntimeError("a round of buckets was begun before the last one was complete")
        self._order, self._next, self._ready = tuple(order), 0, set()

    def ready(self, bucket: int) -> None:
        """Mark a bucket as ready. It is launched as soon as all buckets before it are."""
        self._ready.add(bucket)
        while not self.done and self._order[self._next] in self._ready:
            self._start()

    def finish(self) -> None:
        """Launch the rest of the round, ready or not, and wait for everything."""
        while not self.done:
            self._start()
        self.drain()

    def drain(self) -> None:
        """Wait for all launched collectives."""
        while self._flying:
            self._land()
        while self._passed_on:
            self._complete()

    def abandon(self) -> None:
        """Forget the round, after a failure that makes waiting useless."""
        self._order, self._next = (), 0
        self._flying.clear()
        self._passed_on.clear()

    def _land(self) -> None:
        """Pass on the oldest collective that holds its input. Without `behind`, complete it."""
        while self._behind and len(self._passed_on) >= self._behind:
            self._complete()
        if self._behind:
            pass_on(self._flying[0])
            self._passed_on.append(self._flying[0])  # both again after an interrupt: a second wait does nothing
            self._flying.popleft()
        else:
            self._flying[0].wait()
            self._flying.popleft()

    def _complete(self) -> None:
        self._passed_on[0].wait()
        self._passed_on.popleft()

    def _start(self) -> None:
        while len(self._flying) >= self._limit:
            self._land()
        bucket = self._order[self._next]
        self._next += 1
        self._flying.append(self._launch(bucket))
