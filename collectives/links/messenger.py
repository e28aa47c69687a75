"""Headers and bytes between this rank and each other rank, in order.

A message is a header of `HEADER_BYTES` on one port and its bytes on another:

    port 0   | header | header | header |        kind, round, index, digest, size, label, offset
    port 1   | bytes  |        | bytes  |        (a header of size 0 has no bytes)

The receiver knows which header it expects. Another header is an error that names both collectives, on both sides. An
abort is a header, too.

A control message (a meeting, an exchange) has a size that its receiver does not know before. Its bytes travel on a port
of their own, inside a host before its header. A network moves them only when the receiver has asked for them. There
they follow when this rank has read all headers and asked for the bytes of the others: a rank that has these knows that
its own were asked for, and may end. If they are many, they follow as a message.

If a peer dies, a network may not report it for the receive of a large message, nor for a send, but it does for the
receive of a short message. So over a network a short message follows each large one: its header, or, if the payload is
used part by part, a marker of one byte behind each part. Its arrival proves that the bytes before it arrived. And the
reader of a large message, or of one that goes one way (`Transport.isend`), sends an ack. A rank that fails still sends
acks and markers, so that the sends and receives of other ranks end.

The links between this rank and each other rank of a group: ports, waits, and what happens if a rank fails.

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

Knows: one backend, the ranks of one group, which message follows which. Does not know: what is sent, or what a
collective is.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..backend import Backend, Pending, PendingBytes
from ..launches.ledger import Launches
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
    header_offset,
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
        if self.broken is not None or os.getpid() != self._process:  # as `check`, without a call
            self.check()
        begin = time.monotonic()
        try:
            pending.wait(self.states[peer].limit)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag, patience: float = 0.0) -> bytes:
        """``patience``: seconds beyond the time limit, for a peer that may itself wait."""
        if self.broken is not None or os.getpid() != self._process:  # likewise
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
        self._abort_collectives()  # when all reports are out: it may take its time, or hang
        if self.launches is not None:
            self.launches.is_aborted = True
        return unreached

    def closed(self) -> list[int]:
        """Return the ranks whose connections are closed. Any thread may call this."""
        return [peer for peer in self.peers if self.backend.is_closed(self.ranks[peer])]

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


MARKER = b"h"
SMALL = 1 << 16  # bytes that a network accepts at once
MOST_DEFERRED = 256  # acks sent before the oldest is waited for, which was sent long ago by then


class Messenger(PeerLinks):
    """The messages of one transport."""

    def __init__(self, backend: Backend, ranks: Sequence[int], number: int, like: Messenger | None = None) -> None:
        """See `PeerLinks`."""
        super().__init__(backend, ranks, number, like)
        self.deferred: list[Send] = []  # sends whose wait is put off
        self._packed: tuple[Tag | None, int, bytes] = (None, 0, b"")
        self._unposted: deque[Recv] = deque()  # parts behind the first ones of messages
        self.by_tree = False  # control messages go by a tree, and not from each rank to every other

    def use_tree(self) -> None:
        """Note that control messages go by a tree."""
        self.by_tree = True

    # -- headers --------------------------------------------------------------------------------------------------

    def packed(self, tag: Tag, size: int) -> bytes:
        """Return ``tag.pack(size)``. The last result is kept: a collective sends and expects one header many times."""
        if self._packed[0] is not tag or self._packed[1] != size:
            self._packed = (tag, size, tag.pack(size))
        return self._packed[2]

    def expect(self, tag: Tag, size: int, source: int) -> Expected:
        """Expect a message of ``size`` bytes after all that are expected of this rank already."""
        expected = Expected(source, tag, size, self.packed(tag, size))
        self.states[source].expected.append(expected)
        self._post_headers(source)
        return expected

    def post_next_header(self, source: int, tag: Tag) -> None:
        """Post the receive of one header more than are expected, if the rank is remote."""
        try:
            self._post_headers(source, more=1)
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def _post_headers(self, source: int, more: int = 0) -> None:
        state = self.states[source]
        while state.remote and len(state.posted) + (state.unread_header is not None) < len(state.expected) + more:
            self.post_header(source)

    def next_header(self, source: int, tag: Tag, patience: float = 0.0) -> bytes:
        """Return the next header from ``source``, whatever it is. An abort raises. ``patience``: as of `wait_bytes`."""
        header = self._read_header(source, tag, patience)
        if is_abort(header):
            raise self.aborted(source, tag)
        return header

    def _read_header(self, source: int, tag: Tag, patience: float = 0.0) -> bytes:
        state = self.states[source]
        if state.unread_header is not None:
            header, state.unread_header = state.unread_header, None
            return header
        if not state.posted:
            try:
                self.post_header(source)
            except BaseException as error:
                raise self.cut_off(error, source, tag) from error
        header = self.wait_bytes(state.posted[0], source, tag, patience)
        state.posted.popleft()
        return header

    def confirm(self, work: Expected) -> None:
        """Read headers from ``work``'s source up to its own. They come in the order in which they are expected."""
        self.post_remaining()
        expected = self.states[work.source].expected
        while not work.confirmed:
            first = expected[0]
            header = self._read_header(work.source, first.tag)
            if not header.startswith(first.packed):
                if is_abort(header):
                    raise self.aborted(work.source, first.tag)
                theirs, size = Tag.unpack(header)
                if theirs.kind is Kind.MEET and theirs.round < first.tag.round:
                    ControlRecv(self, work.source, theirs, size).wait()
                    continue  # the rank had nothing to contribute to this round, and will catch up
                raise self.mismatch(work.source, first.tag, theirs, first.size, size)
            first.offset = header_offset(header)
            first.confirmed = True
            expected.popleft()

    def confirm_expected(self, source: int) -> None:
        """Read the headers of all messages that are under way from ``source``; they come before any other."""
        expected = self.states[source].expected
        if expected:
            self.confirm(expected[-1])

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Tensor], to: int, tag: Tag, *, one_way: bool = False) -> Send:
        """Send a header, and the parts of a tensor of bytes, of which none is empty. ``one_way``: see
        `Transport.isend`."""
        work, rank = Send(self, to, tag, sum(part.numel() for part in parts)), self.ranks[to]
        large, remote = work.size > SMALL, self.states[to].remote
        try:
            if remote and (large or one_way):
                work.ack_number = self._expect_ack(to)
            if large:
                work.pendings.append(self.send_header(self.packed(tag, work.size), to))
            for part in parts:
                work.pendings.append(self.backend.send(part, rank, self.slot(PAYLOAD_PORT)))
                if large and remote:
                    work.pendings.append(self.backend.send_bytes(MARKER, rank, self.slot(MARKER_PORT)))
                self.post_remaining()
            if not large:
                work.pendings.append(self.send_header(self.packed(tag, work.size), to))
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        return work

    def recv(self, parts: Sequence[Tensor], source: int, tag: Tag, *, one_way: bool = False) -> list[Recv]:
        """Expect what `send` sends. The parts are waited for in order. Without parts there is still a header."""
        size, state = sum(part.numel() for part in parts), self.states[source]
        expected = Expected(source, tag, size, self.packed(tag, size))
        works = [Recv(self, expected, part, last=False) for part in parts[:-1]]
        works.append(Recv(self, expected, parts[-1] if parts else None, last=True))
        try:
            if any(work.expected.source == source for work in self._unposted):
                self.post_remaining()  # in the order in which they are sent
            self._post(works[0])
            if state.remote and (size > SMALL or one_way):
                state.acks_due += 1
                expected.ack_number = state.acks_due
            state.expected.append(expected)
            self._post_headers(source)
            self._unposted.extend(works[1:])
            return works
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def post_remaining(self) -> None:
        """Post the receives of all parts after the first ones. That is put off until this rank has sent a first part,
        whose transfer hides the cost, or has nothing more to send."""
        while self._unposted:
            self.check()
            self._post(self._unposted[0])
            self._unposted.popleft()

    def _post(self, work: Recv) -> None:
        """Post the receive of a part. After an interrupt it may be called again."""
        source, tag = work.expected.source, work.expected.tag
        try:
            if work.part is not None and work.payload is None:
                work.payload = self.backend.recv(work.part, self.ranks[source], self.slot(PAYLOAD_PORT))
            if work.marker is None and work.expected.size > SMALL and self.states[source].remote:
                work.marker = self.backend.recv_bytes(1, self.ranks[source], self.slot(MARKER_PORT))
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def _expect_ack(self, to: int) -> int:
        """Post the receive of the ack of a message, before the message itself, and return the number of the message.

        A network may not report a send that was lost with its peer. An ack proves that the peer has read the message.
        Both sides count the acknowledged messages in the order in which they are sent. A peer reads them in the order
        of its waits, which may be another, so an ack says which message it is for.
        """
        state = self.states[to]
        state.acks.append(self.backend.recv_bytes(ACK.size, self.ranks[to], self.slot(ACK_PORT)))
        state.acks_expected += 1
        state.unread.add(state.acks_expected)
        return state.acks_expected

    def wait_ack(self, to: int, number: int, tag: Tag) -> None:
        """Return when a message was read."""
        state = self.states[to]
        while number in state.unread:
            ack = self.wait_bytes(state.acks[0], to, tag)
            if ack == NOTHING_READ:
                raise self.aborted(to, tag)
            state.unread.discard(*ACK.unpack(ack))
            state.acks.popleft()

    def wait_marker(self, marker: PendingBytes, source: int, tag: Tag) -> None:
        if self.wait_bytes(marker, source, tag) == FAILED:
            raise self.aborted(source, tag)

    def acknowledge(self, read: Expected) -> None:
        """Send the ack of a message, unless it was sent."""
        self.check()
        try:
            number, read.ack_number = read.ack_number, 0
            if number:
                pending = self.backend.send_bytes(ACK.pack(number), self.ranks[read.source], self.slot(ACK_PORT))
                self.deferred.append(Send(self, read.source, read.tag, ACK.size, [pending]))
        except BaseException as error:
            raise self.cut_off(error, read.source, read.tag) from error
        while len(self.deferred) > MOST_DEFERRED:
            self.deferred.pop(0).wait()

    def follows(self, size: int, peer: int) -> bool:
        """Return whether the bytes of a control message to or from a rank follow its header."""
        return size > SMALL or (size > 0 and self.states[peer].remote and not self.by_tree)

    def send_control(self, data: bytes, to: int, tag: Tag, *, acked: bool = False) -> Send:
        """Send the bytes of a control message, unless they follow, and a header with their number.

        ``acked``: the receiver calls `acknowledge_control` if they are few. Pass it unless this rank, before its own
        call returns, waits for something that ``to`` sends after it has asked for the bytes.
        """
        pendings: list[Pending] = []
        ack_number, state = 0, self.states[to]
        few = 0 if self.follows(len(data), to) else len(data)
        try:
            if acked and state.remote and len(data) <= SMALL:
                ack_number = self._expect_ack(to)
            if few:
                pendings.append(self.backend.send_bytes(data, self.ranks[to], self.slot(CONTROL_PORT)))
            state.promised = len(data) - few if len(data) <= SMALL else 0
            pendings.append(self.send_header(self.packed(tag, len(data)), to))
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        self.counted.control_sent += few
        sent = Send(self, to, tag, few, pendings)
        sent.ack_number = ack_number
        return sent

    def send_body(self, data: bytes, ranks: Iterable[int], tag: Tag) -> list[Send]:
        """Send the bytes that `send_control` left to several ranks, of which this rank has asked for theirs."""
        sends = list[Send]()
        many = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) > SMALL else None
        for to in ranks:
            if self.follows(len(data), to):
                self.counted.control_sent += len(data)
                sends.append(self._send_promised(data, to, tag) if many is None else self.send([many], to, tag))
        return sends

    def _send_promised(self, data: bytes, to: int, tag: Tag) -> Send:
        """Send the bytes that a header has announced. The marker before them tells them from those of a failed rank."""
        try:
            pending = self.backend.send_bytes(MARKER + data, self.ranks[to], self.slot(CONTROL_PORT))
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        self.states[to].promised = 0
        self.counted.control_sent += len(MARKER)
        return Send(self, to, tag, len(data), [pending])

    def acknowledge_control(self, source: int, tag: Tag) -> None:
        """Acknowledge a control message of few bytes."""
        state = self.states[source]
        if state.remote:
            state.acks_due += 1
            read = Expected(source, tag, 0, b"")
            read.ack_number = state.acks_due
            self.acknowledge(read)


class Send:
    """A message under way. The messenger holds it until its wait: a backend may drop a transfer that is not held."""

    def __init__(self, messenger: Messenger, to: int, tag: Tag, size: int, pendings: Sequence[Pending] = ()) -> None:
        self._messenger, self._to, self._tag, self.size = messenger, to, tag, size
        self.remote = messenger.states[to].remote
        self.pendings = list(pendings)
        self.ack_number = 0  # of the ack that confirms this message; 0: there is none
        messenger.unsent[id(self)] = self

    def wait(self) -> None:
        if self.ack_number:
            self._messenger.wait_ack(self._to, self.ack_number, self._tag)
        while self.pendings:
            self._messenger.wait(self.pendings[0], self._to, self._tag)
            self.pendings.pop(0)
        self._messenger.unsent.pop(id(self), None)


class DeferredSends:
    """Sends whose wait is put off to the next exchange.

    A peer posts its receive before it sends the messages that this rank has read since, so these sends have started. A
    wait now could block if the peer has just died. By the next exchange, this rank has received from the peers again.
    """

    def __init__(self, messenger: Messenger, sends: Sequence[Send]) -> None:
        self._messenger, self._sends = messenger, sends

    def wait(self) -> None:
        now, later = [*self._messenger.deferred], list[Send]()
        for send in self._sends:
            (later if send.remote and send.size <= SMALL and not send.ack_number else now).append(send)
        for send in now:
            send.wait()
        self._messenger.deferred[:] = later
        self._sends = ()


class ControlRecv:
    """The bytes of a control message whose header has come."""

    def __init__(self, messenger: Messenger, source: int, tag: Tag, size: int) -> None:
        """``tag``, ``size``: those of the header."""
        self._messenger, self._source, self._tag, self.size = messenger, source, tag, size
        self._pending: PendingBytes | None = None
        self._rest: tuple[Recv, Tensor] | None = None
        self._follows = messenger.follows(size, source)
        if size and not self._follows:
            self._pending = messenger.recv_bytes(size, source, CONTROL_PORT, tag)
            messenger.counted.control_received += size

    def post_body(self) -> None:
        """Post the receive of bytes that follow, which are sent when all headers have come."""
        if not self._follows:
            return
        size = self.size
        if size <= SMALL:
            size += len(MARKER)
            self._pending = self._messenger.recv_bytes(size, self._source, CONTROL_PORT, self._tag)
        else:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
            (work,) = self._messenger.recv([data], self._source, self._tag)
            self._rest = work, data
        self._messenger.counted.control_received += size

    def wait(self) -> bytes:
        """Return the bytes; none if they follow and were not asked for."""
        if self._pending is not None:
            received = self._messenger.wait_bytes(self._pending, self._source, self._tag)
            if self._follows and received.startswith(FAILED):
                raise self._messenger.aborted(self._source, self._tag)
            return received[len(MARKER) :] if self._follows else received
        if self._rest is None:
            return b""
        work, data = self._rest
        work.wait()
        return data.numpy().tobytes()


class Recv:
    """A part of a message that is expected from one rank. The header is checked before the bytes are used."""

    def __init__(self, messenger: Messenger, expected: Expected, part: Tensor | None, *, last: bool) -> None:
        """``last``: when this part was read, the message was read."""
        self._messenger, self.expected, self._last = messenger, expected, last
        self.part = part  # None: the message has no part, or it was read
        self.payload: Pending | None = None  # the receive into ``part``, when it is posted
        self.marker: PendingBytes | None = None  # the marker behind a part of a large message

    def wait(self) -> None:
        messenger, expected = self._messenger, self.expected
        messenger.confirm(expected)
        if self.marker is not None:
            messenger.wait_marker(self.marker, expected.source, expected.tag)
            self.marker = None
        if self.part is not None:
            assert self.payload is not None, "a part's receive is posted before its header is confirmed"
            messenger.wait(self.payload, expected.source, expected.tag)
            self.part = self.payload = None  # it was read
        if self._last and expected.ack_number:
            messenger.acknowledge(expected)
