"""Ranks of one process whose bytes travel as between processes: through real sockets and real shared memory.

Knows: how carriers are connected. Does not know: what is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from collectives import Loopback, Transport
from collectives.arena import Arena, Window
from collectives.host import HostCarrier, Peer
from collectives.rendezvous import Door, exchange_cards, join
from collectives.routed import RoutedCarrier

T = TypeVar("T")
ARENA = 1 << 26


def mesh(world_size: int, timeout: float = 5.0) -> list[HostCarrier]:
    """Connected carriers, for tests of a single thread: a frame that was sent is there."""
    arenas = [Arena(ARENA) for _ in range(world_size)]
    peers: list[list[Peer | None]] = [[None] * world_size for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, other, end in zip((a, b), (b, a), ends, strict=True):
                peers[rank][other] = Peer(end, socket.socket(), Window(os.dup(arenas[other].fd)), 0, 0.0)
    return [HostCarrier(rank, peers[rank], arenas[rank], timeout) for rank in range(world_size)]


def leave(carrier: HostCarrier) -> None:
    """As the end of a rank's process does."""
    for peer in carrier._peers:
        if peer is not None:
            peer.socket.close()


def meet(transport: Transport) -> HostCarrier:
    """Connect the ranks of a transport, as ranks of one host do."""
    door = Door()
    try:
        carrier = join(transport, door, exchange_cards(transport, door))
    finally:
        door.close()
    assert isinstance(carrier, HostCarrier), carrier
    return carrier


def routed(transport: Transport, hosts: Sequence[Sequence[int]]) -> Transport:
    """The ranks of each host connected, and the transport's own carrier between them, as if they were apart."""
    mine = next(ranks for ranks in hosts if transport.rank in ranks)
    local = meet(transport.split(mine))
    return transport.over(RoutedCarrier(transport.carrier, local, transport.carried(mine)))


def on_sockets(world_size: int, program: Callable[[Transport], T], *, timeout: float = 20.0) -> list[T]:
    """As `collectives.on_threads`, through sockets and shared memory."""
    return Loopback[T](world_size, timeout=timeout).run(lambda transport: program(Transport(meet(transport))))
