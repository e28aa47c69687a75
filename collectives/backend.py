"""What moves bytes between ranks: the interface that transports use, and the default for short messages.

Knows: the ranks and slots of a backend. Does not know: headers, or what is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, UntypedStorage

NCCL = frozenset({"nccl", "nccl2", "nccl-legacy"})  # torch's names for it: after 2.13 there are two implementations


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float) -> None:
        """Return when the tensor may be used again. Raises `PeerError` if a peer failed, or in ``timeout`` seconds."""


class DevicePending(Pending, Protocol):
    """A collective on a device, for which a stream waits and the host does not."""

    def ended(self) -> bool:
        """Return whether a stream waits for it and it has ended. Any thread may call this."""


class PendingBytes(Protocol):
    """A receive of a short message."""

    def wait(self, timeout: float) -> bytes:
        """Return the bytes. Raises `PeerError` if the peer failed, or after ``timeout`` seconds."""


class Region(Protocol):
    """Memory that several ranks have in common. Each rank writes its own part, and all ranks read it. A write into
    `whole` stays private to the rank that made it. Offsets are in bytes; tensors are 1-D and uint8."""

    def own(self, low: int, high: int) -> Tensor:
        """Return the bytes ``[low, high)``, 1-D, for this rank to write."""

    def whole(self, low: int = 0, high: int | None = None) -> Tensor:
        """Return the bytes ``[low, high)``, or to the end, 1-D, to be read."""

    def written(self) -> list[tuple[int, int]]:
        """Return the pages of `whole` that this rank may have written since `refresh`: begin and end in bytes."""

    def refresh(self, low: int = 0, high: int | None = None) -> None:
        """Undo what this rank wrote into those pages of `whole` that lie in ``[low, high)``, wholly or in part."""


class Backend(ABC):
    """Moves bytes between two ranks, in order for each pair of ranks and slot.

    Tensors are 1-D, contiguous, uint8 and not empty. Every backend has `send` and `recv`. If `maps_memory` or
    `has_collectives` is True, it also has the methods of that group.
    """

    maps_memory: ClassVar[bool] = False
    has_collectives: ClassVar[bool] = False

    name: str
    rank: int
    world_size: int
    timeout: float  # seconds
    stall_limit: float = 10.0  # seconds for which a rank waits on a device, or for messages, before it asks why

    @abstractmethod
    def send(self, tensor: Tensor, to: int, slot: int) -> Pending: ...

    @abstractmethod
    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending: ...

    # -- short messages, such as headers ------------------------------------------------------------------------------

    def needs_posted_recv(self, source: int) -> bool:
        """Return True if receives from a rank should be posted before it sends, as over a network."""
        return True

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        """``patience``: seconds for which the peer may leave no room for these bytes; None is the time limit."""
        return self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, slot)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return _BytesOfTensor(buffer, self.recv(buffer, source, slot))

    # -- memory that all of the ranks have in common ------------------------------------------------------------------

    def share_host(self, ranks: Sequence[int]) -> bool:
        """Return True if all of these ranks are on this host and can have common memory."""
        return False

    def common(self, sizes: Sequence[int], ranks: Sequence[int]) -> Sequence[Region] | None:
        """Map shared regions of these sizes, in bytes. All of ``ranks``, which share a host, must call it. Return None
        if this rank has no memory for them; another rank may have it."""
        return None

    # -- memory of a rank that its peers read in place: `maps_memory` -------------------------------------------------

    def allocate(self, nbytes: int) -> UntypedStorage:
        """Return ``nbytes`` with undefined content, freed with their last holder. Raise `MemoryError` if there are
        none."""
        raise NotImplementedError

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of the tensor's first byte, for `map_peer` on a peer; None if peers cannot read it."""
        raise NotImplementedError

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return elements of rank ``source``, 1-D, in its own memory. They are to be read, and only while that rank
        exposes them."""
        raise NotImplementedError

    def close_slot(self, to: int, slot: int) -> None:
        """Send nothing more to a peer in this slot, and read nothing more of what it sent: its waits there raise
        `GoneError`."""
        raise NotImplementedError

    # -- its own collectives, among all of its ranks: `has_collectives` -----------------------------------------------
    #
    # All ranks launch them in the same order. Tensors are 1-D and contiguous, and must not change until the wait. A
    # rank must expect the sizes that the others send. Nothing detects a difference, so the ranks must agree before.

    def device_backend(self, device: torch.device) -> str:
        """Return the name of the library that moves this device's tensors in these collectives; "" if there is none."""
        return ""

    def stays_on(self, device: torch.device) -> bool:
        """Return True if these collectives move tensors of an accelerator without the host's memory."""
        return self.device_backend(device) in NCCL

    @property
    def has_parts(self) -> bool:
        """Whether some of these ranks can have their own collectives: `part`."""
        return False

    def knows_parts(self, parts: Sequence[Sequence[int]]) -> bool:
        """Return whether `part` can return these parts, though `has_parts` may be False."""
        return False

    def part(self, parts: Sequence[Sequence[int]]) -> Backend:
        """Return the backend of a part of these ranks, with its own collectives. All ranks call it with the same
        ``parts``, which are disjoint and ascending; this rank is in one of them."""
        raise NotImplementedError

    def all_to_all(self, out: Tensor, source: Tensor, splits: tuple[list[int], list[int]] | None) -> Pending:
        """Send each rank its part of ``source``, in rank order. ``out``: what each rank sent here, in rank order.
        ``splits``: the sizes of the parts of ``out`` and of ``source``; None if all parts are equally long."""
        raise NotImplementedError

    def all_gather(self, out: Tensor, source: Tensor) -> Pending:
        """Put every rank's ``source``, all equally long, into ``out``. ``source`` may be its own part of ``out``."""
        raise NotImplementedError

    def reduce_scatter(self, out: Tensor, source: Tensor) -> Pending:
        """Put the sum over all ranks of this rank's part of ``source`` into ``out``. Parts are equally long."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Copy the tensor of rank ``source`` to all ranks."""
        raise NotImplementedError

    def pass_to(self, tensor: Tensor, to: int) -> Pending:
        """Send a tensor to a rank, which calls `take_from`. Two ranks do so in one direction only."""
        raise NotImplementedError

    def take_from(self, tensor: Tensor, source: int) -> Pending:
        """Receive what a rank sends by `pass_to`."""
        raise NotImplementedError

    def board(self) -> Any:
        """Return a store of torch's that all of these ranks have, for sentinels; None if there is none. Local."""
        return None

    def is_closed(self, rank: int) -> bool:
        """Return whether the connection to a rank is closed, since its process has ended. Any thread may call this."""
        return False

    def interrupt(self) -> None:
        """End the waits for messages that are under way in other threads, by an error, if the backend can. No further
        message is sure to arrive then."""
        return

    def abort_collectives(self) -> bool:
        """End the collectives under way on devices, which may wait for a lost rank for ever. Return whether there were
        any: these ranks can run no further ones then."""
        return False


class _BytesOfTensor:
    def __init__(self, buffer: Tensor, pending: Pending) -> None:
        self._buffer, self._pending = buffer, pending

    def wait(self, timeout: float) -> bytes:
        self._pending.wait(timeout)
        return self._buffer.numpy().tobytes()
