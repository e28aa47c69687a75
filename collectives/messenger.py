"""Headers and bytes between this rank and each of the others, in order.

Each message is a header of `HEADER_BYTES` on one lane and its bytes on another:

    lane 0   | header | header | header |        kind, round, index, digest, size, label, place
    lane 1   | bytes  |        | bytes  |        (a header of size 0 has none)

The receiver says which header it expects. Another one is an error that names both, on both sides; an abort is a header
too.

Over a network something small is asked for, and sent, behind a message's bytes: its header, or where they are many, and
used part by part, a byte behind each part. For a network may never tell of an end in the middle of many bytes, but of
one before something small it does, and when that is here, they are. A rank that fails answers what it was sent and did
not read, so that the others' sends end too.

Knows: which message follows which. Does not know: what is sent, or what a collective is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .backend import Backend, Pending, PendingBytes
from .messages import Kind, Tag, is_abort, place_of
from .peer_links import ANSWER_LANE, GAVE_UP, HERE_LANE, PAYLOAD_LANE, Expected, Line

READ, HERE = b"r", b"h"
SMALL = 1 << 16  # bytes that a network takes at once
MOST_SETTLED = 256  # answers that are not waited for; of more, the oldest have left long ago


class Channel(Line):
    """The messages of one transport."""

    def __init__(self, backend: Backend, ranks: Sequence[int], number: int, like: Channel | None = None) -> None:
        """See `Line`."""
        super().__init__(backend, ranks, number, like)
        self.settled: list[Send] = []  # sends that nobody need wait for
        self._packed: tuple[Tag | None, int, bytes] = (None, 0, b"")
        self._unasked: deque[Recv] = deque()  # parts behind first ones

    # -- headers --------------------------------------------------------------------------------------------------

    def packed(self, tag: Tag, size: int) -> bytes:
        """``tag.pack(size)``; the one before is kept, as a collective sends and expects the same many times."""
        if self._packed[0] is not tag or self._packed[1] != size:
            self._packed = (tag, size, tag.pack(size))
        return self._packed[2]

    def expect(self, tag: Tag, size: int, source: int) -> Expected:
        """Expect a message of ``size`` bytes after all that were expected of this rank before."""
        expected = Expected(source, tag, size, self.packed(tag, size))
        self.streams[source].expected.append(expected)
        self._ask(source)
        return expected

    def ask(self, source: int, tag: Tag) -> None:
        """Ask for one header more than are expected, where that is of use now."""
        try:
            self._ask(source, more=1)
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def _ask(self, source: int, more: int = 0) -> None:
        stream = self.streams[source]
        while stream.distant and len(stream.posted) + (stream.returned is not None) < len(stream.expected) + more:
            self.post_header(source)

    def next_header(self, source: int, tag: Tag) -> bytes:
        """The next header from ``source``, whatever it is; an abort raises."""
        header = self._read_header(source, tag)
        if is_abort(header):
            raise self.aborted(source, tag)
        return header

    def _read_header(self, source: int, tag: Tag) -> bytes:
        stream = self.streams[source]
        if stream.returned is not None:
            header, stream.returned = stream.returned, None
            return header
        if not stream.posted:
            try:
                self.post_header(source)
            except BaseException as error:
                raise self.cut_off(error, source, tag) from error
        header = self.wait_bytes(stream.posted[0], source, tag)
        stream.posted.popleft()
        return header

    def confirm(self, work: Expected) -> None:
        """Read headers from ``work``'s source up to its own; they come in the order in which they were expected."""
        self.ask_rest()
        expected = self.streams[work.source].expected
        while not work.confirmed:
            first = expected[0]
            header = self._read_header(work.source, first.tag)
            if not header.startswith(first.packed):
                if is_abort(header):
                    raise self.aborted(work.source, first.tag)
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
        work, rank = Send(self, to, tag, _size(parts)), self.ranks[to]
        much = work.size > SMALL
        far = much and self.streams[to].distant
        try:
            if much:
                work.pendings.append(self.send_header(self.packed(tag, work.size), to))
            for part in parts:
                work.pendings.append(self.backend.send(part, rank, self.slot(PAYLOAD_LANE)))
                if far:
                    work.pendings.append(self.bytes.send_bytes(HERE, rank, self.slot(HERE_LANE)))
                self.ask_rest()
            if not much:
                work.pendings.append(self.send_header(self.packed(tag, work.size), to))
            if far:
                work.answers = self._ask_answer(to)
        except BaseException as error:
            raise self.cut_off(error, to, tag) from error
        return work

    def recv(self, parts: Sequence[Tensor], source: int, tag: Tag) -> list[Recv]:
        """Expect what `send` sends; the parts are to be waited for in order. Of no parts there is still a header."""
        size = _size(parts)
        expected = Expected(source, tag, size, self.packed(tag, size))
        works = [Recv(self, expected, part, last=n == len(parts) - 1) for n, part in enumerate(parts)]
        try:
            if any(work.expected.source == source for work in self._unasked):
                self.ask_rest()  # in the order in which they are sent
            if works:
                self._post(works[0])
            self.streams[source].expected.append(expected)
            self._ask(source)
            self._unasked.extend(works[1:])
            return works or [Recv(self, expected, None, last=False)]
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def ask_rest(self) -> None:
        """Ask for the parts behind first ones. That is put off until a first part of this rank's own has left, or until
        nothing more is sent now: while the network carries that part, there is time."""
        while self._unasked:
            self.check()
            self._post(self._unasked[0])
            self._unasked.popleft()

    def _post(self, work: Recv) -> None:
        """Ask for a part; again after an interrupt."""
        source, tag = work.expected.source, work.expected.tag
        try:
            if work.part is not None and work.payload is None:
                work.payload = self.backend.recv(work.part, self.ranks[source], self.slot(PAYLOAD_LANE))
            if work.here is None and work.expected.size > SMALL and self.streams[source].distant:
                work.here = self.bytes.recv_bytes(1, self.ranks[source], self.slot(HERE_LANE))
        except BaseException as error:
            raise self.cut_off(error, source, tag) from error

    def _ask_answer(self, to: int) -> int:
        """To many bytes: a network may never say that they did not leave, where their reader is gone; but a peer that
        answers has read them, and one that is gone does not answer. Returns the answer's number."""
        stream = self.streams[to]
        stream.answers.append(self.bytes.recv_bytes(1, self.ranks[to], self.slot(ANSWER_LANE)))
        stream.asked += 1
        return stream.asked

    def wait_answers(self, to: int, number: int, tag: Tag) -> None:
        stream = self.streams[to]
        while stream.answered < number:
            if self.wait_bytes(stream.answers[0], to, tag) == GAVE_UP:
                raise self.aborted(to, tag)
            stream.answers.popleft()
            stream.answered += 1

    def wait_here(self, here: PendingBytes, source: int, tag: Tag) -> None:
        if self.wait_bytes(here, source, tag) == GAVE_UP:
            raise self.aborted(source, tag)

    def answer(self, read: Expected) -> None:
        """Say that the bytes of a message were read, where that is waited for."""
        stream = self.streams[read.source]
        if stream.distant and read.size > SMALL:
            try:
                said = self.bytes.send_bytes(READ, self.ranks[read.source], self.slot(ANSWER_LANE))
            except BaseException as error:
                raise self.cut_off(error, read.source, read.tag) from error
            self.settled.append(Send(self, read.source, read.tag, len(READ), [said]))
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
        return [Send(self, to, tag, size, pendings)]

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


def _size(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


class Send:
    """A message under way. The channel holds it until it was waited for: a backend may drop what nobody holds."""

    def __init__(self, channel: Channel, to: int, tag: Tag, size: int, pendings: Sequence[Pending] = ()) -> None:
        self._channel, self._to, self._tag, self.size = channel, to, tag, size
        self.distant = channel.streams[to].distant
        self.pendings = list(pendings)
        self.answers = 0  # which answer says that this was read; 0: none does
        channel.unsent[id(self)] = self

    def wait(self) -> None:
        if self.answers:
            self._channel.wait_answers(self._to, self.answers, self._tag)
        while self.pendings:
            self._channel.wait(self.pendings[0], self._to, self._tag)
            self.pendings.pop(0)
        self._channel.unsent.pop(id(self), None)


class Settled:
    """Sends to peers that had asked for them before they sent what was read of them since: these are under way. To wait
    would be to ask the network, which may have lost sight of one whose peer is gone just now; so that is left to the
    next time, when the peers have been heard of again."""

    def __init__(self, channel: Channel, sends: Sequence[Send]) -> None:
        self._channel, self._sends = channel, sends

    def wait(self) -> None:
        settled = self._channel.settled
        for send in (*settled, *(send for send in self._sends if not send.distant or send.size > SMALL)):
            send.wait()
        settled[:] = [send for send in self._sends if send.distant and send.size <= SMALL]
        self._sends = ()


class Recv:
    """A part of a message that is expected from one rank. The header is read before its bytes are believed."""

    def __init__(self, channel: Channel, expected: Expected, part: Tensor | None, *, last: bool) -> None:
        """``last``: to be answered when it was read, where that is waited for."""
        self._channel, self.expected, self._last = channel, expected, last
        self.part = part  # None: there is none, or it was read
        self.payload: Pending | None = None  # what comes there, when it was asked for
        self.here: PendingBytes | None = None  # what is sent behind a part of many bytes

    def wait(self) -> None:
        channel, expected = self._channel, self.expected
        channel.confirm(expected)
        if self.here is not None:
            channel.wait_here(self.here, expected.source, expected.tag)
            self.here = None
        if self.part is not None:
            assert self.payload is not None, "every part is asked for before a header is believed"
            channel.wait(self.payload, expected.source, expected.tag)
            self.part = self.payload = None  # it was read
            if self._last:
                channel.answer(expected)
