"""What moves bytes between ranks, as transports see it: protocols, and the short way over a backend without one.

Knows: ranks and slots of a backend. Does not know: headers, or what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, UntypedStorage


class Pending(Protocol):
    """A transfer of a backend under way."""

    def wait(self, timeout: float) -> None:
        """Return when the tensor may be used again; raise `PeerError` where that cannot happen any more."""


class Backend(Protocol):
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
    """A backend with a short way for a few bytes, as headers are."""

    def needs_posted_recv(self, source: int) -> bool:
        """True where receives from a rank should be posted before it sends, as over a network."""

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        """``patience``: seconds for which a peer may read nothing, so that there is no room for these; the backend's
        time limit where None."""

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes: ...


@runtime_checkable
class Memory(Protocol):
    """Memory of a rank that its peers can read, each from where it is."""

    def allocate(self, nbytes: int) -> UntypedStorage:
        """``nbytes`` with undefined content, freed with their last holder; `MemoryError` where there are none."""

    def close_slot(self, to: int, slot: int) -> None:
        """Tell a peer that nothing is sent to it any more in this slot, nor read of what it sent: its waits there raise
        `GoneError`."""

    def offset_of(self, tensor: Tensor) -> int | None:
        """What tells a peer where the tensor's first byte lies; None where it lies elsewhere."""

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Elements of rank ``source``, 1-D, in its own memory: to be read only, and only while it lends them."""


class Region(Protocol):
    """Memory that is the same for all ranks. Each writes in its own part, for all; what it reads is as all wrote it,
    but for what it writes there itself, which nobody else sees."""

    def own(self, low: int, high: int) -> Tensor:
        """The bytes from ``low`` to ``high``, 1-D, which this rank writes for all."""

    def whole(self, low: int = 0, high: int | None = None) -> Tensor:
        """The bytes from ``low`` to ``high``, or to the end, 1-D, to be read."""

    def written(self) -> list[tuple[int, int]]:
        """Where this rank may have written into `whole` since `refresh`: begin and end in bytes, by whole pages."""

    def refresh(self, low: int = 0, high: int | None = None) -> None:
        """Forget what this rank wrote into the pages of `whole` that lie in ``[low, high)``, wholly or in part."""


@runtime_checkable
class CommonMemory(Protocol):
    """A backend whose ranks, or those of a host, can have memory in common."""

    def share_host(self, ranks: Sequence[int]) -> bool:
        """True where all of these ranks share this host."""

    def common(self, sizes: Sequence[int], ranks: Sequence[int]) -> Sequence[Region] | None:
        """Regions of these bytes that are the same for ``ranks``, who are here and all call this; None where there is
        no memory for them, which ranks may find apart."""


@runtime_checkable
class OwnCollectives(Protocol):
    """A backend with collectives of its own, among all of its ranks, which begin them in the same order.

    Tensors are 1-D and contiguous, and stay as they are until the wait. The sizes that a rank expects are those that
    the others send; nothing tells where they are not, so the ranks must have agreed before.
    """

    def device_backend(self, device: torch.device) -> str:
        """What moves tensors of this device in these collectives; empty where nothing does."""

    def all_to_all(self, out: Tensor, source: Tensor, out_splits: list[int], splits: list[int]) -> Pending:
        """Send each rank its part of ``source``, in rank order; ``out``: what each rank sent here, in rank order."""

    def all_gather(self, out: Tensor, source: Tensor) -> Pending:
        """Put every rank's ``source``, all equally long, into ``out``. ``source`` may be its own part of ``out``."""

    def reduce_scatter(self, out: Tensor, source: Tensor) -> Pending:
        """Put the sum over all ranks of this one's part of ``source`` into ``out``; parts are equally long."""


class ByTensors:
    """The short way for a few bytes over a backend that knows tensors alone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def needs_posted_recv(self, source: int) -> bool:
        return True

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._backend.send(tensor, to, slot)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return _BytesOfTensor(buffer, self._backend.recv(buffer, source, slot))


class _BytesOfTensor:
    def __init__(self, buffer: Tensor, pending: Pending) -> None:
        self._buffer, self._pending = buffer, pending

    def wait(self, timeout: float) -> bytes:
        self._pending.wait(timeout)
        return self._buffer.numpy().tobytes()
