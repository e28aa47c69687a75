"""Ranks of a program that are threads and share memory, as processes of one host do.

Knows: the internals of `collectives`, through `tests.support.sockets`; no other module of this package does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from collectives import Algorithm, Collective, Hierarchical, Loopback, Shared, Transport
from zero import Offload

from ..carried import folded
from ..sockets import Wire, meet, routed
from .backends import LIMIT, Threads, copy_of
from .program import Config, Setting
from .ranks import Rank, Saved


def one_host(transport: Transport) -> Collective:
    """Return the algorithm of processes on one host: real sockets, and shared memory."""
    return Shared(Transport(meet(transport)))


def two_hosts(transport: Transport) -> Collective:
    """Return the algorithm of two hosts: shared memory on each, and the transport's own messages between them."""
    middle = (transport.world_size + 1) // 2
    hosts = [ranks for ranks in (range(middle), range(middle, transport.world_size)) if ranks]
    return Hierarchical(routed(transport, hosts), hosts)


HOSTS: dict[str, Algorithm] = {"one host": one_host, "two hosts": two_hosts, "hosts in a row": folded}


class RankOnHosts(Rank):
    """A rank whose setting may name one of `HOSTS`."""

    algorithms: ClassVar[Mapping[str, Algorithm]] = HOSTS


class ThreadsOnHosts(Threads):
    """Ranks as threads, whose setting may name one of `HOSTS`."""

    rank: ClassVar[type[Rank]] = RankOnHosts


class RankWithParametersOnTheHost(RankOnHosts):
    """A rank whose parameters are in the host's memory at stage 3."""

    offload_at_stage_3 = Offload("cpu", parameters="cpu")


class ThreadsWithParametersOnTheHost(Threads):
    """Ranks as threads whose parameters are in the host's memory at stage 3."""

    rank: ClassVar[type[Rank]] = RankWithParametersOnTheHost


class Sockets(Threads):
    """Ranks as threads that connect as processes of one host do, and so share memory. Nothing is delayed."""

    connected: ClassVar[Callable[[Transport], Transport]] = staticmethod(lambda group: Transport(meet(group)))

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        self._group = Loopback(setting.world_size, timeout=LIMIT)
        self._ranks = self._group.run(
            lambda group: self.rank(config, setting, self.connected(group), group.rank, copy_of(saved))
        )


class Wires(Sockets):
    """Ranks as threads that share no memory, unless hosts that a test pretends say so. Nothing is delayed."""

    connected = staticmethod(lambda group: Transport(Wire(group.backend)))
