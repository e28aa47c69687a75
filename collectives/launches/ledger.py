"""The collectives that one rank has launched on devices: how many, a digest of them in their order, and the last ones.

    count     1        2        3
    tag       unit 0   unit 1   bucket 0
    digest    crc(0, unit 0)    crc(digest of 1, unit 1)    crc(digest of 2, bucket 0)

Ranks with equal counts and digests have launched the same. Else the last `KEPT` show which is the first that differs.

Knows: tags, collectives and meetings. Does not know: how a message travels.
"""

from __future__ import annotations

import struct
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from ..messages import CollectiveError, MismatchError, PeerError, Tag, describe

T = TypeVar("T")
KEPT = 256  # launches
SAME_CALLS = "all ranks of a group must make the same calls in the same order, with the same parameters trainable"
History: TypeAlias = Sequence[tuple[int, int, str]]  # of each launch the number, the digest up to it, and words
_DIGEST = struct.Struct("<I")


def agreed_digest(digest: int, bounds: Sequence[int], dtype: torch.dtype) -> int:
    """Return a digest of a tag's own and of what a collective without headers must have in common."""
    return zlib.crc32(repr((digest, list(bounds), dtype)).encode())


class LedgerEntry(NamedTuple):
    """One launch. ``digest``: of all up to it; ``met``: how many meetings its rank had completed before it."""

    number: int
    digest: int
    tag: Tag
    met: int


class Ledger:
    """The launches of one rank. The rank's thread adds to it, and the sentinel's reads."""

    def __init__(self) -> None:
        self.met = 0  # meetings and gates that the rank has completed
        self._last: deque[tuple[int, int, Tag, int]] = deque(maxlen=KEPT)  # of each a `LedgerEntry`
        self._waited: deque[tuple[int, Callable[[], bool]]] = deque()  # count, and whether the device has ended it
        self._common: dict[tuple[Hashable, torch.dtype], int] = {}

    def agreed(self, digest: int, bounds: Sequence[int], dtype: torch.dtype) -> int:
        """Return a digest as `agreed_digest` does. What bounds and dtype add is formed once for each bucket."""
        key = bounds if isinstance(bounds, Hashable) else tuple(bounds), dtype
        if key not in self._common:
            self._common[key] = agreed_digest(0, bounds, dtype)
        return zlib.crc32(_DIGEST.pack(digest), self._common[key])

    @property
    def state(self) -> tuple[int, int]:
        """How many collectives were launched, and their digest."""
        last = self._last
        return last[-1][:2] if last else (0, 0)

    def add(self, tag: Tag) -> int:
        """Note that a collective is launched. Return its number, from 1 on. ``tag``: with `agreed_digest`."""
        count, digest = self.state
        self._last.append((count + 1, zlib.crc32(tag.pack(0), digest), tag, self.met))
        return count + 1

    def launch(self, number: int) -> LedgerEntry | None:
        """Return a launch by its number; None if it is not among the last ones."""
        return next((LedgerEntry(*launch) for launch in list(self._last) if launch[0] == number), None)

    def awaited(self, number: int, ended: Callable[[], bool]) -> None:
        """Note that a stream waits for a collective. ``ended``: whether it has ended; any thread may ask."""
        waited = self._waited
        while waited and waited[0][1]():
            waited.popleft()
        waited.append((number, ended))

    def oldest(self) -> int:
        """Return the number of the first collective that is awaited and has not ended; 0: there is none."""
        return next((number for number, ended in list(self._waited) if not ended()), 0)

    def history(self, *, tags: bool = True) -> History:
        """Return the last launches. ``tags``: with words for them."""
        last = list(self._last)
        return [(number, digest, describe(tag) if tags else "") for number, digest, tag, _ in last]


class Verdict(NamedTuple):
    """An error of all ranks. ``mismatch``: ranks have launched different collectives; else a rank failed or is lost."""

    text: str
    mismatch: bool = False

    def error(self, rank_label: str) -> CollectiveError:
        return (MismatchError if self.mismatch else PeerError)(f"{rank_label}: {self.text}")


def count(history: History) -> int:
    return history[-1][0] if history else 0


def first_difference(one: History, other: History) -> int:
    """Return the number of the first launch in which two ranks differ, as far as both still know; 0 if they do not. A
    rank that has launched less does not differ by that."""
    known = {number: digest for number, digest, _ in other}
    return next((number for number, digest, _ in one if known.get(number, digest) != digest), 0)


def mismatch(ranks: Sequence[int], said: Sequence[str], number: int, advice: str) -> Verdict:
    """Return the verdict on two ranks that differ in a launch. ``said``: words for where each of them is."""
    words = ", but ".join(f"rank {rank} is in {place}" for rank, place in sorted(zip(ranks, said, strict=True)))
    return Verdict(f"{words} (launch {number}): {SAME_CALLS}{advice}", mismatch=True)


def compare(histories: Sequence[History], sharing: int, advice: str = "") -> Verdict | None:
    """Compare the launches of ranks at a meeting, and return the verdict on the first that differ. Each rank has
    launched all that comes before the meeting, so counts must match as well, among each ``sharing`` neighbouring ranks.
    ``histories``: of all ranks, with tags."""
    for rank, mine in enumerate(histories):
        first = rank - rank % sharing
        counts = {count(histories[first]), count(mine)}
        number = first_difference(histories[first], mine) or (min(counts) + 1 if len(counts) > 1 else 0)
        if number:
            words = [{each[0]: each[2] for each in histories[owner]} for owner in (first, rank)]
            said = [known.get(number, "nothing more") for known in words]
            return mismatch((first, rank), said, number, advice)
    return None


class Inside(NamedTuple):
    """A wait for messages of all ranks. ``meets``: it ends only when all ranks are there. ``since``: a time."""

    tag: Tag
    meets: bool
    since: float


class Launches:
    """What one rank launches, and where it is. Its own threads call this, and its sentinel reads it.

    Ranks part between steps, and a kernel that waited for a late one would end the process after the device's own time
    limit. So the first collective behind a meeting is a gate: it begins when all ranks have sent its header. Which one
    that is depends on what all ranks do alike, never on a call of one rank.
    """

    def __init__(self, links: Any, sharing: int) -> None:
        """``links``: the `PeerLinks` of the group. ``sharing``: how many neighbouring ranks launch the same gathers."""
        self.links = weakref.ref(links)
        self.rank, self.size, self.number, self.sharing = links.rank, len(links.ranks), links.number, sharing
        self.limit, self.timeout = links.backend.stall_limit, links.backend.timeout
        self.ledger = Ledger()
        self.advice = ""
        self.inside: Inside | None = None
        self.failure: str | None = None  # why this rank has closed the group
        self.is_aborted = False  # the collectives that were under way then
        self._met = True  # since the last gate
        self._behind = 0  # blocks of `behind_a_meeting` around this moment
        self.verdict: CollectiveError | None = None  # the sentinel's, which the next call raises

    @contextmanager
    def waiting(self, tag: Tag, *, meets: bool = False) -> Iterator[None]:
        """Return the context of a wait for messages of all ranks."""
        before, self.inside = self.inside, Inside(tag, meets, time.monotonic())
        try:
            yield
        finally:
            self.inside = before

    def meet(self, tag: Tag, swap: Callable[[], T | None]) -> T | None:
        """Return the result of a meeting; if there is one, all ranks have met."""
        with self.waiting(tag, meets=True):
            result = swap()
        if result is not None:
            self._met, self.ledger.met = True, self.ledger.met + 1
        return result

    def pass_gate(self, tag: Tag, wait: Callable[[], object]) -> None:
        """Wait for the headers of all ranks."""
        with self.waiting(tag, meets=True):
            wait()
        self.ledger.met += 1

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

    def take_verdict(self) -> CollectiveError | None:
        """Return the sentinel's error, once."""
        verdict, self.verdict = self.verdict, None
        return verdict
