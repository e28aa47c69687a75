"""The words that transports and algorithms share: tags, errors, counters, and the protocols between them.

Knows what a message says about itself. Does not know how it travels, or what an algorithm does with it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, UntypedStorage

if TYPE_CHECKING:
    from .transport import Transport

LABEL_BYTES = 76
_HEADER = struct.Struct(f"<iqiqqH{LABEL_BYTES}s")
_PLACE = struct.Struct("<q")
HEADER_BYTES = 128
_PLACE_BEGIN = HEADER_BYTES - _PLACE.size


class Kind(IntEnum):
    """What a message belongs to."""

    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    EXCHANGE = 3
    GATHER = 4
    MEET = 5
    ABORT = 6


@dataclass(frozen=True)
class Tag:
    """What a collective is, so that ranks which entered different ones find out instead of mixing their bytes.

    ``round`` counts what happens repeatedly (backward passes), ``index`` distinguishes the collectives of a round
    (buckets, meetings), ``digest`` holds whatever else both sides must agree on, ``label`` is what an error prints.
    """

    kind: Kind
    label: str
    round: int = 0
    index: int = 0
    digest: int = 0

    def pack(self, size: int) -> bytes:
        label = _cut(self.label)
        packed = _HEADER.pack(int(self.kind), self.round, self.index, self.digest, size, len(label), label)
        return packed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, header: bytes) -> tuple[Tag, int]:
        kind, round_, index, digest, size, length, label = _HEADER.unpack_from(header)
        return cls(Kind(kind), label[:length].decode(), round_, index, digest), size

    def same(self, other: Tag) -> bool:
        """True when both are one collective, as far as a header can tell."""
        mine = (self.kind, self.round, self.index, self.digest, _cut(self.label))
        return mine == (other.kind, other.round, other.index, other.digest, _cut(other.label))


def kind_of(header: bytes) -> int:
    return int.from_bytes(header[:4], "little")


def with_place(header: bytes, place: int) -> bytes:
    """A header that says where the message's bytes lie, in memory that the receiver can see."""
    return header[:_PLACE_BEGIN] + _PLACE.pack(place)


def place_of(header: bytes) -> int:
    return int(_PLACE.unpack_from(header, _PLACE_BEGIN)[0])


def same_header(a: bytes, b: bytes) -> bool:
    """True where two headers say the same but for a place."""
    return a[:_PLACE_BEGIN] == b[:_PLACE_BEGIN]


class CollectiveError(RuntimeError):
    """A collective could not be completed; the message names the ranks and what they were doing."""


class MismatchError(CollectiveError):
    """Ranks of one group entered different collectives."""


class PeerError(CollectiveError):
    """Another rank failed, left or did not answer in time."""


class GoneError(PeerError):
    """Another rank will say nothing more; what it said before, why it failed perhaps, is still to be read."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages of one rank so far. Payload is what algorithms move; control is headers and exchanges."""

    payload_sent: int = 0
    payload_received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f) - getattr(earlier, f) for f in self.__dataclass_fields__))


class Pending(Protocol):
    """A transfer of a carrier under way."""

    def wait(self, timeout: float) -> None:
        """Return when the tensor may be used again; raise `PeerError` where that cannot happen any more."""


class Carrier(Protocol):
    """Moves bytes between two ranks, in order for each (pair, slot). Tensors are 1-D, contiguous, uint8, not empty."""

    name: str
    rank: int
    world_size: int
    timeout: float

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending: ...

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending: ...


class PendingBytes(Protocol):
    """A few bytes that are expected."""

    def wait(self, timeout: float) -> bytes:
        """The bytes; raises `PeerError` where they cannot come any more."""


@runtime_checkable
class ByteCarrier(Protocol):
    """A carrier with a short way for a few bytes, as headers are."""

    def send_bytes(self, data: bytes, to: int, slot: int) -> Pending: ...

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes: ...


@runtime_checkable
class Memory(Protocol):
    """Memory of a rank that its peers can read, each from where it is."""

    def allocate(self, nbytes: int) -> UntypedStorage:
        """``nbytes`` with undefined content, freed with their last holder; `MemoryError` where there are none."""

    def give_up(self, to: int, slot: int) -> None:
        """Tell a peer that nothing is sent to it any more in this slot, nor read of what it sent: its waits there raise
        `GoneError`."""

    def place(self, tensor: Tensor) -> int | None:
        """What tells a peer where the tensor's first byte lies; None where it lies elsewhere."""

    def look(self, source: int, place: int, nbytes: int) -> Tensor:
        """Bytes of rank ``source``, 1-D, in its own memory: to be read only, and only while it lends them."""


class Region(Protocol):
    """Memory that is the same for all ranks. Each writes in its own part, for all; what it reads is as all wrote it,
    but for what it writes there itself, which nobody else sees."""

    def own(self, low: int, high: int) -> Tensor:
        """The bytes from ``low`` to ``high``, 1-D, which this rank writes for all."""

    def whole(self) -> Tensor:
        """All bytes, 1-D, to be read."""

    def written(self) -> list[tuple[int, int]]:
        """Where this rank may have written into `whole` since `refresh`: begin and end in bytes."""

    def refresh(self) -> None:
        """Forget what this rank wrote into `whole`."""


@runtime_checkable
class CommonMemory(Protocol):
    """A carrier all of whose ranks can have memory in common."""

    def common(self, sizes: Sequence[int]) -> Sequence[Region] | None: ...


class Work(Protocol):
    """A collective under way. ``wait`` completes it; waiting again does nothing."""

    def wait(self) -> None: ...


class Collective(Protocol):
    """An algorithm over a transport. All ranks of the group call each method, with equal bounds and tag.

    Works are waited for in the order in which they were launched, by every rank: a wait may end only when peers have
    read what this rank gave them.

    ``bounds`` has world_size + 1 entries, ascending from 0 to the number of elements: rank r owns
    ``[bounds[r], bounds[r + 1])``, which may be uneven or empty.
    """

    name: str
    exact: bool
    transport: Transport  # its messages' own; whoever uses the algorithm takes memory and makes exchanges there, too

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """Add all ranks' contributions to this rank's slice of ``source`` onto ``start`` and put the sum in ``out``.

        ``source``: this rank's contribution to every slice, 1-D; scratch to the algorithm until ``wait`` returns, as
        is ``start``.
        ``out``: as long as this rank's slice, in the accumulator's dtype; may share memory with this rank's own slice
        of ``source``, or be ``start``. ``start``: the sum so far, in ``out``'s dtype, or None where there is none.
        Where `exact` is true, the sum is formed in rank order: ((start + x_0) + x_1) + ...

        The first of a round sends a header to every other rank before it waits for one, whatever the bounds: that is
        how a rank in `Transport.meet` learns of the round.
        """

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """Fill every other rank's slice of ``buffer`` with what that rank has there; one's own slice is the input."""


class Chain:
    """Several pieces of work as one, waited for in order."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works: deque[Work] = deque(works)

    def wait(self) -> None:
        while self._works:
            self._works[0].wait()
            self._works.popleft()


def _cut(label: str) -> bytes:
    """What of a label fits into a header, in whole characters."""
    return label.encode(errors="replace")[:LABEL_BYTES].decode(errors="ignore").encode()
