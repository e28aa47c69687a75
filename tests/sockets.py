"""Ranks of one process whose bytes travel as between processes: through real sockets and real shared memory.

Knows: how backends are connected. Does not know: what is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from collectives import Loopback, Transport
from collectives.backend import Backend, Pending
from collectives.backends.arena import Arena, Window
from collectives.backends.hybrid import HybridBackend
from collectives.backends.rendezvous import HostListener, exchange_infos, join
from collectives.backends.shared_memory import PeerProcess, SharedMemoryBackend

T = TypeVar("T")
ARENA = 1 << 26


def mesh(world_size: int, timeout: float = 5.0) -> list[SharedMemoryBackend]:
    """Connected backends, for tests of a single thread: a frame that was sent is there."""
    arenas = [Arena(ARENA) for _ in range(world_size)]
    peers: list[list[PeerProcess | None]] = [[None] * world_size for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, other, end in zip((a, b), (b, a), ends, strict=True):
                peers[rank][other] = PeerProcess(end, socket.socket(), Window(arenas[other].fd), 0, 0.0)
    return [SharedMemoryBackend(rank, peers[rank], arenas[rank], timeout) for rank in range(world_size)]


def leave(backend: SharedMemoryBackend) -> None:
    """As the end of a rank's process does."""
    for peer in backend._peers:
        if peer is not None:
            peer.socket.close()


def meet(transport: Transport) -> SharedMemoryBackend:
    """Connect the ranks of a transport, as ranks of one host do."""
    listener = HostListener(transport.world_size)
    try:
        backend = join(transport, listener, exchange_infos(transport, listener))
    finally:
        listener.close()
    assert isinstance(backend, SharedMemoryBackend), backend
    return backend


def routed(transport: Transport, hosts: Sequence[Sequence[int]]) -> Transport:
    """The ranks of each host connected, and the transport's own backend between them, as if they were apart."""
    mine = next(ranks for ranks in hosts if transport.rank in ranks)
    local = meet(transport.split(mine))
    return transport.over(HybridBackend(transport.backend, local, transport.backend_ranks(mine)))


def on_sockets(world_size: int, program: Callable[[Transport], T], *, timeout: float = 20.0) -> list[T]:
    """As `collectives.on_threads`, through sockets and shared memory."""
    return Loopback[T](world_size, timeout=timeout).run(lambda transport: program(Transport(meet(transport))))


class Wire(Backend):
    """Threads' mailboxes as a network: a backend whose ranks see none of each other's memory."""

    name = "wire"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank, self.world_size, self.timeout = backend.rank, backend.world_size, backend.timeout
        self.sent = 0  # bytes

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        self.sent += tensor.numel()
        return self._backend.send(tensor, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        return self._backend.recv(tensor, source, slot)


def on_wires(world_size: int, program: Callable[[Transport], T], *, timeout: float = 20.0) -> list[T]:
    """As `collectives.on_threads`, without memory that others see."""
    group = Loopback[T](world_size, timeout=timeout)
    return group.run(lambda transport: program(Transport(Wire(transport.backend))))
