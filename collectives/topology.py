"""Which ranks share a host, and the transport and algorithm that follow from it.

    one rank                          pairwise, which sends nothing then
    ranks that are threads            pairwise: tests name other algorithms
    all on one host                   shared
    on several hosts                  hierarchical
    each on its own host              pairwise: the same then, without a detour through shared memory
    GPUs on one host, with NCCL       all_to_all
    GPUs on several hosts, with NCCL  fold, by process groups of hosts and of rails; with one GPU on each, all_to_all
    ... not numbered host by host     native, which adds in NCCL's order
    replicas on GPUs, with NCCL       all_to_all by process groups of their ranks, and sums from GPU to GPU
    ... some on several hosts         native
    memory that cannot be shared      pairwise, with a warning

If shards have several holders (`replicate`), these lines are about the ranks of one replica.

Knows: the ranks' hosts, found by the ranks themselves, and what each algorithm needs. Does not know: bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .algorithms.base import Collective
from .algorithms.fold import Fold, FoldOnDevices
from .algorithms.hybrid_sharding import Replicated
from .algorithms.pairwise import Pairwise
from .algorithms.plans import folded, why_not_folded
from .algorithms.process_group import AllToAll, Native
from .backend import NCCL, Backend
from .backends.rendezvous import HostListener, exchange_infos, host_key, join, machine_of
from .backends.shared_memory import HybridBackend, SharedMemoryBackend
from .backends.threads import ThreadBackend
from .links.control_plane import MESH_RANKS
from .messages import CollectiveError, Kind, Tag
from .named import ALGORITHMS, Hosts, Needs
from .transport import Transport, as_a_whole

CPU = torch.device("cpu")
Build = Callable[[Transport], Collective]


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a group, and this rank's connections to the ranks of its own host."""

    hosts: tuple[tuple[int, ...], ...]  # ranks by host, in the order of each host's first rank
    local: SharedMemoryBackend | None  # among the ranks of this host; None where they cannot share memory
    problem: str  # why the ranks of some host cannot; empty if all can; the same on every rank

    def among(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the hosts of some ranks, which are numbered by their positions in ``ranks``."""
        numbers = ([n for n, rank in enumerate(ranks) if rank in host] for host in self.hosts)
        return [found for found in numbers if found]


def connect_neighbours(transport: Transport) -> Neighbours:
    """Find the ranks of each host and connect them. Collective."""
    listener = HostListener(transport.world_size)
    try:
        infos = exchange_infos(transport, listener)
        hosts = _hosts([info.host for info in infos])
        mine = next(ranks for ranks in hosts if transport.rank in ranks)
        backend = join(transport.split(mine), listener, [infos[rank] for rank in mine])
    finally:
        listener.close()
    problem = backend if isinstance(backend, str) else ""
    problems = transport.exchange(problem.encode(), Tag(Kind.EXCHANGE, "who shares memory"))
    problem = next((text.decode(errors="replace") for text in problems if text), "")
    local = None if isinstance(backend, str) or problem else backend
    return Neighbours(hosts, local, problem)


def _hosts(keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """See `Neighbours.hosts`. ``keys``: the `host_key` of each rank."""
    by_host: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        by_host.setdefault(key, []).append(rank)
    return tuple(map(tuple, by_host.values()))


def route_by_hosts(transport: Transport) -> None:
    """Let the short messages of many ranks go by a tree of their hosts, unless they do already. Collective."""
    if transport.world_size > MESH_RANKS and not transport.is_routed:
        keys = transport.exchange(host_key().encode(), Tag(Kind.EXCHANGE, "looking for the ranks of each host"))
        transport.route(_hosts([key.decode() for key in keys]))


def _through_shared_memory(transport: Transport, neighbours: Neighbours) -> Transport:
    """Return the same group, with shared memory between ranks of one host if that is possible."""
    if neighbours.local is None:
        return transport
    if len(neighbours.hosts) == 1:
        return Transport(neighbours.local, channel=transport.links.number)  # which tells optimizers apart
    mine = next(ranks for ranks in neighbours.hosts if transport.rank in ranks)
    return transport.over(HybridBackend(transport.backend, neighbours.local, transport.backend_ranks(mine)))


def by_name(transport: Transport, name: str, device: torch.device = CPU) -> Choice:
    """Build the algorithm of this name. Collective.

    `fold` goes over NCCL if that moves every rank's tensors on ``device``, else over messages. Raises `CollectiveError`
    if the ranks do not have what the algorithm `Needs`.
    """
    row, why = ALGORITHMS[name], "asked for by name"
    hosts: Hosts = [range(transport.world_size)]
    by_nccl = False
    if not isinstance(transport.backend, ThreadBackend):
        if row.shares_memory:
            neighbours = connect_neighbours(transport)
            _check(name, neighbours, hosts)
            transport, hosts = _through_shared_memory(transport, neighbours), neighbours.hosts
        elif row.needs is Needs.ORDERED_HOSTS and transport.world_size > 1:
            by_nccl, hosts = _all_have_nccl(transport, device), _hosts_of(transport)
            problem = why_not_folded(hosts) or (_why_no_parts(transport) if by_nccl else "")
            if problem:
                raise CollectiveError(f"collective {name!r}: {problem}")
    collective = _fold_by_nccl(transport, hosts, device) if by_nccl else row.build(transport, hosts)
    if not row.folds:
        return Choice(collective, why)
    why = f"{why}; {costs_between(transport.world_size, len(hosts))}"
    return Choice(collective, why, hosts=len(hosts))


def _check(name: str, neighbours: Neighbours, groups: Sequence[Sequence[int]]) -> None:
    """Raise `CollectiveError` if an algorithm that was asked for by name cannot work in each group of ranks."""
    if neighbours.local is None:
        raise CollectiveError(f"collective {name!r}: {neighbours.problem}")
    if ALGORITHMS[name].needs is Needs.ONE_HOST and any(len(neighbours.among(ranks)) > 1 for ranks in groups):
        raise CollectiveError(
            f"collective {name!r} is for ranks of one host, and these are on {neighbours.hosts}: use 'auto'"
        )


@dataclass(frozen=True)
class Choice:
    """A built algorithm, and why it was chosen. `build` returns it.

    Attributes:
        collective: the algorithm.
        reason: why it was chosen, as text.
        replica: the transport of this rank's replica, whose ranks share one copy; None if all ranks share one copy.
        hosts: with NCCL, the number of hosts of all ranks; else 1.
    """

    collective: Collective
    reason: str
    replica: Transport | None = None
    hosts: int = 1

    @property
    def shard_group(self) -> Transport:
        """The ranks that own the shards. Memory for the shards comes from this transport."""
        return self.collective.transport if self.replica is None else self.replica


def algorithm_for(ranks: int, hosts: int, *, by_nccl: bool, replicas: int = 1, are_neighbours: bool = True) -> str:
    """Return the name of the algorithm that "auto" chooses for processes that can share memory on each host. Local.

    Args:
        ranks: the number of ranks that own the shards: all ranks, or those of one replica.
        hosts: the number of hosts of these ranks; with several replicas, the largest such number.
        by_nccl: whether NCCL moves their tensors.
        replicas: the number of groups of such ranks.
        are_neighbours: whether each host has the same number of ranks, next to each other in the group's order.
    """
    if ranks == 1:
        return "pairwise"
    if by_nccl and hosts in (1, ranks) and (replicas == 1 or hosts == 1):
        return "all_to_all"  # between hosts of one rank each it sends what NCCL's own reduce-scatter would send
    if by_nccl:
        return "fold" if are_neighbours and replicas == 1 else "native"
    if hosts == 1:
        return "shared"
    return "pairwise" if hosts == ranks and replicas == 1 else "hierarchical"


def choose(transport: Transport, device: torch.device = CPU) -> Choice:
    """Choose the fastest algorithm for the places of the ranks. It is exact, except on GPUs of several hosts if
    `_by_nccl` says why not. Collective. ``device``: of most tensors that it will move."""
    if transport.world_size == 1:
        return Choice(Pairwise(transport), "one rank sends nothing")
    if isinstance(transport.backend, ThreadBackend):
        return Choice(Pairwise(transport), "the ranks are threads")
    if _all_have_nccl(transport, device):
        return _by_nccl(transport, device)
    neighbours = connect_neighbours(transport)
    hosts = neighbours.hosts
    if neighbours.local is None:
        return Choice(Pairwise(transport), _warned(transport, neighbours))
    ranks = transport.world_size
    name = algorithm_for(ranks, len(hosts), by_nccl=False)
    reason = {
        "shared": f"all {ranks} ranks are on one host",
        "pairwise": f"each of the {len(hosts)} ranks has its own host",
        "hierarchical": f"{ranks} ranks are on {len(hosts)} hosts",
    }[name]
    row = ALGORITHMS[name]
    near = _through_shared_memory(transport, neighbours) if row.shares_memory else transport
    return Choice(row.build(near, hosts), reason)


def _warned(transport: Transport, neighbours: Neighbours) -> str:
    reason = f"the ranks talk over {transport.name}, not through shared memory: {neighbours.problem}"
    if transport.rank == 0:
        warnings.warn(reason, stacklevel=3)
    return reason


def replicate(transport: Transport, factor: int, algorithm: str | Build, device: torch.device = CPU) -> Choice:
    """Make replicas of ``factor`` neighbouring ranks. ``algorithm`` of each: "auto", a name, or a class. Collective."""
    world = range(transport.world_size)
    replicas = [world[first : first + factor] for first in world[::factor]]
    mine = replicas[transport.rank // factor]

    def choice(near: Transport, made: Build | str, reason: str, hosts: Hosts = (), within: bool = False) -> Choice:
        part = near.split(mine, may_have_common=within)
        inner = ALGORITHMS[made].build(part, hosts) if isinstance(made, str) else made(part)
        return Choice(Replicated(near, inner), f"{len(replicas)} replicas of {factor}; {reason}", inner.transport)

    if callable(algorithm):
        return choice(transport, algorithm, "asked for")
    if algorithm != "auto" and not ALGORITHMS[algorithm].shares_memory:
        name = algorithm
        return choice(transport, lambda part: by_name(part, name).collective, "asked for")
    if isinstance(transport.backend, ThreadBackend):
        name = "pairwise" if algorithm == "auto" else algorithm
        return choice(transport, name, "the ranks are threads", [range(factor)])
    if algorithm == "auto" and _all_have_nccl(transport, device):
        if transport.backend.has_parts or transport.backend.knows_parts(list(map(transport.backend_ranks, replicas))):
            return _replicas_by_nccl(transport, replicas, device)
        reason = "through the host's memory, since NCCL's collectives are among all ranks of a group of the whole job"
        if transport.rank == 0:
            remedy = "give the optimizer the group of all ranks, or leave sharding_factor= away"
            warnings.warn(f"gradients and parameters travel {reason}: {remedy}", stacklevel=3)
        return choice(transport, "pairwise", reason)
    neighbours = connect_neighbours(transport)
    most = max(len(neighbours.among(ranks)) for ranks in replicas)
    if algorithm != "auto":
        _check(algorithm, neighbours, replicas)
    elif neighbours.local is None:
        return choice(transport, "pairwise", _warned(transport, neighbours))
    else:
        algorithm = algorithm_for(factor, most, by_nccl=False, replicas=len(replicas))
    where = {"pairwise": ", and one in each replica", "shared": ", and each replica on one"}
    return choice(
        _through_shared_memory(transport, neighbours),
        algorithm,
        f"{len(world)} ranks are on {len(neighbours.hosts)} host(s){where.get(algorithm, '')}",
        neighbours.among(mine),
        within=most == 1 and algorithm != "pairwise",
    )


def _all_have_nccl(transport: Transport, device: torch.device) -> bool:
    """Return True if NCCL moves the tensors of every rank. The ranks ask each other, to choose alike. Collective."""
    name = transport.backend.device_backend(device)
    names = transport.exchange(name.encode(), Tag(Kind.EXCHANGE, "telling what moves a device's tensors"))
    return all(name.decode() in NCCL for name in names)


def _replicas_by_nccl(transport: Transport, replicas: Sequence[range], device: torch.device = CPU) -> Choice:
    """Make replicas of ``replicas``, and pass sums on between them, by process groups of their ranks. Collective."""
    world, factor = range(transport.world_size), len(replicas[0])
    mine = replicas[transport.rank // factor]
    hosts = _hosts_of(transport)
    within = all(any(set(ranks) <= set(host) for host in hosts) for ranks in replicas)
    owners = _part(transport, [world[place::factor] for place in range(factor)])
    _connect_owners(owners, transport, device)
    inner: Collective
    name = algorithm_for(factor, 1 if within else len(hosts), by_nccl=True, replicas=len(replicas))
    if name == "pairwise":
        inner = Pairwise(transport.split(mine))
    else:
        part = Transport(_part(transport, replicas)).fork()
        inner = AllToAll(part) if name == "all_to_all" else Native(part)
    where = "each on one host"
    if not within:
        where = "some on several hosts: let sharding_factor= divide the ranks of a host, whose sums keep the rank order"
    reason = f"{len(replicas)} replicas of {factor}; with NCCL, {where}"
    return Choice(Replicated(transport, inner, owners), reason, inner.transport, len(hosts))


def _part(transport: Transport, parts: Sequence[Sequence[int]]) -> Backend:
    """Return the backend of the part of the ranks that this rank is in. Collective."""
    tag, made, problem = Tag(Kind.EXCHANGE, "making process groups of replicas"), None, ""
    transport.exchange(b"", tag)  # finds a rank that failed or is elsewhere, which the calls below could not
    with as_a_whole(transport, f"in {tag.label}"):
        try:
            made = transport.backend.part([transport.backend_ranks(ranks) for ranks in parts])
        except RuntimeError as error:  # of torch's store: another rank did not come, whose failure is reported below
            problem = " ".join(str(error).split())
    problems = transport.exchange(problem.encode(), tag)
    for rank, text in enumerate(problems):
        if text:
            raise CollectiveError(f"rank {rank}, in {tag.label}: {text.decode(errors='replace')}")
    assert made is not None, "a part that was not made is a problem"
    return made


def _connect_owners(owners: Backend, transport: Transport, device: torch.device) -> None:
    """Pass a number from each replica to the next one. Collective.

    NCCL has a communicator for each pair of ranks. Torch makes it when the first tensor is passed, and both ranks wait
    for each other meanwhile. In the middle of a backward, with other communicators busy, they could wait for ever.
    """
    token, rank = torch.zeros(1, device=device), owners.rank
    with as_a_whole(transport, "while replicas are connected"):
        if rank:
            owners.take_from(token, rank - 1).wait(owners.timeout)
        if rank + 1 < owners.world_size:
            owners.pass_to(token, rank + 1).wait(owners.timeout)


def _hosts_of(transport: Transport) -> tuple[tuple[int, ...], ...]:
    """Find the ranks of each machine, without connecting them. Collective.

    NCCL needs no kernel between its ranks. So containers of one machine are one host here: a reduce-scatter between
    them would send no fewer bytes than an all-to-all, which keeps the bits.
    """
    listener = HostListener(transport.world_size)
    try:
        return _hosts([machine_of(info.host) for info in exchange_infos(transport, listener)])
    finally:
        listener.close()


def _by_nccl(transport: Transport, device: torch.device) -> Choice:
    hosts, ranks = _hosts_of(transport), transport.world_size
    problem = why_not_folded(hosts) or _why_no_parts(transport)
    name = algorithm_for(ranks, len(hosts), by_nccl=True, are_neighbours=not problem)
    where = f"{ranks} ranks are on {len(hosts)} hosts, with NCCL: {costs_between(ranks, len(hosts))}"
    if name == "all_to_all":
        place = "are on one host" if len(hosts) == 1 else "have a host each"
        return Choice(AllToAll(transport), f"all {ranks} ranks {place}, with NCCL", hosts=len(hosts))
    if name == "fold":
        return Choice(_fold_by_nccl(transport, hosts, device), where, hosts=len(hosts))
    return Choice(Native(transport), f"{where}; {problem}", hosts=len(hosts))


def _fold_by_nccl(transport: Transport, hosts: Sequence[Sequence[int]], device: torch.device) -> Fold:
    """Make process groups of hosts and of rails, and connect their ranks. Collective."""
    host = _part(transport, hosts)
    rail = _part(transport, [[ranks[place] for ranks in hosts] for place in range(len(hosts[0]))])
    _connect_owners(rail, transport, device)
    for part in (host, rail):  # whose communicators torch makes at the first collective
        _connect_all(part, transport, device)
    return FoldOnDevices(transport, hosts, AllToAll(transport), host, rail)


def _connect_all(part: Backend, transport: Transport, device: torch.device) -> None:
    """Run a collective of a part. Collective. See `_connect_owners`."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    with as_a_whole(transport, "while ranks of hosts are connected"):
        part.all_gather(token.new_zeros(part.world_size), token).wait(part.timeout)


def _why_no_parts(transport: Transport) -> str:
    """Return why there can be no process groups of some of these ranks, with the remedy; "" if there can."""
    if transport.backend.has_parts:
        return ""
    return "torch makes process groups in a group of the whole job alone: give the optimizer the group of all ranks"


def costs_between(ranks: int, hosts: int) -> str:
    """Return, as text, what the two algorithms between hosts send, in elements of all sums."""
    if hosts == 1:
        return "nothing crosses between hosts"
    more = folded(hosts, started=True) - folded(hosts)
    return (
        f"between hosts 'fold' sends every sum {folded(hosts):.4g} times in the accumulator's dtype ({more:.2g} more "
        f"in each further reduced backward), in rank order, and 'native' {hosts * (ranks - 1) / ranks:.4g} times in "
        "the wire's dtype, in NCCL's order"
    )
