"""What carries bytes between the ranks of one group: tags, handles, counters, and the order of messages.

Knows: ranks of the group, point-to-point messages, and that every message says what it is for. Each message is a
header of `HEADER_BYTES` on one lane and its bytes on another, both first-in-first-out for a pair of ranks:

    lane 0   | header | header | header |        kind, round, index, digest, size, label
    lane 1   | bytes  |        | bytes  |        (a header of size 0 has none)
    lane 2   text of an abort

The receiver says which header it expects. Another one is an error that names both, on both sides, and an abort is a
header too: so a rank that waits learns at once why nothing will come, and the group itself stays whole for its user.

Does not know: what carries the bytes (a `Carrier`: threads in `loopback`, torch.distributed in `native`), algorithms,
or optimizers.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from .memory import Pool
from .messages import (
    HEADER_BYTES,
    Carrier,
    Chain,
    CollectiveError,
    Kind,
    MismatchError,
    PeerError,
    Pending,
    Tag,
    Traffic,
    Work,
)

LAST_WORDS = 60.0  # seconds for which a failed rank's messages are kept for their receivers
_HEADER_LANE, _PAYLOAD_LANE, _TEXT_LANE, _LANES = 0, 1, 2, 4


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


class _Recv:
    """A message that is expected from one rank. Its header is read before its bytes are believed."""

    def __init__(self, transport: Transport, source: int, tag: Tag, size: int, payload: Pending | None) -> None:
        self._transport, self.source, self.tag, self.size, self._payload = transport, source, tag, size, payload
        self.confirmed = False

    def wait(self) -> None:
        self._transport._confirm(self)
        if self._payload is not None:
            self._transport._wait(self._payload, self.source, self.tag)
            self._payload = None


class _Stream:
    """Headers from one rank: those asked for, those expected, and at most one that was read and put back."""

    def __init__(self) -> None:
        self.posted: deque[tuple[Tensor, Pending]] = deque()
        self.expected: deque[_Recv] = deque()
        self.returned: tuple[Tag, int] | None = None


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
        self.traffic = Traffic()
        self.pool = Pool()
        self._broken: str | None = None
        self._unsent: dict[int, _Send] = {}  # sends that nobody has waited for yet, by their own number
        self._sends = 0
        self._streams = [_Stream() for _ in self._ranks]

    # -- memory ---------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer that its owner keeps, with undefined content, starting on a 64-byte boundary."""
        return torch.empty(numel, dtype=dtype, device=device)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer from the pool, with undefined content; it goes back when its last holder lets go."""
        return self.pool.take(numel, dtype, device)

    # -- groups ---------------------------------------------------------------------------------------------------

    def peers(self) -> list[int]:
        """The other ranks, starting behind this one, so that not everybody talks to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def split(self, ranks: Sequence[int], channel: int = 0) -> Transport:
        """The part of this group that ``ranks`` name, in that order. Called by these ranks; nothing is sent."""
        carried = [self._ranks[r] for r in ranks]
        name = ",".join(map(str, (self._channel, channel, *carried)))
        return Transport(self.carrier, carried, zlib.crc32(name.encode()) & 0xFFFFFF)

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
        with self._whole_messages(tag):
            pendings = [self._send_header(tag, size, to)]
            if size:
                pendings.append(self.carrier.send(data, self._ranks[to], self._slot(_PAYLOAD_LANE)))
        self._count(sent=size, control=control)
        return _Send(self, pendings, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: Tag, *, control: bool = False) -> Work:
        """Start to receive a 1-D contiguous tensor of exactly this size from rank ``source``."""
        self.check()
        data = _as_bytes(tensor)
        size = data.numel()
        with self._whole_messages(tag):
            self._post_header(source)
            payload = self.carrier.recv(data, self._ranks[source], self._slot(_PAYLOAD_LANE)) if size else None
        self._count(received=size, control=control)
        work = _Recv(self, source, tag, size, payload)
        self._streams[source].expected.append(work)
        return work

    def exchange(self, data: bytes, tag: Tag) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. Collective."""
        self.check()
        sends = []
        buffer = _from_bytes(data)
        for to in self.peers():
            sends.append(self.isend(buffer, to, tag, control=True))
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
            sends += [_Send(self, [self._send_header(tag, 0, to)], to, tag) for to in self.peers()]
            if all(self._arrived(source, tag) for source in self.peers()):
                Chain(sends).wait()
                return tag
            catch_up()
            tag = replace(tag, round=tag.round + 1)

    def _arrived(self, source: int, tag: Tag) -> bool:
        """True when ``source`` is at ``tag``; False when it has entered a round that this rank has not."""
        self._confirm_expected(source)
        while True:
            theirs, size = self._next_header(source, tag)
            if theirs.same(tag):
                return True
            if theirs.round > tag.round and theirs.kind in (Kind.REDUCE_SCATTER, Kind.MEET):
                self._streams[source].returned = (theirs, size)
                return False
            if not (theirs.kind is Kind.MEET and theirs.round < tag.round):
                raise self._mismatch(source, tag, theirs)

    def abort(self, reason: str) -> None:
        """Tell every other rank that this one failed. The transport is of no use afterwards; the carrier is."""
        if self._broken is not None:
            return
        self._broken = reason
        text = _from_bytes(reason.encode()[:4096] or b"?")
        tag = Tag(Kind.ABORT, "abort")
        for to in self.peers():
            try:
                header = self._send_header(tag, text.numel(), to)
                _Send(self, [header, self.carrier.send(text, self._ranks[to], self._slot(_TEXT_LANE))], to, tag)
            except Exception:  # a peer that is gone cannot be told; the others still are
                continue
        # What was sent must outlive this object until its receivers ask for it.
        keeper = threading.Timer(min(self.timeout, LAST_WORDS), lambda kept: None, [list(self._unsent.values())])
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

    def _count(self, sent: int = 0, received: int = 0, control: bool = False) -> None:
        t = self.traffic
        if control:
            change = {"control_sent": t.control_sent + sent, "control_received": t.control_received + received}
        else:
            change = {"payload_sent": t.payload_sent + sent, "payload_received": t.payload_received + received}
        self.traffic = replace(t, **change)

    def count_payload(self, sent: int, received: int) -> None:
        """For algorithms whose bytes do not pass through `isend` and `irecv`."""
        self._count(sent=sent, received=received)

    def _send_header(self, tag: Tag, size: int, to: int) -> Pending:
        t = self.traffic
        self.traffic = replace(t, control_sent=t.control_sent + HEADER_BYTES, messages=t.messages + 1)
        return self.carrier.send(_from_bytes(tag.pack(size)), self._ranks[to], self._slot(_HEADER_LANE))

    def _post_header(self, source: int) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        pending = self.carrier.recv(header, self._ranks[source], self._slot(_HEADER_LANE))
        self._streams[source].posted.append((header, pending))
        self._count(received=HEADER_BYTES, control=True)

    def _next_header(self, source: int, tag: Tag) -> tuple[Tag, int]:
        """The next header from ``source``, whatever it is; an abort raises."""
        stream = self._streams[source]
        if stream.returned is not None:
            header, stream.returned = stream.returned, None
            return header
        if not stream.posted:
            self._post_header(source)
        buffer, pending = stream.posted[0]
        self._wait(pending, source, tag)
        stream.posted.popleft()
        theirs, size = Tag.unpack(buffer.numpy().tobytes())
        if theirs.kind is Kind.ABORT:
            text = torch.empty(size, dtype=torch.uint8)
            self._wait(self.carrier.recv(text, self._ranks[source], self._slot(_TEXT_LANE)), source, tag)
            message = text.numpy().tobytes().decode(errors="replace")
            raise self._fail(PeerError(f"rank {self.rank}, in {tag.label}: rank {source} failed: {message}"))
        return theirs, size

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
            theirs, size = self._next_header(work.source, first.tag)
            if theirs.kind is Kind.MEET and theirs.round < first.tag.round:
                continue  # it had nothing of its own for this round, and will catch up
            if not theirs.same(first.tag) or size != first.size:
                raise self._mismatch(work.source, first.tag, theirs, first.size, size)
            first.confirmed = True
            expected.popleft()

    def _recv_any_size(self, source: int, tag: Tag) -> bytes:
        self._confirm_expected(source)
        theirs, size = self._next_header(source, tag)
        if not theirs.same(tag):
            raise self._mismatch(source, tag, theirs)
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            self._wait(self.carrier.recv(buffer, self._ranks[source], self._slot(_PAYLOAD_LANE)), source, tag)
        self._count(received=size, control=True)
        return buffer.numpy().tobytes()

    def _wait(self, pending: Pending, peer: int, tag: Tag) -> None:
        self.check()
        begin = time.monotonic()
        try:
            pending.wait(self.timeout)
        except PeerError as error:
            waited = time.monotonic() - begin
            text = f"rank {self.rank}, in {tag.label}: no answer from rank {peer} after {waited:.1f} s ({error})"
            raise self._fail(PeerError(text)) from error

    @contextmanager
    def _whole_messages(self, tag: Tag) -> Iterator[None]:
        """After an interrupt or a strange error between a header and its bytes nobody knows what the next bytes are."""
        try:
            yield
        except PeerError:
            raise
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


def _describe(tag: Tag) -> str:
    return f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"


def _as_bytes(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"a 1-D contiguous tensor is needed, not shape {tuple(tensor.shape)}")
    return tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
