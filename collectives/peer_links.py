"""The lanes between this rank and each of the others, who is waited for there, and what a failure is blamed on.

    lane 0   headers
    lane 1   the bytes that headers tell of
    lane 2   why a rank failed
    lane 3   "I have read what you lent me", where bytes stay in memory that both sides see (`lending`)
    lane 4   "I have read what you sent me", where it is much, and came over a network
    lane 5   "a part of it has left", behind each part

Each is first-in-first-out for a pair of ranks. A rank that fails says so on all of them, so whoever waits for it learns
at once why nothing will come, and the backend itself stays whole for its user. Over a network nothing leaves before its
receiver has asked for it: so why a rank failed is asked for from the start, and is heard when that rank is gone.

A process that is forked from a rank inherits its sockets, and memory that peers read: what it sent, read or wrote would
be taken for the rank's. So a line works in the process that made it, and nowhere else.

Knows: one backend, the ranks of one group, and what a header says of a failure. Does not know: which message follows
which (`channel`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from .backend import Backend, Pending, PendingBytes
from .messages import (
    HEADER_BYTES,
    REPORT_BYTES,
    CollectiveError,
    Failure,
    GoneError,
    Kind,
    MismatchError,
    PeerError,
    Tag,
    describe,
    is_abort,
    with_offset,
)

HEADER_PORT, PAYLOAD_PORT, FAILURE_PORT, RELEASE_PORT, ACK_PORT, MARKER_PORT, PORTS = 0, 1, 2, 3, 4, 5, 6
FAILED = b"g"
REPORT_KEPT = 60.0  # seconds for which a failed rank's messages are kept for their receivers
GRACE = 1.0  # seconds that ranks of a host are waited for longer than those of others, for whom they may wait
REPORT_WAIT = (
    0.5  # seconds in which the words of a rank that is gone are here, if it said any; and for which they are said
)


@dataclass
class Counters:
    """`messages.Traffic` while it grows."""

    sent: int = 0
    received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0


class PeerState:
    """Messages of one rank: headers asked for, those expected, at most one that was read and put back, and what this
    rank lends it. ``remote``: it is reached over a network; ``limit``: seconds for which it is waited for."""

    def __init__(self, remote: bool, limit: float) -> None:
        self.remote, self.limit = remote, limit
        self.report: PendingBytes | None = None
        self.acks: deque[PendingBytes] = deque()  # to what was sent
        self.acks_expected = self.acks_received = 0
        self.posted: deque[PendingBytes] = deque()
        self.expected: deque[Expected] = deque()
        self.unread_header: bytes | None = None
        self.exposed: dict[int, Tensor] = {}  # by number, as both sides count
        self.times_exposed = self.times_mapped = 0
        self.pending_release: PendingBytes | None = None


class Expected:
    """A header that is expected from one rank."""

    __slots__ = ("confirmed", "offset", "packed", "size", "source", "tag")

    def __init__(self, source: int, tag: Tag, size: int, packed: bytes) -> None:
        self.source, self.tag, self.size, self.packed = source, tag, size, packed
        self.confirmed, self.offset = False, 0


class PeerLinks:
    """What connects the ranks of one transport. Ranks are those of the group; ``ranks`` says what the backend calls
    them."""

    def __init__(self, backend: Backend, ranks: Sequence[int], number: int, like: PeerLinks | None = None) -> None:
        """``number``: keeps lines of one backend apart. ``like``: the line of the same ranks with which this one is
        counted, and fails."""
        self.backend, self.ranks, self.number = backend, tuple(ranks), number
        self.memory: Backend | None = backend if backend.maps_memory else None
        self.rank, self.timeout = self.ranks.index(backend.rank), backend.timeout
        self.labels: tuple[int, ...] = tuple(range(len(self.ranks))) if like is None else like.labels
        self._header_slot = self.slot(HEADER_PORT)
        self.peers = [(self.rank + i) % len(ranks) for i in range(1, len(ranks))]
        self.counted: Counters = Counters() if like is None else like.counted
        self._family: list[weakref.ref[PeerLinks]] = [] if like is None else like._family
        self._family.append(weakref.ref(self))
        self.broken: str | None = None
        self._process = os.getpid()
        self.unsent: dict[int, object] = {}  # sends that nobody has waited for yet
        # A rank of this host may itself wait for one of another, and is to say so before it is given up.
        remote = [backend.needs_posted_recv(rank) for rank in self.ranks]
        near = self.timeout + GRACE if any(remote) else self.timeout
        self.states = [PeerState(far, self.timeout if far else near) for far in remote]
        for peer in self.peers:
            if self.states[peer].remote:
                with suppress(PeerError):  # who is gone already is told of when something is expected of it
                    self.expect_failure_report(peer)

    @property
    def rank_label(self) -> str:
        """What errors call this rank."""
        return f"rank {self.labels[self.rank]}"

    def attach(self, other: PeerLinks, ranks: Sequence[int]) -> None:
        """From now on a line of some of these ranks is counted here, fails with this one, and calls ranks what they are
        called here. ``ranks``: what it has, in its order."""
        if other._family is self._family:
            return
        for reference in other._family:
            member = reference()
            if member is not None:
                member.counted, member._family = self.counted, self._family
                member.labels = tuple(self.labels[ranks[label]] for label in member.labels)
                self._family.append(reference)

    def slot(self, port: int) -> int:
        return self.number * PORTS + port

    def check(self) -> None:
        """Raise `CollectiveError`, naming the failure, where there was one, or in a process that was forked."""
        if self.broken is None and os.getpid() == self._process:
            return
        self.check_process()
        raise CollectiveError(
            f"{self.rank_label}: this communicator is closed since an earlier failure ({self.broken}); "
            "build a new optimizer"
        )

    def check_process(self) -> None:
        """Raise `CollectiveError` in a process that was forked from the rank's."""
        if os.getpid() != self._process:
            raise CollectiveError(
                f"{self.rank_label}: process {os.getpid()} was forked from the rank's own, {self._process}, "
                "which alone may communicate with the other ranks: evaluate or save a copy of the model that was made "
                "before the fork, at stage 3 inside 'with optimizer.gathered():'"
            )

    # -- the small messages ---------------------------------------------------------------------------------------

    def send_header(self, packed: bytes, to: int, offset: int = 0) -> Pending:
        self.counted.control_sent += HEADER_BYTES
        self.counted.messages += 1
        return self.backend.send_bytes(with_offset(packed, offset), self.ranks[to], self._header_slot)

    def post_header(self, source: int) -> None:
        pending = self.backend.recv_bytes(HEADER_BYTES, self.ranks[source], self._header_slot)
        self.states[source].posted.append(pending)
        self.counted.control_received += HEADER_BYTES

    def recv_bytes(self, size: int, source: int, port: int, tag: Tag) -> PendingBytes:
        try:
            return self.backend.recv_bytes(size, self.ranks[source], self.slot(port))
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    # -- waiting and failing --------------------------------------------------------------------------------------

    def wait(self, pending: Pending, peer: int, tag: Tag) -> None:
        self.check()
        begin = time.monotonic()
        try:
            pending.wait(self.states[peer].limit)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag) -> bytes:
        if self.broken is not None or os.getpid() != self._process:  # as `check`, without a call
            self.check()
        begin = time.monotonic()
        try:
            return pending.wait(self.states[peer].limit)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def cut_off(self, error: BaseException, peer: int, tag: Tag) -> BaseException:
        """What to raise where a message was begun: after an interrupt or a strange error between a header and its bytes
        nobody knows what the next bytes are. What has been blamed on somebody is raised as it is."""
        if self.broken is not None:
            return error
        if isinstance(error, PeerError):
            return self._no_answer(peer, tag, time.monotonic(), error)
        self.abort(f"{self.rank_label}, in {tag.label}: {type(error).__name__}: {error}")
        return error

    def _no_answer(self, peer: int, tag: Tag, begin: float, error: PeerError) -> CollectiveError:
        failure = self._failure_report(peer, error)
        if failure is not None:
            return self._peer_failed(tag, failure)
        waited = time.monotonic() - begin
        text = (
            f"{self.rank_label}, in {tag.label}: no answer from rank {self.labels[peer]} after {waited:.1f} s ({error})"
        )
        return self.fail(PeerError(text), Failure(self.labels[peer], text))

    def aborted(self, source: int, tag: Tag) -> CollectiveError:
        return self._peer_failed(tag, Failure.unpack(self.wait_bytes(self.expect_failure_report(source), source, tag)))

    def _peer_failed(self, tag: Tag, failure: Failure) -> CollectiveError:
        text = f"{self.rank_label}, in {tag.label}: rank {failure.culprit} failed: {failure.reason}"
        return self.fail(PeerError(text), failure)

    def expect_failure_report(self, peer: int) -> PendingBytes:
        """Expect to hear, once, why a rank failed."""
        state = self.states[peer]
        if state.report is None:
            state.report = self.backend.recv_bytes(REPORT_BYTES, self.ranks[peer], self.slot(FAILURE_PORT))
        return state.report

    def _failure_report(self, peer: int, error: PeerError) -> Failure | None:
        """Why a peer failed that will say nothing more; None where it has not said so."""
        try:
            if self.states[peer].remote:
                return Failure.unpack(self.expect_failure_report(peer).wait(REPORT_WAIT))
            while isinstance(error, GoneError):
                if is_abort(self._read_now(peer)):
                    return Failure.unpack(self.expect_failure_report(peer).wait(0.0))
        except PeerError:
            pass
        return None

    def _read_now(self, peer: int) -> bytes:
        """The next header of a peer that will say nothing more."""
        posted = self.states[peer].posted
        if not posted:
            self.post_header(peer)
        return posted.popleft().wait(0.0)

    def mismatch(self, source: int, mine: Tag, theirs: Tag, size: int = 0, their_size: int = 0) -> CollectiveError:
        sizes = f" ({size} and {their_size} bytes)" if size != their_size and mine.same(theirs) else ""
        return self.fail(
            MismatchError(
                f"{self.rank_label} is in {describe(mine)}, but rank {self.labels[source]} is in {describe(theirs)}"
                f"{sizes}: all ranks of a group must make the same calls in the same order, with the same parameters "
                "trainable"
            )
        )

    def fail(self, error: CollectiveError, failure: Failure | None = None) -> CollectiveError:
        self.abort(str(error), failure)
        return error

    def abort(self, reason: str, failure: Failure | None = None) -> list[int]:
        """Tell every other rank that this one failed, because of ``failure`` or else by itself, and return those that
        could not be told. The line and its family are of no use afterwards."""
        if os.getpid() != self._process:
            return list(self.peers)
        unreached: list[int] = []
        for reference in self._family:
            member = reference()
            if member is not None and member.broken is None:
                found = member._abort(reason, failure or Failure(self.labels[self.rank], reason))
                unreached = found if member is self else unreached
        return unreached

    def _abort(self, reason: str, failure: Failure) -> list[int]:
        self.broken, unreached = reason, list[int]()
        report, header = failure.pack(), Tag(Kind.ABORT, "abort").pack(0)
        # What was sent must outlive this object until its receivers ask for it.
        kept = [*self.unsent.values(), *(exposed for state in self.states for exposed in state.exposed.values())]
        for to in self.peers:
            try:
                kept.append(self.backend.send_bytes(report, self.ranks[to], self.slot(FAILURE_PORT), REPORT_WAIT))
                kept.append(self.send_header(header, to))
                if self.states[to].remote:
                    for port in (ACK_PORT, MARKER_PORT):
                        kept.append(self.backend.send_bytes(FAILED, self.ranks[to], self.slot(port)))
                if self.memory is not None:
                    for port in (PAYLOAD_PORT, RELEASE_PORT):  # where it may wait for what is not read any more
                        self.memory.close_slot(self.ranks[to], self.slot(port))
            except Exception:  # a peer that is gone cannot be told; the others still are
                unreached.append(to)
        keeper = threading.Timer(min(self.timeout, REPORT_KEPT), lambda kept: None, [kept])
        keeper.daemon = True
        keeper.start()
        return unreached
