"""What carries bytes between the ranks of one group: tags, handles, counters, and the order of messages.

Knows: ranks of the group, point-to-point messages, and that every message says what it is for. Each message is a
header of `HEADER_BYTES` on one lane and its bytes on another, both first-in-first-out for a pair of ranks:

    lane 0   | header | header | header |        kind, round, index, digest, size, label
    lane 1   | bytes  |        | bytes  |        (a header of size 0 has none)
    lane 2   text of an abort
    lane 3   "I have read what you lent me", where bytes stay in memory that both sides see (`lend`, `borrow`)

The receiver says which header it expects. Another one is an error that names both, on both sides, and an abort is a
header too: so a rank that waits learns at once why nothing will come, and the group itself stays whole for its user.

Does not know: what carries the bytes (a `Carrier`: threads in `loopback`, torch.distributed in `native`), algorithms,
or optimizers.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from .memory import Pool
from .messages import (
    HEADER_BYTES,
    ByteCarrier,
    Carrier,
    Chain,
    CollectiveError,
    CommonMemory,
    GoneError,
    Kind,
    Memory,
    MismatchError,
    PeerError,
    Pending,
    PendingBytes,
    Region,
    Tag,
    Traffic,
    Work,
    kind_of,
    place_of,
    same_header,
    with_place,
)

CHUNK = 4 << 20  # bytes
LAST_WORDS = 60.0  # seconds for which a failed rank's messages are kept for their receivers
_HEADER_LANE, _PAYLOAD_LANE, _TEXT_LANE, _RETURN_LANE, _LANES = 0, 1, 2, 3, 4
_RETURNED = struct.Struct("<q")


class _Send:
    """A message under way. The transport holds it until it was waited for: a carrier may drop what nobody holds."""

    def __init__(self, transport: Transport, pendings: Sequence[Pending], to: int, tag: Tag) -> None:
        self._transport, self._pendings, self._to, self._tag = transport, list(pendings), to, tag
        transport._sends += 1
        self._number = transport._sends
        transport._unsent[self._number] = self

    def wait(self) -> None:
        while self._pendings:
            self._transport._wait(self._pendings[0], self._to, self._tag)
            self._pendings.pop(0)
        self._transport._unsent.pop(self._number, None)


class _Lent:
    """Memory that one rank reads in place. The transport holds it until that rank has said that it is done."""

    def __init__(self, transport: Transport, tensor: Tensor, to: int, tag: Tag) -> None:
        self._transport, self._tensor, self._to, self._tag = transport, tensor, to, tag
        stream = transport._streams[to]
        stream.lends += 1
        self._number = stream.lends
        stream.lent[self._number] = self

    def wait(self) -> None:
        t = self._transport
        stream = t._streams[self._to]
        while self._number in stream.lent:
            if stream.coming_back is None:
                stream.coming_back = t._expect(_RETURNED.size, self._to, _RETURN_LANE, self._tag)
            (number,) = _RETURNED.unpack(t._wait_bytes(stream.coming_back, self._to, self._tag))
            stream.coming_back = None
            del stream.lent[number]


class _Recv:
    """A message that is expected from one rank. Its header is read before its bytes are believed."""

    def __init__(self, transport: Transport, source: int, tag: Tag, size: int, payload: Pending | None) -> None:
        self._transport, self.source, self.tag, self.size, self._payload = transport, source, tag, size, payload
        self.header = transport._header(tag, size)
        self.confirmed = False
        self.place = -1

    def wait(self) -> None:
        self._transport._confirm(self)
        if self._payload is not None:
            self._transport._wait(self._payload, self.source, self.tag)
            self._payload = None


class Loan(_Recv):
    """A peer's memory, to be read in place between `wait` and `give_back`."""

    def __init__(self, transport: Transport, source: int, tag: Tag, numel: int, dtype: torch.dtype) -> None:
        super().__init__(transport, source, tag, numel * dtype.itemsize, None)
        self._dtype = dtype
        stream = transport._streams[source]
        stream.borrowed += self.size > 0
        self._number = stream.borrowed

    def tensor(self) -> Tensor:
        """What the peer lends, 1-D; after `wait`."""
        if not self.size:
            return torch.empty(0, dtype=self._dtype)
        memory = self._transport.memory
        assert memory is not None
        assert self.confirmed, "read before `wait`"
        return memory.look(self._transport._ranks[self.source], self.place, self.size).view(self._dtype)

    def give_back(self) -> None:
        """Say that it was read: the peer may write there again."""
        t = self._transport
        if self.size:
            with t._whole_messages(self.source, self.tag):
                t._bytes.send_bytes(_RETURNED.pack(self._number), t._ranks[self.source], t._slot(_RETURN_LANE))


class _Stream:
    """Messages of one rank: headers asked for, those expected, at most one that was read and put back, and what this
    rank lends it."""

    def __init__(self) -> None:
        self.posted: deque[PendingBytes] = deque()
        self.expected: deque[_Recv] = deque()
        self.returned: bytes | None = None
        self.lent: dict[int, _Lent] = {}  # by number, as both sides count
        self.lends = self.borrowed = 0
        self.coming_back: PendingBytes | None = None


@dataclass
class _Counters:
    """`Traffic` while it grows."""

    sent: int = 0
    received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0


class ByTensors:
    """The short way for a few bytes over a carrier that knows tensors alone."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def send_bytes(self, data: bytes, to: int, slot: int) -> Pending:
        return self._carrier.send(_from_bytes(data), to, slot)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        return _BytesOfTensor(buffer, self._carrier.recv(buffer, source, slot))


class _BytesOfTensor:
    def __init__(self, buffer: Tensor, pending: Pending) -> None:
        self._buffer, self._pending = buffer, pending

    def wait(self, timeout: float) -> bytes:
        self._pending.wait(timeout)
        return self._buffer.numpy().tobytes()


class Transport:
    """Tagged messages among the ranks of a group, over a carrier. Ranks here are always ranks of the group."""

    def __init__(self, carrier: Carrier, ranks: Sequence[int] | None = None, channel: int = 0) -> None:
        """``ranks``: the carrier's ranks that form the group, in group order (default: all)."""
        self.carrier = carrier
        self._ranks = tuple(range(carrier.world_size) if ranks is None else ranks)
        if carrier.rank not in self._ranks:
            raise ValueError(f"rank {carrier.rank} is not one of the group's ranks {list(self._ranks)}")
        self._channel = channel
        self.rank = self._ranks.index(carrier.rank)
        self.world_size = len(self._ranks)
        self.timeout = carrier.timeout
        self.name = carrier.name
        self._counted = _Counters()
        self._family: list[weakref.ref[Transport]] = [weakref.ref(self)]  # that fail together
        self._bytes: ByteCarrier = carrier if isinstance(carrier, ByteCarrier) else ByTensors(carrier)
        self.memory: Memory | None = carrier if isinstance(carrier, Memory) else None
        self._allocate = partial(_allocate, self.memory)  # which holds nothing that holds this
        self.pool = Pool(allocate=self._allocate)
        self._broken: str | None = None
        self._packed: tuple[Tag | None, int, bytes] = (None, 0, b"")
        self._unsent: dict[int, _Send] = {}  # sends that nobody has waited for yet, by their own number
        self._sends = 0
        self._streams = [_Stream() for _ in self._ranks]

    # -- memory ---------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer that its owner keeps, with undefined content, starting on a 64-byte boundary."""
        if not numel:
            return torch.empty(0, dtype=dtype, device=device)
        storage = self._allocate(numel * dtype.itemsize, device)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))

    def reaches(self, tensor: Tensor) -> bool:
        """True where peers on this host can read a tensor's memory."""
        return self.memory is not None and (not tensor.numel() or self.memory.place(tensor) is not None)

    def within_reach(self, tensor: Tensor) -> Tensor:
        """A 1-D tensor's values where peers can read them: the tensor itself, or a copy in scratch memory."""
        if self.reaches(tensor):
            return tensor
        return self.scratch(tensor.numel(), tensor.dtype, torch.device("cpu")).copy_(tensor)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer from the pool, with undefined content; it goes back when its last holder lets go."""
        return self.pool.take(numel, dtype, device)

    def common(self, sizes: Sequence[int]) -> Sequence[Region] | None:
        """Memory of these bytes that is the same for all ranks; None where they do not share a host, or there is none.
        Collective."""
        self.check()
        if self.world_size < self.carrier.world_size or not isinstance(self.carrier, CommonMemory) or not sum(sizes):
            return None
        tag = Tag(Kind.EXCHANGE, "making memory for all ranks")
        with self._whole_messages(0, tag):
            regions = self.carrier.common(sizes)
        problems = self.exchange(b"" if regions is not None else b"none", tag)
        return None if any(problems) else regions

    # -- groups ---------------------------------------------------------------------------------------------------

    def peers(self) -> list[int]:
        """The other ranks, starting behind this one, so that not everybody talks to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def split(self, ranks: Sequence[int], channel: int = 0) -> Transport:
        """The part of this group that ``ranks`` name, in that order. Called by these ranks; nothing is sent."""
        carried = [self._ranks[r] for r in ranks]
        name = ",".join(map(str, (self._channel, channel, *carried)))
        return Transport(self.carrier, carried, zlib.crc32(name.encode()) & 0xFFFFFF)

    def over(self, carrier: Carrier) -> Transport:
        """The same group over another carrier with the same ranks; this transport is not to be used any more."""
        return Transport(carrier, self._ranks, self._channel)

    def carried(self, ranks: Sequence[int]) -> list[int]:
        """What the carrier calls these ranks."""
        return [self._ranks[rank] for rank in ranks]

    def sibling(self, channel: int) -> Transport:
        """The same ranks with messages of their own, counted here and failing together. Called by all; nothing is
        sent."""
        made = self.split(range(self.world_size), channel)
        made._counted, made._family, made.pool = self._counted, self._family, self.pool
        made._family.append(weakref.ref(made))
        return made

    def fork(self) -> Transport:
        """The same ranks with messages of their own, so that several users share a group. Collective."""
        tag = Tag(Kind.EXCHANGE, "opening a channel")
        channel = int.from_bytes(os.urandom(3), "little")
        first = self.exchange(channel.to_bytes(4, "little"), tag)[0]
        return Transport(self.carrier, self._ranks, int.from_bytes(first, "little"))

    # -- messages -------------------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, to: int, tag: Tag, *, control: bool = False) -> Work:
        """Start to send a 1-D contiguous tensor to rank ``to``; it must not be written before ``wait`` returns."""
        self.check()
        data = _as_bytes(tensor)
        size = data.numel()
        with self._whole_messages(to, tag):
            pendings = [self._send_header(tag, size, to)]
            if size:
                pendings.append(self.carrier.send(data, self._ranks[to], self._slot(_PAYLOAD_LANE)))
        if control:
            self._counted.control_sent += size
        else:
            self._counted.sent += size
        return _Send(self, pendings, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: Tag, *, control: bool = False) -> Work:
        """Start to receive a 1-D contiguous tensor of exactly this size from rank ``source``."""
        self.check()
        data = _as_bytes(tensor)
        size = data.numel()
        with self._whole_messages(source, tag):
            self._post_header(source)
            payload = self.carrier.recv(data, self._ranks[source], self._slot(_PAYLOAD_LANE)) if size else None
        if control:
            self._counted.control_received += size
        else:
            self._counted.received += size
        work = _Recv(self, source, tag, size, payload)
        self._streams[source].expected.append(work)
        return work

    def lend(self, tensor: Tensor, to: int, tag: Tag) -> Work:
        """Let rank ``to``, which calls `borrow`, read a 1-D contiguous tensor that is `within_reach` where it is; it
        must not be written before ``wait`` returns."""
        self.check()
        size = tensor.numel() * tensor.itemsize
        header = self._header(tag, size)
        if size:
            assert self.memory is not None
            place = self.memory.place(tensor)
            assert place is not None, "not within reach"
            header = with_place(header, place)
        with self._whole_messages(to, tag):
            pending = self._send_packed(header, to)
        self._counted.sent += size
        return _Lent(self, tensor, to, tag) if size else _Send(self, [pending], to, tag)

    def borrow(self, source: int, tag: Tag, numel: int, dtype: torch.dtype) -> Loan:
        """Expect rank ``source`` to `lend` this many elements."""
        self.check()
        loan = Loan(self, source, tag, numel, dtype)
        with self._whole_messages(source, tag):
            self._post_header(source)
        self._counted.received += loan.size
        self._streams[source].expected.append(loan)
        return loan

    def exchange(self, data: bytes, tag: Tag) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. Collective."""
        self.check()
        sends = []
        for to in self.peers():
            sends.append(self._send_control(data, to, tag))
        result = [b""] * self.world_size
        result[self.rank] = data
        for source in self.peers():
            result[source] = self._recv_any_size(source, tag)
        Chain(sends).wait()
        return result

    def announce(self, tag: Tag) -> Work:
        """Say to every other rank that this one entered ``tag``, and expect the same of them, without any bytes."""
        nothing = torch.empty(0, dtype=torch.uint8)
        recvs = [self.irecv(nothing, source, tag) for source in self.peers()]
        return Chain([*recvs, *(self.isend(nothing, to, tag) for to in self.peers())])

    def meet(self, tag: Tag, catch_up: Callable[[], None]) -> Tag:
        """Return when all ranks are here, at the same ``tag.round``. Collective; the agreed tag is returned.

        ``tag.round`` is the number of rounds of collectives that this rank has entered. A rank that is told of a
        later round calls ``catch_up``, which enters one more round, and announces itself again: so a rank that had
        nothing to contribute still takes part in everything that the others began.

        Messages of a pair are in order, so a rank reads of the others' rounds before it reads that they are here;
        an announcement that is overtaken by a later round is dropped by whoever reads it (`_confirm`).
        """
        self.check()
        sends: list[Work] = []
        while True:
            sends += [self._send_control(b"", to, tag) for to in self.peers()]
            if all(self._arrived(source, tag) for source in self.peers()):
                Chain(sends).wait()
                return tag
            catch_up()
            tag = replace(tag, round=tag.round + 1)

    def _arrived(self, source: int, tag: Tag) -> bool:
        """True when ``source`` is at ``tag``; False when it has entered a round that this rank has not."""
        self._confirm_expected(source)
        while True:
            header = self._next_header(source, tag)
            theirs, _ = Tag.unpack(header)
            if theirs.same(tag):
                return True
            if theirs.round > tag.round and theirs.kind in (Kind.REDUCE_SCATTER, Kind.MEET):
                self._streams[source].returned = header
                return False
            if not (theirs.kind is Kind.MEET and theirs.round < tag.round):
                raise self._mismatch(source, tag, theirs)

    def abort(self, reason: str) -> None:
        """Tell every other rank that this one failed. The transport is of no use afterwards; the carrier is."""
        for reference in self._family:
            member = reference()
            if member is not None and member._broken is None:
                member._abort(reason)

    def _abort(self, reason: str) -> None:
        self._broken = reason
        text = reason.encode()[:4096] or b"?"
        tag = Tag(Kind.ABORT, "abort")
        for to in self.peers():
            try:
                header = self._send_header(tag, len(text), to)
                words = self._bytes.send_bytes(text, self._ranks[to], self._slot(_TEXT_LANE))
                _Send(self, [header, words], to, tag)
                if self.memory is not None:
                    for lane in (_PAYLOAD_LANE, _RETURN_LANE):  # where it may wait for what is not read any more
                        self.memory.give_up(self._ranks[to], self._slot(lane))
            except Exception:  # a peer that is gone cannot be told; the others still are
                continue
        # What was sent must outlive this object until its receivers ask for it.
        kept = [*self._unsent.values(), *(lent for stream in self._streams for lent in stream.lent.values())]
        keeper = threading.Timer(min(self.timeout, LAST_WORDS), lambda kept: None, [kept])
        keeper.daemon = True
        keeper.start()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _slot(self, lane: int) -> int:
        return self._channel * _LANES + lane

    @property
    def broken(self) -> bool:
        """True after a failure: every further call raises."""
        return self._broken is not None

    def check(self) -> None:
        """Raise `CollectiveError`, naming the failure, where there was one."""
        if self._broken is not None:
            raise CollectiveError(
                f"rank {self.rank}: this communicator is closed since an earlier failure ({self._broken}); "
                "build a new optimizer"
            )

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        c = self._counted
        return Traffic(c.sent, c.received, c.control_sent, c.control_received, c.messages)

    def count_payload(self, sent: int, received: int) -> None:
        """For algorithms whose bytes do not pass through `isend` and `irecv`."""
        self._counted.sent += sent
        self._counted.received += received

    def _header(self, tag: Tag, size: int) -> bytes:
        """``tag.pack(size)``; the one before is kept, as a collective sends and expects the same many times."""
        if self._packed[0] is not tag or self._packed[1] != size:
            self._packed = (tag, size, tag.pack(size))
        return self._packed[2]

    def _send_header(self, tag: Tag, size: int, to: int) -> Pending:
        return self._send_packed(self._header(tag, size), to)

    def _send_packed(self, header: bytes, to: int) -> Pending:
        self._counted.control_sent += HEADER_BYTES
        self._counted.messages += 1
        return self._bytes.send_bytes(header, self._ranks[to], self._slot(_HEADER_LANE))

    def _post_header(self, source: int) -> None:
        pending = self._bytes.recv_bytes(HEADER_BYTES, self._ranks[source], self._slot(_HEADER_LANE))
        self._streams[source].posted.append(pending)
        self._counted.control_received += HEADER_BYTES

    def _next_header(self, source: int, tag: Tag) -> bytes:
        """The next header from ``source``, whatever it is; an abort raises."""
        stream = self._streams[source]
        if stream.returned is not None:
            header, stream.returned = stream.returned, None
            return header
        if not stream.posted:
            with self._whole_messages(source, tag):
                self._post_header(source)
        header = self._wait_bytes(stream.posted[0], source, tag)
        stream.posted.popleft()
        if kind_of(header) == Kind.ABORT:
            _, size = Tag.unpack(header)
            text = self._expect(size, source, _TEXT_LANE, tag)
            raise self._told(source, tag, self._wait_bytes(text, source, tag).decode(errors="replace"))
        return header

    def _confirm_expected(self, source: int) -> None:
        """Read the headers of all that is still under way from ``source``, which come before any other."""
        expected = self._streams[source].expected
        if expected:
            self._confirm(expected[-1])

    def _confirm(self, work: _Recv) -> None:
        """Read headers from ``work``'s source up to its own; they come in the order in which they were expected."""
        expected = self._streams[work.source].expected
        while not work.confirmed:
            first = expected[0]
            header = self._next_header(work.source, first.tag)
            if not same_header(header, first.header):
                theirs, size = Tag.unpack(header)
                if theirs.kind is Kind.MEET and theirs.round < first.tag.round:
                    continue  # it had nothing of its own for this round, and will catch up
                raise self._mismatch(work.source, first.tag, theirs, first.size, size)
            first.confirmed, first.place = True, place_of(header)
            expected.popleft()

    def _send_control(self, data: bytes, to: int, tag: Tag) -> Work:
        with self._whole_messages(to, tag):
            pendings = [self._send_header(tag, len(data), to)]
            if data:
                pendings.append(self._bytes.send_bytes(data, self._ranks[to], self._slot(_PAYLOAD_LANE)))
        self._counted.control_sent += len(data)
        return _Send(self, pendings, to, tag)

    def _recv_any_size(self, source: int, tag: Tag) -> bytes:
        self._confirm_expected(source)
        theirs, size = Tag.unpack(self._next_header(source, tag))
        if not theirs.same(tag):
            raise self._mismatch(source, tag, theirs)
        self._counted.control_received += size
        if not size:
            return b""
        return self._wait_bytes(self._expect(size, source, _PAYLOAD_LANE, tag), source, tag)

    def _expect(self, size: int, source: int, lane: int, tag: Tag) -> PendingBytes:
        with self._whole_messages(source, tag):
            return self._bytes.recv_bytes(size, self._ranks[source], self._slot(lane))

    def _wait(self, pending: Pending, peer: int, tag: Tag) -> None:
        self.check()
        begin = time.monotonic()
        try:
            pending.wait(self.timeout)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def _wait_bytes(self, pending: PendingBytes, peer: int, tag: Tag) -> bytes:
        self.check()
        begin = time.monotonic()
        try:
            return pending.wait(self.timeout)
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error

    def _no_answer(self, peer: int, tag: Tag, begin: float, error: PeerError) -> CollectiveError:
        reason = self._last_words(peer) if isinstance(error, GoneError) else None
        if reason is not None:
            return self._told(peer, tag, reason)
        waited = time.monotonic() - begin
        text = f"rank {self.rank}, in {tag.label}: no answer from rank {peer} after {waited:.1f} s ({error})"
        return self._fail(PeerError(text))

    def _told(self, peer: int, tag: Tag, reason: str) -> CollectiveError:
        return self._fail(PeerError(f"rank {self.rank}, in {tag.label}: rank {peer} failed: {reason}"))

    def _last_words(self, peer: int) -> str | None:
        """Why a peer failed that will say nothing more; None where it has not said so."""
        posted = self._streams[peer].posted
        try:
            while True:
                if not posted:
                    self._post_header(peer)
                header = posted.popleft().wait(0.0)
                if kind_of(header) == Kind.ABORT:
                    _, size = Tag.unpack(header)
                    text = self._bytes.recv_bytes(size, self._ranks[peer], self._slot(_TEXT_LANE))
                    return text.wait(0.0).decode(errors="replace")
        except PeerError:
            return None

    @contextmanager
    def _whole_messages(self, peer: int, tag: Tag) -> Iterator[None]:
        """After an interrupt or a strange error between a header and its bytes nobody knows what the next bytes are."""
        begin = time.monotonic()
        try:
            yield
        except PeerError as error:
            raise self._no_answer(peer, tag, begin, error) from error
        except BaseException as error:
            self.abort(f"rank {self.rank}, in {tag.label}: {type(error).__name__}: {error}")
            raise

    def _mismatch(self, source: int, mine: Tag, theirs: Tag, size: int = 0, their_size: int = 0) -> CollectiveError:
        sizes = f" ({size} and {their_size} bytes)" if size != their_size and mine.same(theirs) else ""
        return self._fail(
            MismatchError(
                f"rank {self.rank} is in {_describe(mine)}, but rank {source} is in {_describe(theirs)}{sizes}: all "
                "ranks of a group must make the same calls in the same order, with the same parameters trainable"
            )
        )

    def _fail(self, error: CollectiveError) -> CollectiveError:
        self.abort(str(error))
        return error


def _allocate(memory: Memory | None, nbytes: int, device: torch.device) -> UntypedStorage:
    if memory is None or device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    return memory.allocate(nbytes)


def chunks(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """The parts, as begin and end in elements, in which many bytes travel over a network, so that what follows a part
    hides behind the next; both sides cut alike. Nothing is one empty part, of which at least a header tells."""
    step = max(1, CHUNK // itemsize)
    for begin in range(0, max(numel, 1), step):
        yield begin, min(begin + step, numel)


def _describe(tag: Tag) -> str:
    return f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"


def _as_bytes(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"a 1-D contiguous tensor is needed, not shape {tuple(tensor.shape)}")
    return tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
