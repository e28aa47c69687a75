"""The way of buckets through stages: begun strictly in one order, however they become ready, and bounded in each stage.

    ready:    2   0       1          end
    begun:        0       1 2        3 ...        never 2 before 0 and 1
    stages:   reduce (1) > pass on (2 a replica)     or     reduce (2) > gather the mean (2)
              in brackets the most buckets inside; the oldest leaves when there is no room for another one

Every rank begins the same buckets in the same order, so that collectives match. The order in which they become ready
may differ between ranks.

Knows: the order of buckets, and how many are in each stage. Does not know: what a stage does. `zero plan` runs the same
object with stages that advance a clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class PipelineStage:
    """One stage of one pipeline.

    Attributes:
        limit: the most buckets inside, at least 1. The next one is begun only when there is room.
        begin: begins the work of a bucket, given by its index, and returns it; None instead of a work: the bucket goes
            no further. Without a function the stage goes on with the work of the stage before.
        end: called with the work before the bucket leaves; by default the work's ``wait``.

    After an interrupt ``end`` may be called again, and, but in the first stage, ``begin``, too, which must return the
    same work then.
    """

    limit: float
    begin: Callable[[int], Any] | None = None
    end: Callable[[Any], object] | None = None
    _next: PipelineStage | None = field(default=None, init=False)
    _inside: deque[tuple[int, Any]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` if ``limit`` is less than 1."""
        if self.limit < 1:
            raise ValueError(f"at least one bucket must be allowed in flight, not {self.limit}")

    def _make_room(self) -> None:
        while len(self._inside) >= self.limit:
            self._leave()

    def _enter(self, bucket: int, before: Any) -> None:
        work = before if self.begin is None else self.begin(bucket)
        if work is not None:
            self._inside.append((bucket, work))

    def _leave(self) -> None:
        """End the oldest work, and let its bucket enter the next stage."""
        (bucket, work), later = self._inside[0], self._next
        if later is not None and later.begin is None:
            later._make_room()  # for what `end` lets go on
        if self.end is None:
            work.wait()
        else:
            self.end(work)
        if later is not None:
            if later._inside:
                later._make_room()
            later._enter(bucket, work)
        self._inside.popleft()


class Pipeline:
    """Stages that buckets pass in a fixed order, round by round. Each rank has one, with the same order."""

    def __init__(self, *stages: PipelineStage) -> None:
        """``stages``: at least one, of this pipeline alone; the first one has a function ``begin``."""
        self._stages, self._first = stages, stages[0]
        for stage, later in itertools.pairwise(stages):
            stage._next = later
        self._to_begin: deque[int] = deque()  # the rest of the round
        self._ready: set[int] = set()

    def begin_round(self, order: Iterable[int]) -> None:
        """Begin a round over the buckets in ``order``. Raises `RuntimeError` if buckets of the last one remain."""
        if self._to_begin:
            raise RuntimeError("a round of buckets was begun before the last one was complete")
        self._to_begin, self._ready = deque(order), set()

    def ready(self, bucket: int) -> None:
        """Mark a bucket as ready. It is begun as soon as all buckets before it are."""
        self._ready.add(bucket)
        while self._to_begin and self._to_begin[0] in self._ready:
            self._start()

    def finish(self) -> None:
        """Begin the rest of the round, ready or not, and wait for everything."""
        while self._to_begin:
            self._start()
        self.drain()

    def drain(self, first: int = 0) -> None:
        """Let all buckets leave the stages from number ``first`` on."""
        for stage in self._stages[first:]:
            while stage._inside:
                stage._leave()

    def abandon(self) -> None:
        """Forget the round, after a failure that makes waiting useless."""
        self._to_begin.clear()
        for stage in self._stages:
            stage._inside.clear()

    def _start(self) -> None:
        if self._first._inside:
            self._first._make_room()
        self._first._enter(self._to_begin.popleft(), None)
