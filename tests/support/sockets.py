"""Ranks of one process whose bytes travel as between processes: through real sockets and real shared memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from collectives import Collective, CollectiveError, Kind, Loopback, Tag, Transport, topology
from collectives.backend import Backend, Pending
from collectives.backends.rendezvous import HostListener, RankInfo, exchange_infos, join
from collectives.backends.shared_memory import Arena, HybridBackend, PeerProcess, SharedMemoryBackend, Window

T = TypeVar("T")
ARENA = 1 << 26


def mesh(world_size: int, timeout: float = 5.0) -> list[SharedMemoryBackend]:
    """Return connected backends, for tests with a single thread: a frame can be received as soon as it was sent."""
    arenas = [Arena(ARENA) for _ in range(world_size)]
    peers: list[list[PeerProcess | None]] = [[None] * world_size for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, other, end in zip((a, b), (b, a), ends, strict=True):
                peers[rank][other] = PeerProcess(end, socket.socket(), Window(arenas[other].fd), 0, 0.0)
    return [SharedMemoryBackend(rank, peers[rank], arenas[rank], timeout) for rank in range(world_size)]


def leave(backend: SharedMemoryBackend) -> None:
    """Close all sockets of a rank, as the end of its process does."""
    for peer in backend._peers:
        if peer is not None:
            peer.socket.close()


def meet(transport: Transport) -> SharedMemoryBackend:
    listener = HostListener(transport.world_size)
    try:
        backend = join(transport, listener, exchange_infos(transport, listener))
    finally:
        listener.close()
    assert isinstance(backend, SharedMemoryBackend), backend
    return backend


def routed(transport: Transport, hosts: Sequence[Sequence[int]]) -> Transport:
    """Return a transport that uses shared memory within each of ``hosts``, and the given backend between them."""
    mine = next(ranks for ranks in hosts if transport.rank in ranks)
    local = meet(transport.split(mine))
    return transport.over(HybridBackend(transport.backend, local, transport.backend_ranks(mine)))


def on_sockets(world_size: int, program: Callable[[Transport], T], *, timeout: float = 20.0) -> list[T]:
    return Loopback[T](world_size, timeout=timeout).run(lambda transport: program(Transport(meet(transport))))


class Wire(Backend):
    """A network made of the mailboxes of threads: a backend whose ranks share no memory."""

    name = "wire"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank, self.world_size, self.timeout = backend.rank, backend.world_size, backend.timeout

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        return self._backend.send(tensor, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        return self._backend.recv(tensor, source, slot)


def on_wires(world_size: int, program: Callable[[Transport], T], *, timeout: float = 20.0) -> list[T]:
    group = Loopback[T](world_size, timeout=timeout)
    return group.run(lambda transport: program(Transport(Wire(transport.backend))))


def on_hosts(patch: pytest.MonkeyPatch, hosts: Sequence[int], containers: Sequence[int] = ()) -> None:
    """Pretend that rank r is on host ``hosts[r]``, or in a container of its own there."""
    pairs = zip(hosts, containers or [1] * len(hosts), strict=True)
    names = [f"machine{host} {container}" for host, container in pairs]

    def infos(transport: Transport, listener: HostListener) -> list[RankInfo]:
        found = exchange_infos(transport, listener)
        return [replace(info, host=name) for info, name in zip(found, names, strict=True)]

    patch.setattr(topology, "exchange_infos", infos)


def works(collective: Collective) -> str:
    """Return the name of an algorithm, after a check of its results."""
    t = collective.transport
    bounds = [3 * rank for rank in range(t.world_size + 1)]
    whole = torch.zeros(bounds[-1])
    own = whole[bounds[t.rank] : bounds[t.rank + 1]]
    source = torch.full((bounds[-1],), 1.0 + t.rank)
    collective.reduce_scatter(source, bounds, own, start=None, tag=Tag(Kind.REDUCE_SCATTER, "sum", 1)).wait()
    collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
    assert whole.tolist() == [sum(range(1, t.world_size + 1))] * bounds[-1]
    return collective.name


def outcome(make: Callable[[Transport], Collective]) -> Callable[[Transport], str]:
    def program(transport: Transport) -> str:
        try:
            return works(make(transport))
        except CollectiveError as error:
            return str(error)

    return program
