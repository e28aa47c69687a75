"""One thread a process that finds out why a rank waits for long, and ends the wait if it is in vain.

    rank 0   its device waits for launch 57 ...... asks ................ reads all lines: verdict ... aborts
    rank 1   is inside a meeting ................. answers with its line ........................... aborts
    rank 2   is outside, in the user's code ...... answers with its line ........................... aborts

It sleeps, and looks at the board a few times a second: whether a sentinel asks, and whether there is a verdict. Where
its own rank has waited for half the limit, it asks. Every sentinel answers by a line, also when its rank's own thread
is outside the library. The one that asks reads them. So a question costs a line of 2 KB for each rank, and not one for
each pair; tags are read of the two ranks that differ alone.

A rank that does not answer is lost. One that answers that it is outside is late, and is waited for until the time limit
of the group. A rank that has closed the group itself writes its reason as the verdict.

Knows: lines, and the names on a board. Does not know: what a verdict says of whom (`verdict`), how a group is aborted.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from .at_exit import LEFT, Caller
from .board import MemoryBoard
from .gate import Launches
from .ledger import History
from .verdict import Line, Verdict, judge

LOG = logging.getLogger("collectives")
T = TypeVar("T")
LEAST_PATIENCE = 1.0  # seconds for answers, or half of the limit: a thread may hold the interpreter for a while
CALL = 1.0  # seconds for an operation of the board
MOST_PAUSE = 0.25  # seconds between two looks
SPREAD = 0.1  # seconds, and two pauses, in which a verdict reaches every rank
OPEN, NEVER, CLOSED = b"-", b"0", b" judged"  # no verdict; no question so far; the end of one that is judged


class Post:
    """A sentinel's post at one rank's launches."""

    def __init__(self, launches: Launches) -> None:
        self._launches = weakref.ref(launches)
        self._ranks, self._board = launches.ranks, launches.board
        self.pause = min(MOST_PAUSE, launches.ranks.limit / 8)
        self._patience = max(LEAST_PATIENCE, launches.ranks.limit / 2)  # seconds from a question to its judgement
        self.process = os.getpid()
        self._caller = Caller()
        self._place: object = None
        self._since = 0.0  # when its rank came to this place
        self._answered = 0  # questions
        self._written = -1  # launches with tags on the board
        self._seen = (NEVER, 0.0)  # the last question, and when it was seen first
        self._mine = 0  # the question that this post has asked and not judged
        self._reached = time.monotonic()  # when the board was last reached
        self._cut_off = False  # from the board, for good
        self._told: float | None = None  # when the verdict came

    def _name(self, what: str) -> str:
        return f"{self._ranks.number}/{what}"

    def open(self) -> None:
        """Write what others may read, before any rank asks."""
        self._board.swap(self._name("verdict"), b"", OPEN)
        self._board.swap(self._name("question"), b"", NEVER)
        self._board.write(self._name(f"line {self._ranks.rank}"), b"")

    @property
    def has_failed(self) -> bool:
        """Whether its rank has closed the group, and no other rank was told."""
        launches = self._launches()
        return launches is not None and launches.failure is not None and self._told is None

    def look(self) -> bool:
        """Look once. Return False when there is nothing to look at any more."""
        launches = self._launches()
        if launches is None or os.getpid() != self.process:
            return False
        now = time.monotonic()
        if self._told is not None:
            if launches.inside is not None and now - self._told > 2 * self.pause + SPREAD:
                interrupt = launches.interrupt()
                if interrupt is not None:
                    LEFT.alone(interrupt)
                return False
            return now - self._told < self._ranks.limit + self._patience
        waits, failed = 0, ""
        try:
            waits = launches.ledger.oldest()
        except Exception as error:  # of the device
            failed = f"rank {self._ranks.rank}: its device failed: {error}"
        try:
            verdict = self._decide(Verdict(failed)) if failed else self._look(launches, waits, now)
            self._reached = now if verdict is None else self._reached
        except (OSError, RuntimeError) as error:
            LOG.debug("rank %d: the sentinels' board: %s", self._ranks.rank, error)
            self._cut_off = self._cut_off or isinstance(error, ConnectionError)
            verdict = Verdict(failed) if failed else self._unreached(launches, waits, now)
        if verdict is not None:
            self._tell(launches, verdict, now)
        return True

    def _look(self, launches: Launches, waits: int, now: float) -> Verdict | None:
        if launches.failure is not None:
            return self._decide(Verdict(launches.failure))
        question, decided = self._call(lambda: self._board.read([self._name("question"), self._name("verdict")]))
        if decided != OPEN:
            return Verdict.unpack(decided)
        if question != self._seen[0]:
            self._seen = question, now  # also when it is closed, so that the next comes a while later
        number, stuck = int(question.split()[0]), self._stuck(launches, waits, now)
        if number > self._answered:
            line = Line(number, launches.ledger.history().pack(tags=False).hex(), waits, launches.place(), stuck)
            self._call(lambda: self._answer(launches, line))
            self._answered = number
        if self._mine == number > 0:
            return self._judge(launches, stuck, now)
        if stuck >= self._ranks.limit / 2 and now - self._seen[1] >= self._until_next():
            asked = f"{number + 1} {self._ranks.rank}".encode()
            if self._call(lambda: self._board.swap(self._name("question"), question, asked)) == asked:
                self._mine, self._seen = number + 1, (asked, now)
                LOG.debug("rank %d: asks, after %.2f s in %s", self._ranks.rank, stuck, launches.place() or waits)
        return None

    def _until_next(self) -> float:
        """Return the seconds between the last question and the next one: longer where nobody has judged that."""
        if self._seen[0] == NEVER:
            return 0.0
        return self._ranks.limit / 4 if self._seen[0].endswith(CLOSED) else self._patience + 2 * self.pause

    def _stuck(self, launches: Launches, waits: int, now: float) -> float:
        """Return the seconds for which a rank has been where it is; 0 if it waits for nothing."""
        place = waits, launches.inside
        if place != self._place:
            self._place, self._since = place, now
        return now - self._since if waits or launches.inside is not None else 0.0

    def _answer(self, launches: Launches, line: Line) -> None:
        history = launches.ledger.history()
        if history.count != self._written:
            self._board.write(self._name(f"tags {self._ranks.rank}"), history.pack())
            self._written = history.count
        self._board.write(self._name(f"line {self._ranks.rank}"), line.pack())
        self._board.count(self._name(f"answers {line.answers}"), 1)

    def _judge(self, launches: Launches, stuck: float, now: float) -> Verdict | None:
        """Read the answers when all are there, or too late to come."""
        answers = self._call(lambda: self._board.count(self._name(f"answers {self._mine}"), 0))
        late = now - self._seen[1] > self._patience
        if answers < self._ranks.size and not late:
            return None
        names = [self._name(f"line {rank}") for rank in range(self._ranks.size)]
        found = self._call(lambda: self._board.read(names))
        lines = {rank: Line.unpack(data) for rank, data in enumerate(found) if data}
        lost = [rank for rank in range(self._ranks.size) if rank not in lines or lines[rank].answers < self._mine]
        if lost and not late:
            return None  # a rank has answered twice, since the board was slow
        self._mine = 0
        if lost:
            return self._decide(self._lost(launches, lost[0], "does not answer: its process has ended or stopped"))
        verdict = judge(lines, self._ranks.sharing, self._ranks.limit, self._tags, launches.advice)
        if verdict is None and stuck >= self._ranks.timeout:
            late_rank = min(lines, key=lambda rank: (bool(lines[rank].inside), lines[rank].history().count))
            verdict = self._lost(launches, late_rank, f"has not come for {stuck:.0f} s")
        if verdict is not None:
            return self._decide(verdict)
        self._call(lambda: self._board.swap(self._name("question"), self._seen[0], self._seen[0] + CLOSED))
        return None

    def _lost(self, launches: Launches, rank: int, what: str) -> Verdict:
        tag = launches.place() or launches.ledger.history().tag(launches.ledger.oldest()) or "a collective"
        return Verdict(f"rank {rank} {what}, and rank {self._ranks.rank} waits for it in {tag}")

    def _tags(self, rank: int) -> History:
        return History.unpack(self._call(lambda: self._board.read([self._name(f"tags {rank}")]))[0])

    def _decide(self, verdict: Verdict) -> Verdict:
        """Return what all ranks raise: this verdict, or an earlier one."""
        name = self._name("verdict")
        return Verdict.unpack(self._call(lambda: self._board.swap(name, OPEN, verdict.pack())))

    def _unreached(self, launches: Launches, waits: int, now: float) -> Verdict | None:
        """Return the verdict if a rank that waits cannot reach the board either."""
        if launches.failure is not None:
            return Verdict(launches.failure)
        stuck = self._stuck(launches, waits, now)
        if stuck < self._ranks.limit or now - self._reached < CALL or self._board.holder is None:
            return None
        return self._lost(launches, self._board.holder, "does not answer: its process has ended or stopped")

    def _tell(self, launches: Launches, verdict: Verdict, now: float) -> None:
        self._told = now
        if launches.failure is None:
            LOG.error("rank %d: %s", self._ranks.rank, verdict.text)
            launches.found(verdict)
            abort, text = launches.abort(), f"rank {self._ranks.rank}: {verdict.text}"
            if abort is not None:
                LEFT.alone(partial(abort, text))

    def _call(self, call: Callable[[], T]) -> T:
        if self._cut_off:
            raise ConnectionError("the board is lost")
        return call() if isinstance(self._board, MemoryBoard) else self._caller.call(CALL, call)


class Sentinel:
    """The sentinel of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posts: list[Post] = []
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def watch(self, post: Post) -> None:
        """Begin to look at a rank's launches."""
        with self._lock:
            self._posts.append(post)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="zero: sentinel", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._posts:
                    self._thread = None
                    return
                posts = list(self._posts)
            if self._ending.wait(min(post.pause for post in posts)):
                return
            gone = [post for post in posts if not _looked(post)]
            with self._lock:
                self._posts = [post for post in self._posts if post not in gone]

    def finish(self) -> None:
        """End with the process: report what failed, and wait for calls that have not returned."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(2 * CALL)
        for post in self._posts:
            if post.has_failed:
                _looked(post)
        LEFT.finish()


def _looked(post: Post) -> bool:
    try:
        return post.look()
    except Exception:
        LOG.exception("the sentinel goes on after an error")
        return True


SENTINEL = Sentinel()
atexit.register(SENTINEL.finish)
