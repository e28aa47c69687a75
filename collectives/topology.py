"""Which ranks share a host, and the transport and algorithm that follow from it.

    one rank                          pairwise, which then sends nothing
    ranks that are threads            pairwise: tests ask for others by name
    all on one host                   shared
    on several hosts                  hierarchical
    each on a host of its own         pairwise, which is the same then, without a detour through shared memory
    GPUs on one host, with NCCL       all_to_all
    GPUs on several hosts, with NCCL  native: it sends less, and adds in an order of its own
    memory that cannot be shared      pairwise, with a warning

Knows: the ranks' hosts, found from the ranks themselves, and every algorithm by what it needs. Does not know: bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .all_to_all import AllToAll
from .carriers import OwnCollectives
from .hierarchical import Hierarchical
from .host import HostCarrier
from .loopback import LoopbackCarrier
from .messages import Collective, CollectiveError, Kind, Tag
from .pairwise import Pairwise
from .rendezvous import Card, Door, exchange_cards, join
from .routed import RoutedCarrier
from .shared import Shared
from .transport import Transport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a group, and this rank's connections to the ranks of its own."""

    hosts: tuple[tuple[int, ...], ...]  # ranks by host, in the order of each host's first rank
    local: HostCarrier | None  # among the ranks of this host; None where they cannot share memory
    problem: str  # why some host's ranks cannot; empty where all can; the same on every rank


def meet_neighbours(transport: Transport) -> Neighbours:
    """Find the ranks of each host and connect them. Collective."""
    door = Door(transport.world_size)
    try:
        cards = exchange_cards(transport, door)
        hosts = _hosts(cards)
        mine = next(ranks for ranks in hosts if transport.rank in ranks)
        carrier = join(transport.split(mine), door, [cards[rank] for rank in mine])
    finally:
        door.close()
    problem = carrier if isinstance(carrier, str) else ""
    told = transport.exchange(problem.encode(), Tag(Kind.EXCHANGE, "who shares memory"))
    problem = next((text.decode(errors="replace") for text in told if text), "")
    local = None if isinstance(carrier, str) or problem else carrier
    return Neighbours(hosts, local, problem)


def _hosts(cards: Sequence[Card]) -> tuple[tuple[int, ...], ...]:
    """See `Neighbours.hosts`."""
    by_host: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        by_host.setdefault(card.host, []).append(rank)
    return tuple(map(tuple, by_host.values()))


def shared(transport: Transport) -> Collective:
    """`Shared` among ranks of one host; `CollectiveError` where they are not, or cannot share memory. Collective."""
    if isinstance(transport.carrier, LoopbackCarrier):
        return Shared(transport)
    neighbours = meet_neighbours(transport)
    if neighbours.local is None:
        raise CollectiveError(f"collective 'shared': {neighbours.problem}")
    if len(neighbours.hosts) > 1:
        raise CollectiveError(f"collective 'shared' is for ranks of one host, and these are on {neighbours.hosts}")
    return Shared(Transport(neighbours.local))


@dataclass(frozen=True)
class Choice:
    """An algorithm, and why it was chosen."""

    collective: Collective
    why: str


def choose(transport: Transport, device: torch.device = CPU) -> Choice:
    """The fastest algorithm for where the ranks are, and exact but for GPUs of several hosts. Collective. ``device``:
    where most tensors are that it will move."""
    if transport.world_size == 1:
        return Choice(Pairwise(transport), "one rank sends nothing")
    if isinstance(transport.carrier, LoopbackCarrier):
        return Choice(Pairwise(transport), "the ranks are threads")
    if _all_have_nccl(transport, device):
        return _by_nccl(transport)
    neighbours = meet_neighbours(transport)
    hosts, local = neighbours.hosts, neighbours.local
    if local is None:
        why = f"the ranks talk over {transport.name}, not through shared memory: {neighbours.problem}"
        if transport.rank == 0:
            warnings.warn(why, stacklevel=2)
        return Choice(Pairwise(transport), why)
    if len(hosts) == 1:
        return Choice(Shared(Transport(local)), f"all {transport.world_size} ranks are on one host")
    if len(hosts) == transport.world_size:
        return Choice(Pairwise(transport), f"each of the {len(hosts)} ranks has a host of its own")
    return Choice(
        _between_hosts(transport, neighbours, local), f"{transport.world_size} ranks are on {len(hosts)} hosts"
    )


def _all_have_nccl(transport: Transport, device: torch.device) -> bool:
    """True where NCCL moves the tensors of every rank, which is asked: ranks must choose alike. Collective."""
    carrier = transport.carrier
    backend = carrier.backend(device) if isinstance(carrier, OwnCollectives) else ""
    told = transport.exchange(backend.encode(), Tag(Kind.EXCHANGE, "telling what moves a device's tensors"))
    return all(name == b"nccl" for name in told)


def _by_nccl(transport: Transport) -> Choice:
    door = Door(transport.world_size)
    try:
        hosts = _hosts(exchange_cards(transport, door))
    finally:
        door.close()
    if len(hosts) == 1:
        return Choice(AllToAll(transport), f"all {transport.world_size} ranks are on one host, with NCCL")
    from .native import Native  # the one module that needs torch.distributed

    return Choice(
        Native(transport),
        f"{transport.world_size} ranks are on {len(hosts)} hosts, where NCCL's own reduce-scatter sends less, but adds "
        "in an order of its own: collective='pairwise' keeps the bits of the plain loop",
    )


def hierarchical(transport: Transport) -> Collective:
    """`Hierarchical` among the hosts of the ranks; `CollectiveError` where ranks of a host cannot share memory.
    Collective."""
    if isinstance(transport.carrier, LoopbackCarrier):
        return Hierarchical(transport, [range(transport.world_size)])
    neighbours = meet_neighbours(transport)
    if neighbours.local is None:
        raise CollectiveError(f"collective 'hierarchical': {neighbours.problem}")
    return _between_hosts(transport, neighbours, neighbours.local)


def _between_hosts(transport: Transport, neighbours: Neighbours, local: HostCarrier) -> Collective:
    mine = next(ranks for ranks in neighbours.hosts if transport.rank in ranks)
    routed = RoutedCarrier(transport.carrier, local, transport.carried(mine))
    return Hierarchical(transport.over(routed), neighbours.hosts)
