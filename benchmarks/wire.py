"""The bytes that an algorithm sends between hosts, in closed form, and the time that a wire takes for them.

For n bytes on H hosts of L ranks each, W = H·L, sums and contributions of one dtype; bytes that leave a host:

    any algorithm       at least (H - 1)/H · n, on average over the hosts
    pairwise            L · (H - 1)/H · n               each rank's contribution, or slice, to each rank elsewhere
    ring                (W - 1)/W · n                   one rank of each host sends to another host
    hierarchical        all-gather (H - 1)/H · n        each slice once to each other host
                        reduce-scatter                  what the plan of each slice says (`algorithms.hierarchical`)

Knows: places of ranks. Does not know: processes, counters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from collectives.algorithms.plans import Hosts, plans

from .cases import Operation


@dataclass(frozen=True)
class Wire:
    """Hosts with equally many ranks, numbered host by host, and the rate of each host's link, each way."""

    hosts: int
    ranks_per_host: int
    bits_per_second: float

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def places(self) -> Hosts:
        ranks, width = range(self.world_size), self.ranks_per_host
        return Hosts(tuple(tuple(ranks[first : first + width]) for first in ranks[::width]))

    def least(self, nbytes: int) -> float:
        """Return the bytes that leave a host on average, whatever the algorithm."""
        return nbytes * (self.hosts - 1) / self.hosts

    def seconds(self, nbytes: float) -> float:
        return nbytes * 8 / self.bits_per_second

    def by_host(self, of_ranks: list[int]) -> list[int]:
        """Return the counter of each host's interface.

        All ranks of a host report it; the first rank's value is taken.
        """
        return [of_ranks[ranks[0]] for ranks in self.places.ranks]

    def leaving(self, algorithm: str, operation: Operation, nbytes: int) -> list[int] | None:
        """Return the payload bytes that leave each host, or None if no closed form is known."""
        crossings = self._crossings(algorithm, operation, nbytes)
        return None if crossings is None else [sum(c for (a, _), c in crossings.items() if a == h) for h in self._all()]

    def busiest(self, algorithm: str, operation: Operation, nbytes: int) -> int | None:
        """Return the bytes of the link and direction that carry most, or None if no closed form is known."""
        crossings = self._crossings(algorithm, operation, nbytes)
        if crossings is None:
            return None
        ways = [(sum(c for pair, c in crossings.items() if pair[end] == h)) for h in self._all() for end in (0, 1)]
        return max(ways)

    def _all(self) -> range:
        return range(self.hosts)

    def _crossings(self, algorithm: str, operation: Operation, nbytes: int) -> Counter[tuple[int, int]] | None:
        """Return the bytes by (host that they leave, host that they reach)."""
        ways = {"pairwise": self._pairwise, "ring": self._ring}.get(algorithm)
        if algorithm == "hierarchical":
            ways = self._plans if operation is Operation.REDUCE_SCATTER else self._once_to_each
        if ways is None:
            return None
        of, slice_ = self.places.of, nbytes // self.world_size
        crossings: Counter[tuple[int, int]] = Counter()
        for sender, receiver in ways():
            if of[sender] != of[receiver]:
                crossings[of[sender], of[receiver]] += slice_
        return crossings

    # Each of these yields (sender, receiver) of every transfer of a slice, also inside a host.

    def _pairwise(self) -> Iterator[tuple[int, int]]:
        yield from itertools.permutations(range(self.world_size), 2)

    def _ring(self) -> Iterator[tuple[int, int]]:
        for rank in range(self.world_size):
            yield from [(rank, (rank + 1) % self.world_size)] * (self.world_size - 1)

    def _once_to_each(self) -> Iterator[tuple[int, int]]:
        for owner in range(self.world_size):
            for host in self._all():
                yield owner, self.places.delegate(owner, host)

    def _plans(self) -> Iterator[tuple[int, int]]:
        for plan in plans(self.places, False, 1, 1):
            yield from itertools.pairwise(stop.at for stop in plan.stops)
            yield from ((rank, plan.owner) for rank in plan.stops[-1].adds)
