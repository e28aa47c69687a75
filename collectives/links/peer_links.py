"""The links between this rank and each other rank of a group: ports, waits, and what happens if a rank fails.

    port 0   headers
    port 1   payload: the bytes that headers announce
    port 2   failure report: why a rank failed
    port 3   release: "I have read the memory that you exposed" (`exposed_buffers`)
    port 4   ack: "I have read your message", for a message over a network that is large or goes one way
    port 5   marker: "a part of the payload was sent", behind each part
    port 6   control: the bytes of a meeting or an exchange, unless they are many

Each port is first-in-first-out for a pair of ranks. A rank that fails sends on all of them, so every rank that waits
for it learns at once why nothing more will come. The backend itself remains usable, unless a
time limit passed.

A network delivers a message only after its receiver was posted. So the receive of a failure report is posted from the
start, and the report can be read when its sender is gone.

A process that is forked from a rank inherits its sockets, and memory that peers read. What it sent, read or wrote would
pass for the rank's own. So links work only in the process that made them.

Knows: one backend, the ranks of one group, and headers of failures. Does not know: which message follows which
(`messenger`).
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from ..backend import Backend, Pending, PendingBytes
from ..launches.gate import Launches
from ..messages import (
    HEADER_BYTES,
    REPORT_BYTES,
    CollectiveError,
    Failure,
    GoneError,
    Kind,
    MismatchError,
    PeerError,
    Tag,
    Traffic,
    describe,
    is_abort,
    with_offset,
)

HEADER_PORT, PAYLOAD_PORT, FAILURE_PORT, RELEASE_PORT, ACK_PORT, MARKER_PORT, CONTROL_PORT, PORTS = range(8)
FAILED = b"g"
ACK = struct.Struct("<Q")  # the number of a message that was read
NOTHING_READ = ACK.pack(0)
REPORT_KEPT = 60.0  # seconds for which a failed rank's messages are kept for their receivers
GRACE = 1.0  # seconds added to the time limit for ranks of this host, which may themselves wait for ranks of others
REPORT_WAIT = 0.5  # seconds to wait for the failure report of a rank that is gone, and to try to send one


class PeerState:
    """What is under way between this rank and one peer."""

    def __init__(self, remote: bool, limit: float) -> None:
        """``remote``: the peer is reached over a network. ``limit``: seconds to wait for it."""
        self.remote, self.limit = remote, limit
        self.report: PendingBytes | None = None
        self.acks: deque[PendingBytes] = deque()  # receives of acks of messages to the peer
        self.acks_expected = 0  # acknowledged messages to the peer so far; the last one's number
        self.unread: set[int] = set()  # their numbers, until their acks are read
        self.acks_due = 0  # acknowledged messages from the peer so far
        self.posted: deque[PendingBytes] = deque()  # receives of headers
        self.expected: deque[Expected] = deque()
        self.unread_header: bytes | None = None  # was read and put back
        self.promised = 0  # bytes of a control message whose header was sent, and which will follow
        self.exposed: dict[int, Tensor] = {}  # to the peer, by number, as both sides count
        self.times_exposed = self.times_mapped = 0
        self.pending_release: PendingBytes | None = None


class Expected:
    """A header that is expected from one rank. ``confirmed``: it came, and is the expected one. ``ack_number``: the
    number that its ack carries; 0: the message has no ack, or it was sent."""

    __slots__ = ("ack_number", "confirmed", "offset", "packed", "size", "source", "tag")

    def __init__(self, source: int, tag: Tag, size: int, packed: bytes) -> None:
        self.source, self.tag, self.size, self.packed = source, tag, size, packed
        self.confirmed, self.offset, self.ack_number = False, 0, 0


class PeerLinks:
    """The links among the ranks of one transport. Ranks are those of the group; ``ranks`` has the backend's numbers of
    them."""

    def __init__(self, backend: Backend, ranks: Sequence[int], number: int, like: PeerLinks | None = None) -> None:
        """``number``: keeps the links of several transports over one backend apart. ``like``: links of the same ranks
        that share their counters and failures with these."""
        self.backend, self.ranks, self.number = backend, tuple(ranks), number
        self.memory: Backend | None = backend if backend.maps_memory else None
        self.rank, self.timeout = self.ranks.index(backend.rank), backend.timeout
        self.labels: tuple[int, ...] = tuple(range(len(self.ranks))) if like is None else like.labels
        self._header_slot = self.slot(HEADER_PORT)
        self.peers = [(self.rank + i) % len(ranks) for i in range(1, len(ranks))]
        self.counted: Traffic = Traffic() if like is None else like.counted
        self._family: list[weakref.ref[PeerLinks]] = [] if like is None else like._family
        self._family.append(weakref.ref(self))
        self.advice: str = "" if like is None else like.advice  # what errors of ranks in different collectives end with
        self.launches: Launches | None = None if like is None else like.launches  # on devices
        self.broken: str | None = None
        self._aborted_collectives = False
        self._process = os.getpid()
        self.unsent: dict[int, object] = {}  # sends before their wait
        # A rank of this host may itself wait for one of another host: it should have time to report that.
        remote = [backend.needs_posted_recv(rank) for rank in self.ranks]
        local_limit = self.timeout + GRACE if any(remote) else self.timeout
        self.states = [PeerState(is_remote, self.timeout if is_remote else local_limit) for is_remote in remote]
        for peer in self.peers:
            if self.states[peer].remote:
                with suppress(PeerError):  # the next receive from it raises
                    self.expect_failure_report(peer)

    @property
    def rank_label(self) -> str:
        """The name of this rank in errors."""
        return f"rank {self.labels[self.rank]}"

    def attach(self, other: PeerLinks, ranks: Sequence[int]) -> None:
        """Let the links of some of these ranks share counters, failures and rank labels with these. ``ranks``: of
        ``other``, in its order, as they are numbered here."""
        if other._family is self._family:
            return
        for reference in other._family:
            member = reference()
            if member is not None:
                member.counted, member._family, member.advice = self.counted, self._family, self.advice
                member.launches = self.launches
                member.labels = tuple(self.labels[ranks[label]] for label in member.labels)
                self._family.append(reference)

    def watch(self, launches: Launches) -> None:
        """Note launches on devices from now on, over these links and those attached."""
        for member in self._members():
            member.launches = launches

    def advise(self, text: str) -> None:
        """Let errors of ranks in different collectives end with a text, too, over these links and those attached."""
        for member in self._members():
            member.advice += text if text not in member.advice else ""
            if member.launches is not None:
                member.launches.advice = member.advice

    def _members(self) -> list[PeerLinks]:
        return [member for reference in self._family if (member := reference()) is not None]

    def slot(self, port: int) -> int:
        return self.number * PORTS + port

    def check(self) -> None:
        """Raise `CollectiveError` after a failure, which it names, or in a process that was forked."""
        if self.broken is None and os.getpid() == self._process:
            return
        self.check_process()
        self._raise_verdict()
        where = " over a new process group, as this one's collectives on devices were aborted"
        raise CollectiveError(
            f"{self.rank_label}: this communicator is closed since an earlier failure ({self.broken}); "
            f"build a new optimizer{where if self._aborted_collectives else ''}"
        )

    def check_process(self) -> None:
        """Raise `CollectiveError` in a process that was forked from the rank's own."""
        if os.getpid() != self._process:
            raise CollectiveError(
                f"{self.rank_label}: process {os.getpid()} was forked from the rank's own, {self._process}, "
                "which alone may communicate with the other ranks: evaluate or save a copy of the model that was made "
                "before the fork, at stage 3 inside 'with optimizer.gathered():'"
            )

    def _raise_verdict(self) -> None:
        """Raise the sentinel's error, once."""
        verdict = None if self.launches is None else self.launches.take_verdict()
        if verdict is not None:
            raise verdict

    # -- short messages -------------------------------------------------------------------------------------------

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

    def wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag, patience: float = 0.0) -> bytes:
        """``patience``: seconds beyond the time limit, for a peer that may itself wait."""
        if self.broken is not None or os.getpid() != self._process:  # as `check`, without a call
            self.check()
        begin = time.monotonic()
        try:
            return pending.wait(self.states[peer].limit + patience)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def cut_off(self, error: BaseException, peer: int, tag: Tag) -> BaseException:
        """Return the error to raise if one occurs inside a message.

        After an interrupt or an unexpected error between a header and its bytes the rest of the sequence is unknown, so
        this rank aborts. If the group is closed already, the error names the cause and is returned as it is.
        """
        if self.broken is not None:
            return error
        if isinstance(error, PeerError):
            return self._no_answer(peer, tag, time.monotonic(), error)
        self.abort(f"{self.rank_label}, in {tag.label}: {type(error).__name__}: {error}")
        return error

    def _no_answer(self, peer: int, tag: Tag, begin: float, error: PeerError) -> CollectiveError:
        self._raise_verdict()
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
        """Post the receive of a rank's failure report, once."""
        state = self.states[peer]
        if state.report is None:
            state.report = self.backend.recv_bytes(REPORT_BYTES, self.ranks[peer], self.slot(FAILURE_PORT))
        return state.report

    def _failure_report(self, peer: int, error: PeerError) -> Failure | None:
        """Return the failure report of a peer that will send nothing more; None if it sent none."""
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
        """Return the next header of a peer that will send nothing more."""
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
                f"trainable{self.advice}"
            )
        )

    def fail(self, error: CollectiveError, failure: Failure | None = None) -> CollectiveError:
        self.abort(str(error), failure)
        self._raise_verdict()
        return error

    def abort(self, reason: str, failure: Failure | None = None) -> list[int]:
        """Report to every other rank that this one failed, and return the ranks that the report cannot reach. These
        links and those attached to them are closed then. ``failure``: the cause, if it is another rank's."""
        if os.getpid() != self._process:
            return list(self.peers)
        unreached: list[int] = []
        for member in self._members():
            if member.broken is None:
                found = member._abort(reason, failure or Failure(self.labels[self.rank], reason))
                unreached = found if member is self else unreached
        self._abort_collectives()  # when all reports are out: it may take its time
        return unreached

    def _abort_collectives(self) -> None:
        members = self._members()
        for backend in {id(member.backend): member.backend for member in members}.values():
            with suppress(Exception):  # the failure that is reported is the one to raise
                if backend.abort_collectives():
                    for member in members:
                        member._aborted_collectives = True

    def _abort(self, reason: str, failure: Failure) -> list[int]:
        self.broken, unreached = reason, list[int]()
        if self.launches is not None:
            self.launches.failure = reason
        report, header = failure.pack(), Tag(Kind.ABORT, "abort").pack(0)
        # What was sent must outlive this object until its receivers have it.
        kept = [*self.unsent.values(), *(exposed for state in self.states for exposed in state.exposed.values())]
        for to in self.peers:
            try:
                kept.append(self.backend.send_bytes(report, self.ranks[to], self.slot(FAILURE_PORT), REPORT_WAIT))
                kept.append(self.send_header(header, to))
                if self.states[to].remote:
                    promised = FAILED + bytes(self.states[to].promised)
                    for port, failed in ((ACK_PORT, NOTHING_READ), (MARKER_PORT, FAILED), (CONTROL_PORT, promised)):
                        kept.append(self.backend.send_bytes(failed, self.ranks[to], self.slot(port)))
                if self.memory is not None:
                    for port in (
                        PAYLOAD_PORT,
                        RELEASE_PORT,
                        CONTROL_PORT,
                    ):  # where it may wait for an answer of this rank
                        self.memory.close_slot(self.ranks[to], self.slot(port))
            except Exception:  # a peer that is gone gets no report; the others still do
                unreached.append(to)
        keeper = threading.Timer(min(self.timeout, REPORT_KEPT), lambda kept: None, [kept])
        keeper.daemon = True
        keeper.start()
        return unreached
