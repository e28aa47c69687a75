"""Headers and bytes between this rank and each of the others, in order, and what failures are blamed on.

Each message is a header of `HEADER_BYTES` on one lane and its bytes on another, both first-in-first-out for a pair of
ranks:

    lane 0   | header | header | header |        kind, round, index, digest, size, label, place
    lane 1   | bytes  |        | bytes  |        (a header of size 0 has none)
    lane 2   text of an abort
    lane 3   "I have read what you lent me", where bytes stay in memory that both sides see (`lending`)

The receiver says which header it expects. Another one is an error that names both, on both sides, and an abort is a
header too: so a rank that waits learns at once why nothing will come, and the carrier itself stays whole for its user.

Knows: one carrier, and the ranks of one group. Does not know: what is sent, or what a collective is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .carriers import ByteCarrier, ByTensors, Carrier, Memory, Pending, PendingBytes
from .messages import (
    HEADER_BYTES,
    CollectiveError,
    GoneError,
    Kind,
    MismatchError,
    PeerError,
    Tag,
    at,
    is_abort,
    place_of,
)

HEADER_LANE, PAYLOAD_LANE, TEXT_LANE, RETURN_LANE, LANES = 0, 1, 2, 3, 4
LAST_WORDS = 60.0  # seconds for which a failed rank's messages are kept for their receivers


@dataclass
class Counters:
    """`messages.Traffic` while it grows."""

    sent: int = 0
    received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0


class Stream:
    """Messages of one rank: headers asked for, those expected, at most one that was read and put back, and what this
    rank lends it."""

    def __init__(self) -> None:
        self.posted: deque[PendingBytes] = deque()
        self.expected: deque[Expected] = deque()
        self.returned: bytes | None = None
        self.lent: dict[int, Tensor] = {}  # by number, as both sides count
        self.lends = self.borrowed = 0
        self.coming_back: PendingBytes | None = None


class Expected:
    """A header that is expected from one rank."""

    __slots__ = ("confirmed", "packed", "place", "size", "source", "tag")

    def __init__(self, source: int, tag: Tag, size: int, packed: bytes) -> None:
        self.source, self.tag, self.size, self.packed = source, tag, size, packed
        self.confirmed, self.place = False, 0


class Send:
    """A message under way. The channel holds it until it was waited for: a carrier may drop what nobody holds."""

    def __init__(self, channel: Channel, pendings: Sequence[Pending], to: int, tag: Tag) -> None:
        self._channel, self._pendings, self._to, self._tag = channel, list(pendings), to, tag
        channel.unsent[id(self)] = self

    def wait(self) -> None:
        while self._pendings:
            self._channel.wait(self._pendings[0], self._to, self._tag)
            self._pendings.pop(0)
        self._channel.unsent.pop(id(self), None)


class Recv:
    """A part of a message that is expected from one rank. The header is read before its bytes are believed."""

    def __init__(self, channel: Channel, expected: Expected, payload: Pending | None) -> None:
        self._channel, self._expected, self._payload = channel, expected, payload

    def wait(self) -> None:
        self._channel.confirm(self._expected)
        if self._payload is not None:
            self._channel.wait(self._payload, self._expected.source, self._expected.tag)
            self._payload = None


class Channel:
    """The messages of one transport. Ranks are those of the group; ``ranks`` says what the carrier calls them."""

    def __init__(self, carrier: Carrier, ranks: Sequence[int], number: int, like: Channel | None = None) -> None:
        """``number``: keeps messages of several channels apart. ``like``: the channel with which this one is counted,
        and fails."""
        self.carrier, self.ranks, self.number = carrier, tuple(ranks), number
        self.bytes: ByteCarrier = carrier if isinstance(carrier, ByteCarrier) else ByTensors(carrier)
        self.memory: Memory | None = carrier if isinstance(carrier, Memory) else None
        self.rank, self.timeout = self.ranks.index(carrier.rank), carrier.timeout
        self._header_slot = self.slot(HEADER_LANE)
        self.peers = [(self.rank + i) % len(ranks) for i in range(1, len(ranks))]
        self.counted: Counters = Counters() if like is None else like.counted
        self._family: list[weakref.ref[Channel]] = [] if like is None else like._family
        self._family.append(weakref.ref(self))
        self.broken: str | None = None
        self.unsent: dict[int, Send] = {}  # sends that nobody has waited for yet
        self.streams = [Stream() for _ in ranks]
        self._packed: tuple[Tag | None, int, bytes] = (None, 0, b"")

    def slot(self, lane: int) -> int:
        return self.number * LANES + lane

    def check(self) -> None:
        """Raise `CollectiveError`, naming the failure, where there was one."""
        if self.broken is not None:
            raise CollectiveError(
                f"rank {self.rank}: this communicator is closed since an earlier failure ({self.broken}); "
                "build a new optimizer"
            )

    # -- headers --------------------------------------------------------------------------------------------------

    def packed(self, tag: Tag, size: int) -> bytes:
        """``tag.pack(size)``; the one before is kept, as a collective sends and expects the same many times."""
        if self._packed[0] is not tag or self._packed[1] != size:
            self._packed = (tag, size, tag.pack(size))
        return self._packed[2]

    def send_header(self, packed: bytes, to: int, place: int = 0) -> Pending:
        self.counted.control_sent += HEADER_BYTES
        self.counted.messages += 1
        return self.bytes.send_bytes(at(packed, place), self.ranks[to], self._header_slot)

    def expect(self, tag: Tag, size: int, source: int) -> Expected:
        """Expect a message of ``size`` bytes after all that were expected of this rank before."""
        if self.bytes.posts(self.ranks[source]):
            self._post_header(source)
        expected = Expected(source, tag, size, self.packed(tag, size))
        self.streams[source].expected.append(expected)
        return expected

    def _post_header(self, source: int) -> None:
        pending = self.bytes.recv_bytes(HEADER_BYTES, self.ranks[source], self._header_slot)
        self.streams[source].posted.append(pending)
        self.counted.control_received += HEADER_BYTES

    def next_header(self, source: int, tag: Tag) -> bytes:
        """The next header from ``source``, whatever it is; an abort raises."""
        header = self._read_header(source, tag)
        if is_abort(header):
            raise self._aborted(header, source, tag)
        return header

    def _read_header(self, source: int, tag: Tag) -> bytes:
        stream = self.streams[source]
        if stream.returned is not None:
            header, stream.returned = stream.returned, None
            return header
        if not stream.posted:
            try:
                self._post_header(source)
            except BaseException as error:
                raise self.cut_off(error, source, tag) from error
        header = self.wait_bytes(stream.posted[0], source, tag)
        stream.posted.popleft()
        return header

    def confirm(self, work: Expected) -> None:
        """Read headers from ``work``'s source up to its own; they come in the order in which they were expected."""
        expected = self.streams[work.source].expected
        while not work.confirmed:
            first = expected[0]
            header = self._read_header(work.source, first.tag)
            if not header.startswith(first.packed):
                if is_abort(header):
                    raise self._aborted(header, work.source, first.tag)
                theirs, size = Tag.unpack(header)
                if theirs.kind is Kind.MEET and theirs.round < first.tag.round:
                    continue  # it had nothing of its own for this round, and will catch up
                raise self.mismatch(work.source, first.tag, theirs, first.size, size)
            first.place = place_of(header)
            first.confirmed = True
            expected.popleft()

    def confirm_expected(self, source: int) -> None:
        """Read the headers of all that is still under way from ``source``, which come before any other."""
        expected = self.streams[source].expected
        if expected:
            self.confirm(expected[-1])

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Tensor], to: int, tag: Tag) -> Send:
        """A header, and the parts of a tensor of bytes behind it, of which none is empty."""
        try:
            pendings = [self.send_header(self.packed(tag, _size(parts)), to)]
            pendings += [self.carrier.send(part, self.ranks[to], self.slot(PAYLOAD_LANE)) for part in parts]
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        return Send(self, pendings, to, tag)

    def recv(self, parts: Sequence[Tensor], source: int, tag: Tag) -> list[Recv]:
        """Expect what `send` sends; the parts are to be waited for in order. Of no parts there is still a header."""
        try:
            expected = self.expect(tag, _size(parts), source)
            payloads = [self.carrier.recv(part, self.ranks[source], self.slot(PAYLOAD_LANE)) for part in parts]
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error
        return [Recv(self, expected, payload) for payload in payloads] or [Recv(self, expected, None)]

    def send_control(self, data: bytes, to: int, tag: Tag) -> Send:
        """A header, and a few bytes behind it."""
        try:
            pendings = [self.send_header(self.packed(tag, len(data)), to)]
            if data:
                pendings.append(self.bytes.send_bytes(data, self.ranks[to], self.slot(PAYLOAD_LANE)))
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        self.counted.control_sent += len(data)
        return Send(self, pendings, to, tag)

    def recv_control(self, source: int, tag: Tag) -> bytes:
        """The bytes that come next from ``source``, however many."""
        self.confirm_expected(source)
        theirs, size = Tag.unpack(self.next_header(source, tag))
        if not theirs.same(tag):
            raise self.mismatch(source, tag, theirs)
        self.counted.control_received += size
        return self.wait_bytes(self.recv_bytes(size, source, PAYLOAD_LANE, tag), source, tag) if size else b""

    def recv_bytes(self, size: int, source: int, lane: int, tag: Tag) -> PendingBytes:
        try:
            return self.bytes.recv_bytes(size, self.ranks[source], self.slot(lane))
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    # -- waiting and failing --------------------------------------------------------------------------------------

    def wait(self, pending: Pending, peer: int, tag: Tag) -> None:
        self.check()
        begin = time.monotonic()
        try:
            pending.wait(self.timeout)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag) -> bytes:
        if self.broken is not None:
            self.check()
        begin = time.monotonic()
        try:
            return pending.wait(self.timeout)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def cut_off(self, error: BaseException, peer: int, tag: Tag) -> BaseException:
        """What to raise where a message was begun: after an interrupt or a strange error between a header and its bytes
        nobody knows what the next bytes are."""
        if isinstance(error, PeerError):
            return self._no_answer(peer, tag, time.monotonic(), error)
        self.abort(f"rank {self.rank}, in {tag.label}: {type(error).__name__}: {error}")
        return error

    def _no_answer(self, peer: int, tag: Tag, begin: float, error: PeerError) -> CollectiveError:
        reason = self._last_words(peer) if isinstance(error, GoneError) else None
        if reason is not None:
            return self._told(peer, tag, reason)
        waited = time.monotonic() - begin
        text = f"rank {self.rank}, in {tag.label}: no answer from rank {peer} after {waited:.1f} s ({error})"
        return self.fail(PeerError(text))

    def _aborted(self, header: bytes, source: int, tag: Tag) -> CollectiveError:
        _, size = Tag.unpack(header)
        text = self.wait_bytes(self.recv_bytes(size, source, TEXT_LANE, tag), source, tag)
        return self._told(source, tag, text.decode(errors="replace"))

    def _told(self, peer: int, tag: Tag, reason: str) -> CollectiveError:
        return self.fail(PeerError(f"rank {self.rank}, in {tag.label}: rank {peer} failed: {reason}"))

    def _last_words(self, peer: int) -> str | None:
        """Why a peer failed that will say nothing more; None where it has not said so."""
        posted = self.streams[peer].posted
        try:
            while True:
                if not posted:
                    self._post_header(peer)
                header = posted.popleft().wait(0.0)
                if is_abort(header):
                    _, size = Tag.unpack(header)
                    text = self.bytes.recv_bytes(size, self.ranks[peer], self.slot(TEXT_LANE))
                    return text.wait(0.0).decode(errors="replace")
        except PeerError:
            return None

    def mismatch(self, source: int, mine: Tag, theirs: Tag, size: int = 0, their_size: int = 0) -> CollectiveError:
        sizes = f" ({size} and {their_size} bytes)" if size != their_size and mine.same(theirs) else ""
        return self.fail(
            MismatchError(
                f"rank {self.rank} is in {_describe(mine)}, but rank {source} is in {_describe(theirs)}{sizes}: all "
                "ranks of a group must make the same calls in the same order, with the same parameters trainable"
            )
        )

    def fail(self, error: CollectiveError) -> CollectiveError:
        self.abort(str(error))
        return error

    def abort(self, reason: str) -> list[int]:
        """Tell every other rank that this one failed, and return those that could not be told. The channel and its
        family are of no use afterwards."""
        untold: list[int] = []
        for reference in self._family:
            member = reference()
            if member is not None and member.broken is None:
                found = member._abort(reason)
                untold = found if member is self else untold
        return untold

    def _abort(self, reason: str) -> list[int]:
        self.broken, untold = reason, list[int]()
        text = reason.encode()[:4096] or b"?"
        tag = Tag(Kind.ABORT, "abort")
        for to in self.peers:
            try:
                header = self.send_header(tag.pack(len(text)), to)
                words = self.bytes.send_bytes(text, self.ranks[to], self.slot(TEXT_LANE))
                Send(self, [header, words], to, tag)
                if self.memory is not None:
                    for lane in (PAYLOAD_LANE, RETURN_LANE):  # where it may wait for what is not read any more
                        self.memory.give_up(self.ranks[to], self.slot(lane))
            except Exception:  # a peer that is gone cannot be told; the others still are
                untold.append(to)
        # What was sent must outlive this object until its receivers ask for it.
        kept = [*self.unsent.values(), *(lent for stream in self.streams for lent in stream.lent.values())]
        keeper = threading.Timer(min(self.timeout, LAST_WORDS), lambda kept: None, [kept])
        keeper.daemon = True
        keeper.start()
        return untold


def _describe(tag: Tag) -> str:
    return f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"


def _size(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"a 1-D contiguous tensor is needed, not shape {tuple(tensor.shape)}")
    return tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
