"""Types that transports and algorithms share: tags and headers, errors, counters, and work under way.

Knows: the content of a header. Does not know: how a message travels, or what an algorithm does with it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

LABEL_BYTES = 76
REPORT_BYTES = 4096  # of the report of why a rank failed
_REPORT = struct.Struct("<iI")  # culprit, length of the reason
_TAG = struct.Struct(f"<iqiqqH{LABEL_BYTES}s10x")
_OFFSET = struct.Struct("<q")
HEADER_BYTES = _TAG.size + _OFFSET.size  # 128


class Kind(IntEnum):
    """The kind of call that a message belongs to."""

    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    EXCHANGE = 3
    GATHER = 4
    MEET = 5
    ABORT = 6
    BROADCAST = 7


class Tag(NamedTuple):
    """Identifies a collective. Ranks in different collectives detect it by their tags, before any bytes mix.

    Attributes:
        kind: the kind of collective.
        label: the collective in error messages; a header holds its first 76 bytes in UTF-8.
        round: counts what repeats, such as backward passes; a signed 64-bit integer.
        index: distinguishes the collectives of a round, such as buckets or meetings; a signed 32-bit integer.
        digest: a checksum of everything else that the ranks must agree on; a signed 64-bit integer.
    """

    kind: Kind
    label: str
    round: int = 0
    index: int = 0  # type: ignore[assignment] # a tuple's method, which nothing calls
    digest: int = 0

    def digested(self, digest: int) -> Tag:
        """Return the tag with another digest."""
        return Tag(self.kind, self.label, self.round, self.index, digest)

    def pack(self, size: int) -> bytes:
        """Return the beginning of the header of a message of ``size`` bytes; `with_offset` completes it."""
        label = _cut(self.label)
        return _TAG.pack(self.kind, self.round, self.index, self.digest, size, len(label), label)

    @classmethod
    def unpack(cls, header: bytes) -> tuple[Tag, int]:
        """Return the tag in a header, and the size of the message in bytes."""
        kind, round_, index, digest, size, length, label = _TAG.unpack_from(header)
        return cls(Kind(kind), label[:length].decode(), round_, index, digest), size

    def same(self, other: Tag) -> bool:
        """Return True if both tags have the same header, and so identify the same collective."""
        mine = (self.kind, self.round, self.index, self.digest, _cut(self.label))
        return mine == (other.kind, other.round, other.index, other.digest, _cut(other.label))


Tag.__new__.__annotations__["kind"] = Kind  # the API page cannot resolve the name in a named tuple's module


def with_offset(packed: bytes, offset: int = 0) -> bytes:
    """Complete a header by the offset of the message's bytes in memory that the receiver can map."""
    return packed + _OFFSET.pack(offset)


def header_offset(header: bytes) -> int:
    return int(_OFFSET.unpack_from(header, _TAG.size)[0])


def describe(tag: Tag) -> str:
    return f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"


def is_abort(header: bytes) -> bool:
    return int.from_bytes(header[:4], "little") == Kind.ABORT


class CollectiveError(RuntimeError):
    """A collective could not be completed. The message names the ranks and the collective."""


class MismatchError(CollectiveError):
    """Ranks of one group entered different collectives."""


class PeerError(CollectiveError):
    """Another rank failed, ended or did not answer in time."""


class GoneError(PeerError):
    """Another rank will send nothing more. Its earlier messages can still be read, such as a failure report."""


@dataclass(frozen=True)
class Failure:
    """Why a group is closed. ``culprit``: the rank that failed first, as far as is known. ``reason``: the message of
    the rank that noticed it first."""

    culprit: int
    reason: str

    def pack(self) -> bytes:
        """Return `REPORT_BYTES`, whatever the reason: receives for them are posted before there is one."""
        text = self.reason.encode(errors="replace")[: REPORT_BYTES - _REPORT.size]
        return (_REPORT.pack(self.culprit, len(text)) + text).ljust(REPORT_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Failure:
        culprit, length = _REPORT.unpack_from(data)
        return cls(culprit, data[_REPORT.size :][:length].decode(errors="replace"))


@dataclass
class Traffic:
    """Bytes and messages of one rank so far. Payload is the data of algorithms. Control is headers and exchanges; it
    excludes acknowledgements and markers, which are single bytes. The difference of two is the traffic in between."""

    payload_sent: int = 0
    payload_received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f) - getattr(earlier, f) for f in self.__dataclass_fields__))


class Work(Protocol):
    """A collective under way. ``wait`` completes it. A second ``wait`` does nothing."""

    def wait(self) -> None:
        """Complete the collective. Local. Raises `CollectiveError` if it could not be completed."""


@runtime_checkable
class StagedWork(Work, Protocol):
    """A work with a part that other ranks need before it can be complete here, such as a sum that they add to.

    All ranks pass such works on in the same order, and wait for them in that order, too. Between the two calls for one
    work, other works may be passed on.
    """

    def pass_on(self) -> None:
        """Do the part that other ranks need, and release the input. Further calls do nothing."""


def pass_on(work: Work) -> None:
    """Call ``work.pass_on()`` if it is a `StagedWork`; else complete the work. Local."""
    if isinstance(work, StagedWork):
        work.pass_on()
    else:
        work.wait()


class Chain:
    """Several works as one. ``wait`` waits for them in order."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works: deque[Work] = deque(works)

    def wait(self) -> None:
        """Wait for the works, in order. Local."""
        while self._works:
            self._works[0].wait()
            self._works.popleft()


def _cut(label: str) -> bytes:
    """Return the part of a label that fits into a header, in whole characters."""
    encoded = label.encode(errors="replace")
    return encoded if len(encoded) <= LABEL_BYTES else encoded[:LABEL_BYTES].decode(errors="ignore").encode()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"a 1-D contiguous tensor is needed, not shape {tuple(tensor.shape)}")
    return tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
