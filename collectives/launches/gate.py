"""What one rank's calls note for its ledger and its sentinel, and when a collective awaits the headers of all ranks.

Ranks part between steps: one saves, or evaluates. A kernel that waited for a late rank would end the process after the
time limit of the devices' own collectives. So the first collective behind a meeting is a gate: it begins when all ranks
have sent its header. What a call launches right behind its own meeting needs none (`behind_a_meeting`).

Whether a collective is a gate depends on what all ranks do alike, never on a call that one rank may make alone.

Knows: which collectives and meetings there were. Does not know: how a header travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..messages import CollectiveError, Tag, describe
from .board import Board
from .ledger import Ledger
from .verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank among those of a group.

    Attributes:
        rank, size: this one, and how many there are.
        sharing: how many neighbouring ranks launch the same gathers.
        number: of the group, the same on all ranks.
        limit: seconds for which a rank waits before its sentinel asks why.
        timeout: seconds for which a late rank is waited for.
    """

    rank: int
    size: int
    sharing: int
    number: int
    limit: float
    timeout: float


class Launches:
    """What one rank launches, and where it is. Its own threads call this, and its sentinel reads it.

    ``abort`` refers to what closes the group on this rank, for a reason, and ``interrupt`` to what ends a wait of its
    thread for a message then. The sentinel calls both, if they are still there.
    """

    def __init__(
        self,
        ranks: Ranks,
        board: Board,
        abort: Callable[[], Callable[[str], object] | None],
        interrupt: Callable[[], Callable[[], object] | None],
    ) -> None:
        self.ranks, self.board, self.abort, self.interrupt = ranks, board, abort, interrupt
        self.ledger = Ledger()
        self.advice = ""
        self.inside: tuple[Tag, float] | None = None  # the meeting in which this rank is, and since when
        self.failure: str | None = None  # why this rank has closed the group
        self._met = True  # since the last gate
        self._behind = 0  # blocks of `behind_a_meeting` around this moment
        self._verdict: CollectiveError | None = None

    @contextmanager
    def waiting(self, tag: Tag) -> Iterator[None]:
        """Return the context of a wait for messages of all ranks."""
        before, self.inside = self.inside, (tag, time.monotonic())
        try:
            yield
        finally:
            self.inside = before

    def meet(self, tag: Tag, swap: Callable[[], T | None]) -> T | None:
        """Return the result of a meeting; if there is one, all ranks have met."""
        with self.waiting(tag):
            result = swap()
        self._met = self._met or result is not None
        return result

    def is_gate(self) -> bool:
        """Return whether the collective that is about to begin awaits all headers; if so, the next ones do not."""
        if not self._met or self._behind:
            return False
        self._met = False
        return True

    @contextmanager
    def behind_a_meeting(self) -> Iterator[None]:
        """Return the context of collectives that follow a meeting of the same call."""
        self._behind += 1
        try:
            yield
        finally:
            self._behind -= 1

    # -- the sentinel's ----------------------------------------------------------------------------------------------

    def place(self) -> str:
        """Return the words for the meeting in which this rank is; empty if it is in none."""
        inside = self.inside
        return "" if inside is None else describe(inside[0])

    def found(self, verdict: Verdict) -> None:
        """Let the next call raise."""
        self._verdict = verdict.error(f"rank {self.ranks.rank}")

    def take_verdict(self) -> CollectiveError | None:
        """Return the sentinel's error, once."""
        verdict, self._verdict = self._verdict, None
        return verdict
