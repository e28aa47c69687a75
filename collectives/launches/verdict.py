"""The words of an error that the ranks did not find by a message: which ranks differ, and where.

Knows: what ranks have launched, where each waits, and for how long. Does not know: how that is found.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..messages import CollectiveError, MismatchError, PeerError
from .ledger import History

SAME_CALLS = "all ranks of a group must make the same calls in the same order, with the same parameters trainable"
NOTHING = "nothing more"


@dataclass(frozen=True)
class Verdict:
    """An error of all ranks. ``mismatch``: ranks have launched different collectives; else a rank failed or is lost."""

    text: str
    mismatch: bool = False

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Verdict:
        return cls(**json.loads(data))

    def error(self, rank_label: str) -> CollectiveError:
        return (MismatchError if self.mismatch else PeerError)(f"{rank_label}: {self.text}")


@dataclass(frozen=True)
class Line:
    """Where a rank is.

    Attributes:
        answers: the number of the question.
        digests: a `History` without tags, packed, in hexadecimal digits.
        waits: the number of the first collective that its device has not ended although a stream waits for it; or 0.
        inside: the meeting, exchange or gate in which its thread is; empty if it is outside.
        stuck: seconds for which these two are as they are.
    """

    answers: int
    digests: str
    waits: int
    inside: str
    stuck: float

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Line:
        return cls(**json.loads(data))

    def history(self) -> History:
        return History.unpack(bytes.fromhex(self.digests), tags=False)


def first_difference(histories: Mapping[int, History]) -> tuple[int, int, int] | None:
    """Return two ranks, and the number of the first launch in which they differ, as far as both still know; None if
    none do. A rank that has launched less does not differ by that."""
    ranks = sorted(histories, key=lambda rank: histories[rank].count)
    for behind, ahead in itertools.pairwise(ranks):
        mine, theirs = histories[behind], histories[ahead]
        end = mine.digest(mine.count), theirs.digest(mine.count)
        if end[1] is not None and end[0] != end[1]:
            known = (count for count, digest, _ in mine.launches if theirs.digest(count) not in (digest, None))
            return *sorted((behind, ahead)), next(known)  # type: ignore[return-value]
    return None


def words(first: int, second: int, number: int, tags: Callable[[int], History], advice: str = "") -> Verdict:
    """Return the verdict on two ranks that differ in a launch. ``tags``: of a rank, with its tags."""
    said = [f"rank {rank} is in {tags(rank).tag(number) or NOTHING}" for rank in (first, second)]
    return Verdict(f"{said[0]}, but {said[1]} (launch {number} of each): {SAME_CALLS}{advice}", mismatch=True)


def compare(histories: Sequence[History], sharing: int, advice: str = "") -> Verdict | None:
    """Return the verdict on ranks that meet, each of which has launched all that it will before it: counts must be
    equal, too, among each ``sharing`` neighbouring ranks. ``histories``: with tags, of all ranks."""
    for begin in range(0, len(histories), sharing):
        block = dict(enumerate(histories[begin : begin + sharing], begin))
        found = first_difference(block)
        if found is None and len({history.count for history in block.values()}) > 1:
            least = min(block, key=lambda rank: block[rank].count)
            most = max(block, key=lambda rank: block[rank].count)
            found = least, most, block[least].count + 1
        if found is not None:
            return words(*found, lambda rank: histories[rank], advice)
    return None


def judge(
    lines: Mapping[int, Line], sharing: int, limit: float, tags: Callable[[int], History], advice: str = ""
) -> Verdict | None:
    """Return the verdict on ranks that have all answered, or None: they go on, or one is late.

    Ranks that have launched different collectives are in error. So are they if each waits, for at least ``limit``
    seconds, for something that another will not launch since it waits inside a meeting. A rank that is outside, and
    whose device waits for nothing that another has not launched, is late.
    """
    for begin in range(0, len(lines), sharing):
        block = {rank: lines[rank] for rank in range(begin, begin + sharing)}
        histories = {rank: line.history() for rank, line in block.items()}
        found = first_difference(histories)
        if found is not None:
            return words(*found, tags, advice)
        least = min(block, key=lambda rank: histories[rank].count)
        count = histories[least].count
        vain = [rank for rank, line in block.items() if line.waits > count]
        stuck = all(line.stuck >= limit and (line.inside or rank in vain) for rank, line in block.items())
        if vain and stuck:
            where = block[least].inside
            launched = tags(vain[0]).tag(count + 1)
            ranks = f"rank {vain[0]} is in {launched}, but rank {least} is in {where}"
            return Verdict(f"{ranks} (launch {count + 1}): {SAME_CALLS}{advice}", mismatch=True)
    return None
