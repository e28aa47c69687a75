"""How a sum is formed over several hosts: the ranks at which it stops, and what crosses between hosts.

With no sum so far a shard crosses at least hosts - 1 times. With one rank a host it crosses exactly so often, by direct
exchange, as in a ring. With several ranks a host: hosts - 1 times for shards of the last host (in rank order), and once
more for the others, as the sum has to come home; on average over H equal hosts H - 1/H times. A sum so far, which has
to reach the first host, costs up to one crossing more.

Knows: which ranks share a host. Does not know: bytes, transports.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

CHUNKS_OF_A_FOLD = 16  # at most, in which the sums of a rail go from host to host on devices: each is three launches
LEAST_OF_A_FOLD = 1 << 18  # elements of a chunk, which take longer than a message without any


class Hosts:
    """``ranks``: of each host, ascending. ``of``: rank -> host. ``segments``: the ranks in order, cut at each new
    host."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.ranks = tuple(map(tuple, ranks))
        self.of = {rank: host for host, members in enumerate(self.ranks) for rank in members}
        self.segments = [list(run) for _, run in itertools.groupby(sorted(self.of), key=self.of.__getitem__)]

    def delegate(self, owner: int, host: int) -> int:
        """Return the rank of ``host`` that works for ``owner``: the owner itself at home, else evenly spread."""
        if self.of[owner] == host:
            return owner
        place = self.ranks[self.of[owner]].index(owner)
        return self.ranks[host][place % len(self.ranks[host])]


@dataclass(frozen=True)
class Rails:
    """Equal hosts of neighbouring ranks, for `fold`. A rail is the ranks with one place in their hosts.

    Attributes:
        hosts: how many there are.
        width: ranks of a host, and so the number of rails.
        rank: this rank.
    """

    hosts: int
    width: int
    rank: int

    @property
    def host(self) -> int:
        """This rank's host."""
        return self.rank // self.width

    @property
    def place(self) -> int:
        """This rank's rail, and its place in its host."""
        return self.rank % self.width

    @property
    def owners(self) -> range:
        """The ranks of this rail, by host."""
        return range(self.place, self.hosts * self.width, self.width)

    @property
    def before(self) -> int | None:
        """The rank of this rail on the host before; None on the first host."""
        return self.rank - self.width if self.host else None

    @property
    def after(self) -> int | None:
        """The rank of this rail on the next host; None on the last one."""
        return self.rank + self.width if self.host + 1 < self.hosts else None

    def shards(self, bounds: Sequence[int], place: int) -> list[tuple[int, int]]:
        """Return the begin and end of each shard of a rail, by host."""
        return [(bounds[rank], bounds[rank + 1]) for rank in range(place, self.hosts * self.width, self.width)]


def why_not_folded(hosts: Sequence[Sequence[int]]) -> str:
    """Return why sums cannot go from host to host in the order of the ranks, with the remedy; "" if they can."""
    if [rank for host in hosts for rank in host] != list(range(sum(map(len, hosts)))):
        problem = "ranks of a host are not neighbours in the group's order"
    elif len({len(host) for host in hosts}) > 1:
        problem = "hosts have different numbers of ranks"
    else:
        return ""
    return (
        f"{problem}: {', '.join(str(list(host)) for host in hosts)}; number the ranks host by host, as many on each, "
        "as torchrun does (rank = number of the host * ranks of a host + local rank)"
    )


@dataclass(frozen=True)
class Stop:
    """A rank that adds the contributions of ``adds``, in this order, to the running sum of a shard."""

    at: int
    adds: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How the sum of one owner's shard is formed. The last stop is the owner. The other stops add contributions of
    their neighbours only. A sum so far is sent to the first stop."""

    owner: int
    stops: tuple[Stop, ...]
    links: tuple[tuple[int, int, int], ...]  # (host, other host, bytes of an element) for each crossing

    @classmethod
    def of(cls, hosts: Hosts, owner: int, length: int, started: bool, travel: int, accumulate: int) -> Plan:
        stops = [Stop(hosts.delegate(owner, hosts.of[run[0]]), tuple(run)) for run in hosts.segments[:length]]
        rest = tuple(rank for run in hosts.segments[length:] for rank in run)
        if stops and stops[-1].at == owner:
            rest = stops.pop().adds + rest
        stops.append(Stop(owner, rest))
        path = [owner] * started + [stop.at for stop in stops]
        moves = [(a, b, accumulate) for a, b in itertools.pairwise(path)] + [(rank, owner, travel) for rank in rest]
        links = [(hosts.of[a], hosts.of[b], size) for a, b, size in moves if hosts.of[a] != hosts.of[b]]
        return cls(owner, tuple(stops), tuple(links))

    @property
    def bytes_per_element(self) -> int:
        """Bytes that cross between hosts, for an element of the owner's shard."""
        return sum(size for _, _, size in self.links)


def plans(hosts: Hosts, started: bool, travel: int, accumulate: int) -> list[Plan]:
    """Return a plan for each owner, the same on every rank: among those with the fewest bytes between hosts, one that
    keeps the load of the busiest link low.

    ``started``: the owner has a sum so far. ``travel`` and ``accumulate``: bytes of an element of a contribution and of
    a sum. Shards count as equally long.
    """
    choices = {owner: _cheapest(hosts, owner, started, travel, accumulate) for owner in sorted(hosts.of)}
    load: Counter[tuple[int, bool]] = Counter()  # (host, outwards) -> bytes
    chosen: dict[int, Plan] = {}
    for owner in sorted(choices, key=lambda owner: (len(choices[owner]), owner)):  # owners without a choice first
        chosen[owner] = min(choices[owner], key=lambda plan: (_busiest(load + _load(plan)), len(plan.stops)))
        load += _load(chosen[owner])
    return [chosen[owner] for owner in sorted(chosen)]


def equal_hosts(hosts: int, ranks: int, started: bool, travel: int, accumulate: int) -> int:
    """Return the bytes that cross between hosts for one element of every owner's shard, as the sum over `plans` of
    ``hosts`` hosts with ``ranks`` neighbouring ranks each. It needs no plans, whose number grows with the ranks.

    A plan stops at the first hosts, ends at home, and gets what is left directly. Its bytes are linear in the number
    of stops, except where the home is among them.
    """

    def crossing(home: int, stops: int) -> int:
        direct = ranks * (hosts - stops - (home >= stops)) * travel
        if not stops:
            return direct
        return direct + (stops - 1 + (stops - 1 != home) + (started and home > 0)) * accumulate

    return ranks * sum(
        min(crossing(home, stops) for stops in {0, 1, home, home + 1, min(home + 2, hosts), hosts})
        for home in range(hosts)
    )


def chunk_of_fold(numel: int) -> int:
    """Return how many elements of a rail's sums go from host to host at a time, on devices."""
    return max(LEAST_OF_A_FOLD, -(-numel // CHUNKS_OF_A_FOLD))


def folded(hosts: int, *, started: bool = False) -> float:
    """Return how often each element of a sum crosses between ``hosts`` in `fold`, on average over equal slices.

    It goes through all hosts, and from the last one to its owner: (H - 1) (1 + 1/H). A sum so far goes from its owner
    to the first host before: (H - 1) / H more.
    """
    home = (hosts - 1) / hosts
    return hosts - 1 + home + (home if started else 0.0)


def _cheapest(hosts: Hosts, owner: int, started: bool, travel: int, accumulate: int) -> list[Plan]:
    """Return all plans with the fewest bytes, the shortest first."""
    found = [Plan.of(hosts, owner, length, started, travel, accumulate) for length in range(len(hosts.segments) + 1)]
    least = min(plan.bytes_per_element for plan in found)
    return [plan for plan in found if plan.bytes_per_element == least]


def _load(plan: Plan) -> Counter[tuple[int, bool]]:
    load: Counter[tuple[int, bool]] = Counter()
    for sender, receiver, size in plan.links:
        load[sender, True] += size
        load[receiver, False] += size
    return load


def _busiest(load: Counter[tuple[int, bool]]) -> list[int]:
    return sorted(load.values(), reverse=True)
