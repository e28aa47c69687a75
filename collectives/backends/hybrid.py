"""Ranks of several hosts: shared memory to those of this host, the network to the others.

Knows: which backend reaches a rank. Does not know: what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from ..backend import Backend, Pending, PendingBytes, Region
from .shared_memory import SharedMemoryBackend


class HybridBackend(Backend):
    """A local and a remote backend as one."""

    maps_memory = True

    def __init__(self, remote: Backend, local: SharedMemoryBackend, ranks: Sequence[int]) -> None:
        """``ranks``: the remote backend's numbers of the ranks of this host, in the order of the local backend."""
        self.name = f"{local.name} and {remote.name}"
        self.rank, self.world_size, self.timeout = remote.rank, remote.world_size, remote.timeout
        self._remote, self._local = remote, local
        self._local_ranks = {rank: offset for offset, rank in enumerate(ranks)}

    def _reaching(self, rank: int) -> tuple[Backend, int]:
        """Return the backend that reaches a rank, and the rank's number there."""
        return (self._local, self._local_ranks[rank]) if rank in self._local_ranks else (self._remote, rank)

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        backend, rank = self._reaching(to)
        return backend.send(tensor, rank, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        backend, rank = self._reaching(source)
        return backend.recv(tensor, rank, slot)

    def needs_posted_recv(self, source: int) -> bool:
        return source not in self._local_ranks

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        backend, rank = self._reaching(to)
        return backend.send_bytes(data, rank, slot, patience)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        backend, rank = self._reaching(source)
        return backend.recv_bytes(size, rank, slot)

    def close_slot(self, to: int, slot: int) -> None:
        if to in self._local_ranks:
            self._local.close_slot(self._local_ranks[to], slot)

    def allocate(self, nbytes: int) -> UntypedStorage:
        return self._local.allocate(nbytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        return self._local.offset_of(tensor)

    def share_host(self, ranks: Sequence[int]) -> bool:
        return all(rank in self._local_ranks for rank in ranks)

    def common(self, sizes: Sequence[int], ranks: Sequence[int]) -> Sequence[Region] | None:
        return self._local.common(sizes, [self._local_ranks[rank] for rank in ranks])

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._local.map_peer(self._local_ranks[source], offset, nbytes, dtype)
