"""Ranks of a program that are threads and share memory, as processes of one host do.

Knows: the internals of `collectives`, through `tests.support.sockets`; no other module of this package does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from collectives import Algorithm, Collective, Hierarchical, Shared, Transport
from zero import Offload

from ..carried import folded
from ..sockets import Wire, meet, routed
from .backends import Threads
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

    def _place(self, setting: Setting, group: Transport) -> Transport:
        return Transport(meet(group)) if setting.host else group


class RankWithParametersOnTheHost(RankOnHosts):
    """A rank whose parameters are in the host's memory at stage 3."""

    offload_at_stage_3 = Offload("cpu", parameters="cpu")


class ThreadsWithParametersOnTheHost(Threads):
    """Ranks as threads whose parameters are in the host's memory at stage 3."""

    rank: ClassVar[type[Rank]] = RankWithParametersOnTheHost


class Sockets(Threads):
    """Ranks as threads that connect as processes of one host do, and so share memory. Nothing is delayed."""

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        super().start(replace(config, delays=False), setting, saved)

    def _place(self, setting: Setting, group: Transport) -> Transport:
        return Transport(meet(group))


class Wires(Sockets):
    """Ranks as threads that share no memory, unless hosts that a test pretends say so. Nothing is delayed."""

    def _place(self, setting: Setting, group: Transport) -> Transport:
        return Transport(Wire(group.backend))
