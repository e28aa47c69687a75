"""One thread a process that finds out why a rank waits for long, and ends the wait if it is in vain.

    rank 0   its device has waited for launch 57 for the limit .. writes its counts, and reads: they differ ... aborts
    rank 1   has been in a meeting for the limit, behind 56 ..... writes its counts ..... writes the verdict .. aborts

A rank that waits for less uses no store. Of two ranks that differ the later one to write finds the other's counts. Old
counts do no harm: launches in another order stay so. Each rank reads the counts of the first rank among those that
launch the same, and that one reads all. A rank is lost if its connection is closed. One that is silent is late, until
the time limit of the group: it runs the user's code, or one of its threads holds the interpreter.

Knows: counts and keys. Does not know: how a group is aborted.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from ..messages import Kind, describe
from .ledger import History, Launches, Verdict, count, first_difference, mismatch

LOG = logging.getLogger("collectives")
MOST_PAUSE = 0.25  # seconds between two looks
GRACE = 0.5  # seconds at most, or half of the limit, for what other ranks write
ABORT = 20.0  # seconds for an abort
OPEN = "-"  # nothing is written
OUTSIDE, ANY = -1, 1 << 63  # no meeting; a meeting in which no rank catches up


class Status(NamedTuple):
    """Where a rank waits. ``waits``: for the first launch that its device has not ended although a stream waits for it:
    the number, the round, and how many meetings the rank had completed before it; zeros if there is none."""

    launches: History  # without words
    place: str  # in words
    met: int  # meetings that it has completed
    enters: int  # the round of the meeting in which it is, `ANY` or `OUTSIDE`
    waits: tuple[int, int, int]

    def keeps_waiting(self, other: Status) -> bool:
        """Return whether ``other`` waits for a launch that this rank makes behind a meeting alone which ``other`` has
        not completed. In a meeting a rank catches up with launches of later rounds."""
        number, round_, met = other.waits
        return number > count(self.launches) and met <= self.met and round_ <= self.enters


def difference(one: Status, other: Status) -> int:
    """Return the number of the first launch in which two ranks differ; 0 if they may go on."""
    in_vain = one.keeps_waiting(other) or other.keeps_waiting(one)
    return first_difference(one.launches, other.launches) or (
        in_vain and min(map(count, (one.launches, other.launches))) + 1
    )


class Post:
    """A sentinel's post at one rank's launches."""

    def __init__(self, launches: Launches, store: Any) -> None:
        """``store``: one of torch's that all ranks have."""
        self._launches, self._store, self._process = weakref.ref(launches), store, os.getpid()
        self._rank, self._limit, self._prefix = launches.rank, launches.limit, f"zero {launches.number}"
        self.pause, self._grace = min(MOST_PAUSE, self._limit / 8), min(GRACE, self._limit / 2)
        self._place: object = None  # where its rank was at the last look
        self._looked, self._stuck = time.monotonic(), 0.0  # when that was, and for how many seconds the rank was there
        self._written: Status | None = None
        self._reads, self._decides = 0.0, 0.0  # `_stuck` at which others' counts are read, and a difference is named
        self.text, self._end = "", 0.0  # why the group is closed; when this process ends if the abort has not returned
        self._closing: threading.Thread | None = None

    def open(self) -> None:
        """Write what others may read, before any rank waits."""
        for name in (self._rank, "verdict", "difference"):
            self._store.set(f"{self._prefix} {name}", OPEN)

    def _read(self, *names: object) -> list[Any]:
        values = self._store.multi_get([f"{self._prefix} {name}" for name in names])
        return [None if value == OPEN.encode() else json.loads(value) for value in values]

    def _write(self, name: str, value: Any) -> Any:
        """Return what all ranks read: this value, or that of another rank; this one also if the store is lost."""
        with suppress(OSError, RuntimeError):
            return json.loads(self._store.compare_set(f"{self._prefix} {name}", OPEN, json.dumps(value)))
        return value

    def _decide(self, verdict: Verdict) -> Verdict:
        return Verdict(*self._write("verdict", verdict))

    def look(self) -> bool:
        """Look once. Return False when there is nothing to look at any more."""
        launches, now = self._launches(), time.monotonic()
        if launches is None or os.getpid() != self._process:
            return False
        if not self.text:
            verdict = self._find(launches, now)
            self.text, self._end = "" if verdict is None else f"rank {self._rank}: {verdict.text}", now + ABORT
            if verdict is not None and launches.failure is None:
                LOG.error("%s", self.text)
                launches.verdict = verdict.error(f"rank {self._rank}")
                self._closing = threading.Thread(target=self._close, args=(launches,), name="zero: abort", daemon=True)
                self._closing.start()
        elif launches.is_aborted if self._closing is None else not self._closing.is_alive():
            return False
        elif now >= self._end:  # a host may be inside a call that never returns, as a kernel waits for a lost rank
            text = f"{self.text}; the abort of its collectives has not returned in {ABORT:g} s: this process ends"
            os.write(2, f"zero: {text}\n".encode())
            os._exit(1)
        return True

    def _find(self, launches: Launches, now: float) -> Verdict | None:
        failure, waits = launches.failure, 0
        try:
            waits = launches.ledger.oldest()
        except Exception as error:  # of the device
            failure = failure or f"rank {self._rank}: its device failed: {error}"
        if failure is not None:
            return self._decide(Verdict(failure))
        place = waits, launches.inside
        # While a thread holds the interpreter this one does not look, and its rank could not go on, either.
        passed = min(now - self._looked, self._limit / 4)
        self._stuck = self._stuck + passed if place == self._place and any(place) else 0.0
        self._place, self._looked = place, now
        if self._stuck >= self._limit:
            with suppress(OSError, RuntimeError):  # of the store
                return self._explain(launches, waits)
        return None

    def _explain(self, launches: Launches, waits: int) -> Verdict | None:
        """Return the verdict, if there is one, on a rank that has waited for the limit."""
        status, links, reads = self._status(launches, waits), launches.links(), False
        if status != self._written:
            self._written, self._reads = status, self._stuck + self._grace
            with suppress(OSError, RuntimeError):
                self._store.set(f"{self._prefix} {self._rank}", json.dumps(status))
        elif self._stuck >= self._reads:
            until = launches.timeout if self._stuck < launches.timeout else 2 * self._stuck
            self._reads, reads, closed = min(2 * self._stuck, until), True, [] if links is None else links.closed()
            if closed:
                why = "its process has ended, or its connection is closed"
                words = f"rank {closed[0]} is lost: {why}; rank {self._rank} waits for it in {status.place}"
                return self._decide(Verdict(words))
        verdict, known = self._read("verdict", "difference")
        if verdict is not None:
            return Verdict(*verdict)
        if known is None and reads:
            known = self._compare(launches, status)
        if known is None or self._rank not in known[0] or (self._rank == known[0][0] and self._stuck < self._decides):
            return None
        ranks, said, number = known
        if self._rank == ranks[1]:
            said = said[0], self._said(launches, number)
        return self._decide(mismatch(ranks, said, number, launches.advice))

    def _compare(self, launches: Launches, status: Status) -> Any:
        """Return two ranks that differ, words for them, and the launch. The second knows its words better."""
        first = self._rank - self._rank % launches.sharing
        others = range(first, first + launches.sharing) if self._rank == first else (first,)
        for rank, known in zip(others, self._read(*others), strict=True):
            number = 0 if known is None or rank == self._rank else difference(status, Status(*known))
            if number:
                self._decides = self._stuck + self._grace
                said = self._said(launches, number), Status(*known).place
                return self._write("difference", ((self._rank, rank), said, number))
        if self._stuck >= launches.timeout:
            counts = [
                -1 if known is None else count(Status(*known).launches) for known in self._read(*range(launches.size))
            ]
            late = min((rank for rank in range(launches.size) if rank != self._rank), key=counts.__getitem__)
            words = (
                f"rank {late} has not come for {self._stuck:.0f} s; rank {self._rank} waits for it in {status.place}"
            )
            self._decide(Verdict(words))  # the next look reads it
        return None

    def _status(self, launches: Launches, waits: int) -> Status:
        ledger, inside, waited, enters = launches.ledger, launches.inside, launches.ledger.launch(waits), OUTSIDE
        if inside is not None and inside.meets:
            enters = inside.tag.round if inside.tag.kind is Kind.MEET else ANY
        place = describe(inside.tag) if inside is not None else self._said(launches, waits)
        since = (0, 0, 0) if waited is None else (waits, waited.tag.round, waited.met)
        return Status(ledger.history(tags=False), place, ledger.met, enters, since)

    def _said(self, launches: Launches, number: int) -> str:
        tagged = launches.ledger.launch(number) or launches.inside
        return "nothing more" if tagged is None else describe(tagged.tag)

    def _close(self, launches: Launches) -> None:
        """Close the group on this rank. It may take its time, or hang."""
        links = launches.links()
        if links is not None:
            links.abort(self.text)
            time.sleep(3 * self.pause)  # in which it reaches every rank
            if launches.inside is not None:
                links.backend.interrupt()


class Sentinel:
    """The sentinel of a process."""

    def __init__(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._posts: list[Post] = []
        self._thread: threading.Thread | None = None

    def watch(self, post: Post) -> None:
        with self._lock:
            self._posts.append(post)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="zero: sentinel", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(min((post.pause for post in self._posts), default=MOST_PAUSE)):
            for post in list(self._posts):
                try:
                    if not post.look():
                        self._posts.remove(post)
                except Exception:
                    LOG.exception("the sentinel goes on after an error")

    def finish(self) -> None:
        """Wait for aborts at the end of the process: torch ends it by a signal if a call returns after that."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(ABORT)
        for post in self._posts:
            with suppress(Exception):
                while post.look() and post.text:
                    time.sleep(post.pause)


SENTINEL = Sentinel()
atexit.register(SENTINEL.finish)
