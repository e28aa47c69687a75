"""Headers and bytes between this rank and each of the others, in order, and what failures are blamed on.

Each message is a header of `HEADER_BYTES` on one lane and its bytes on another, both first-in-first-out for a pair of
ranks:

    lane 0   | header | header | header |        kind, round, index, digest, size, label, place
    lane 1   | bytes  |        | bytes  |        (a header of size 0 has none)
    lane 2   why a rank failed
    lane 3   "I have read what you lent me", where bytes stay in memory that both sides see (`lending`)
    lane 4   "I have read what you sent me", where it is much, and came over a network
    lane 5   "a part of it has left", behind each part

The receiver says which header it expects. Another one is an error that names both, on both sides, and an abort is a
header too: so a rank that waits learns at once why nothing will come, and the carrier itself stays whole for its user.

Over a network nothing leaves before its receiver has asked for it. So why a rank failed is asked for from the start,
and is still heard when that rank is gone. Something small is asked for, and sent, behind a message's bytes: its header,
or where they are many, and used part by part, a byte behind each part. For a network may never tell of an end in the
middle of many bytes, but of one before something small it does, and when that is here, they are.
And a rank that asks for all that it expects before it sends lets the others' sends end, also where it fails then.

Knows: one carrier, and the ranks of one group. Does not know: what is sent, or what a collective is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from .carriers import ByteCarrier, ByTensors, Carrier, Memory, Pending, PendingBytes
from .inflight import SMALL, Counters, Expected, Recv, Send, Stream
from .messages import (
    HEADER_BYTES,
    WORDS_BYTES,
    CollectiveError,
    Failure,
    GoneError,
    Kind,
    MismatchError,
    PeerError,
    Tag,
    at,
    describe,
    is_abort,
    place_of,
)

HEADER_LANE, PAYLOAD_LANE, TEXT_LANE, RETURN_LANE, ANSWER_LANE, HERE_LANE, LANES = 0, 1, 2, 3, 4, 5, 6
READ, HERE, GAVE_UP = b"r", b"h", b"g"
MOST_SETTLED = 256  # answers that are not waited for; of more, the oldest have left long ago
LAST_WORDS = 60.0  # seconds for which a failed rank's messages are kept for their receivers
GRACE = 1.0  # seconds
LISTEN = 0.5  # seconds in which the words of a rank that is gone are here, if it said any


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
        self.settled: list[Send] = []  # of these, those that nobody need wait for
        # A rank of this host may itself wait for one of another, and is to say so before it is given up.
        distant = [self.bytes.posts(carried) for carried in self.ranks]
        near = self.timeout + GRACE if any(distant) else self.timeout
        self.streams = [Stream(far, self.timeout if far else near) for far in distant]
        self._packed: tuple[Tag | None, int, bytes] = (None, 0, b"")
        for peer in self.peers:
            if self.streams[peer].distant:
                with suppress(PeerError):  # who is gone already is told of when something is expected of it
                    self._listen(peer)

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
        stream = self.streams[source]
        if stream.distant:
            self._ask(source)
        expected = Expected(source, tag, size, self.packed(tag, size))
        stream.expected.append(expected)
        return expected

    def ask(self, source: int, tag: Tag) -> None:
        """Ask for one header more than are expected, where that is of use now."""
        try:
            self._ask(source)
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def _ask(self, source: int) -> None:
        stream = self.streams[source]
        if stream.distant and len(stream.posted) + (stream.returned is not None) <= len(stream.expected):
            self._post_header(source)

    def _post_header(self, source: int) -> None:
        pending = self.bytes.recv_bytes(HEADER_BYTES, self.ranks[source], self._header_slot)
        self.streams[source].posted.append(pending)
        self.counted.control_received += HEADER_BYTES

    def next_header(self, source: int, tag: Tag) -> bytes:
        """The next header from ``source``, whatever it is; an abort raises."""
        header = self._read_header(source, tag)
        if is_abort(header):
            raise self._aborted(source, tag)
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
                    raise self._aborted(work.source, first.tag)
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
            pendings = self._send_all(parts, to, tag)
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        return Send(self, pendings, to, tag, _size(parts))

    def _send_all(self, parts: Sequence[Tensor], to: int, tag: Tag) -> list[Pending]:
        size, rank, slot = _size(parts), self.ranks[to], self.slot(PAYLOAD_LANE)
        if size <= SMALL:
            return [
                *(self.carrier.send(part, rank, slot) for part in parts),
                self.send_header(self.packed(tag, size), to),
            ]
        pendings = [self.send_header(self.packed(tag, size), to)]
        for part in parts:
            pendings.append(self.carrier.send(part, rank, slot))
            if self.streams[to].distant:
                pendings.append(self.bytes.send_bytes(HERE, rank, self.slot(HERE_LANE)))
        if self.streams[to].distant:
            self._ask_answer(to)
        return pendings

    def _recv_part(self, part: Tensor, source: int, size: int) -> tuple[Pending, PendingBytes | None]:
        payload, here = self.carrier.recv(part, self.ranks[source], self.slot(PAYLOAD_LANE)), None
        if size > SMALL and self.streams[source].distant:
            here = self.bytes.recv_bytes(1, self.ranks[source], self.slot(HERE_LANE))
        return payload, here

    def recv(self, parts: Sequence[Tensor], source: int, tag: Tag) -> list[Recv]:
        """Expect what `send` sends; the parts are to be waited for in order. Of no parts there is still a header."""
        size = _size(parts)
        try:
            payloads = [self._recv_part(part, source, size) for part in parts if size <= SMALL]
            expected = self.expect(tag, size, source)
            payloads += [self._recv_part(part, source, size) for part in parts if size > SMALL]
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error
        last = len(payloads) - 1
        works = [Recv(self, expected, *payload, last=n == last) for n, payload in enumerate(payloads)]
        return works or [Recv(self, expected, None, None, last=False)]

    def _ask_answer(self, to: int) -> None:
        """To many bytes: a network may never say that they did not leave, where their reader is gone; but a peer that
        answers has read them, and one that is gone does not answer."""
        stream = self.streams[to]
        stream.answers.append(self.bytes.recv_bytes(1, self.ranks[to], self.slot(ANSWER_LANE)))
        stream.asked += 1

    def wait_answers(self, to: int, number: int, tag: Tag) -> None:
        stream = self.streams[to]
        while stream.answered < number:
            if self.wait_bytes(stream.answers[0], to, tag) == GAVE_UP:
                raise self._aborted(to, tag)
            stream.answers.popleft()
            stream.answered += 1

    def wait_here(self, here: PendingBytes, source: int, tag: Tag) -> None:
        if self.wait_bytes(here, source, tag) == GAVE_UP:
            raise self._aborted(source, tag)

    def answer(self, read: Expected) -> None:
        """Say that the bytes of a message were read, where that is waited for."""
        stream = self.streams[read.source]
        if stream.distant and read.size > SMALL:
            try:
                said = self.bytes.send_bytes(READ, self.ranks[read.source], self.slot(ANSWER_LANE))
            except BaseException as error:
                raise self.cut_off(error, read.source, read.tag) from error
            self.settled.append(Send(self, [said], read.source, read.tag, len(READ)))
            while len(self.settled) > MOST_SETTLED:
                self.settled.pop(0).wait()

    def send_control(self, data: bytes, to: int, tag: Tag) -> list[Send]:
        """A header that says how many bytes there are, and those at once where no network is in the way."""
        try:
            pendings = [self.send_header(self.packed(tag, len(data)), to)]
            size = 0 if self.streams[to].distant else len(data)
            if size:
                pendings.append(self.bytes.send_bytes(data, self.ranks[to], self.slot(PAYLOAD_LANE)))
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        self.counted.control_sent += len(data)
        return [Send(self, pendings, to, tag, size)]

    def send_rest(self, data: bytes, to: int, tag: Tag) -> list[Send]:
        """What `send_control` has left. Called when all that comes from the others was asked for."""
        if not data or not self.streams[to].distant:
            return []
        return [self.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], to, tag)]

    def recv_control(self, source: int, tag: Tag) -> Callable[[], bytes]:
        """Read how many bytes come next from ``source``; what is returned waits for them."""
        self.confirm_expected(source)
        theirs, size = Tag.unpack(self.next_header(source, tag))
        if not theirs.same(tag):
            raise self.mismatch(source, tag, theirs)
        self.counted.control_received += size
        if not size:
            return bytes
        if not self.streams[source].distant:
            return lambda: self.wait_bytes(self.recv_bytes(size, source, PAYLOAD_LANE, tag), source, tag)
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        (work,) = self.recv([data], source, tag)

        def wait() -> bytes:
            work.wait()
            return data.numpy().tobytes()

        return wait

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
            pending.wait(self.streams[peer].limit)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag) -> bytes:
        if self.broken is not None:
            self.check()
        begin = time.monotonic()
        try:
            return pending.wait(self.streams[peer].limit)
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
        failure = self._last_words(peer, error)
        if failure is not None:
            return self._told(tag, failure)
        waited = time.monotonic() - begin
        text = f"rank {self.rank}, in {tag.label}: no answer from rank {peer} after {waited:.1f} s ({error})"
        return self.fail(PeerError(text), Failure(peer, text))

    def _aborted(self, source: int, tag: Tag) -> CollectiveError:
        return self._told(tag, Failure.unpack(self.wait_bytes(self._listen(source), source, tag)))

    def _told(self, tag: Tag, failure: Failure) -> CollectiveError:
        text = f"rank {self.rank}, in {tag.label}: rank {failure.culprit} failed: {failure.reason}"
        return self.fail(PeerError(text), failure)

    def _listen(self, peer: int) -> PendingBytes:
        """Expect to hear, once, why a rank failed."""
        stream = self.streams[peer]
        if stream.words is None:
            stream.words = self.bytes.recv_bytes(WORDS_BYTES, self.ranks[peer], self.slot(TEXT_LANE))
        return stream.words

    def _last_words(self, peer: int, error: PeerError) -> Failure | None:
        """Why a peer failed that will say nothing more; None where it has not said so."""
        try:
            if self.streams[peer].distant:
                return Failure.unpack(self._listen(peer).wait(LISTEN))
            while isinstance(error, GoneError):
                if is_abort(self._read_now(peer)):
                    return Failure.unpack(self._listen(peer).wait(0.0))
        except PeerError:
            pass
        return None

    def _read_now(self, peer: int) -> bytes:
        """The next header of a peer that will say nothing more."""
        posted = self.streams[peer].posted
        if not posted:
            self._post_header(peer)
        return posted.popleft().wait(0.0)

    def mismatch(self, source: int, mine: Tag, theirs: Tag, size: int = 0, their_size: int = 0) -> CollectiveError:
        sizes = f" ({size} and {their_size} bytes)" if size != their_size and mine.same(theirs) else ""
        return self.fail(
            MismatchError(
                f"rank {self.rank} is in {describe(mine)}, but rank {source} is in {describe(theirs)}{sizes}: all "
                "ranks of a group must make the same calls in the same order, with the same parameters trainable"
            )
        )

    def fail(self, error: CollectiveError, failure: Failure | None = None) -> CollectiveError:
        self.abort(str(error), failure)
        return error

    def abort(self, reason: str, failure: Failure | None = None) -> list[int]:
        """Tell every other rank that this one failed, because of ``failure`` or else by itself, and return those that
        could not be told. The channel and its family are of no use afterwards."""
        untold: list[int] = []
        for reference in self._family:
            member = reference()
            if member is not None and member.broken is None:
                found = member._abort(reason, failure or Failure(self.rank, reason))
                untold = found if member is self else untold
        return untold

    def _abort(self, reason: str, failure: Failure) -> list[int]:
        self.broken, untold = reason, list[int]()
        words, tag = failure.pack(), Tag(Kind.ABORT, "abort")
        for to in self.peers:
            try:
                told = self.bytes.send_bytes(words, self.ranks[to], self.slot(TEXT_LANE))
                header = self.send_header(tag.pack(0), to)
                if self.streams[to].distant:
                    for lane in (ANSWER_LANE, HERE_LANE):
                        self.bytes.send_bytes(GAVE_UP, self.ranks[to], self.slot(lane))
                Send(self, [told, header], to, tag, WORDS_BYTES)
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


def _size(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)
