"""Several hosts: shared memory inside a host, and as few crossings between hosts as the order of the sum allows.

The sum of a shard is formed in rank order, ((start + x_0) + x_1) + ... A *segment* is a row of neighbouring ranks on
one host. The running sum visits the first segments, host by host. On each host one rank adds all contributions of the
segment, which it reads in shared memory. Then the sum goes home to the owner, who adds the rest: contributions of its
own host from shared memory, and those of other hosts directly, one message for each rank.

    hosts A = {0, 1}, B = {2, 3}, no sum so far
    shard of rank 2:    A: x_0 + x_1  ->  B, at home: + x_2 + x_3                       1 crossing
    shard of rank 0:    A: x_0 + x_1  ->  B: + x_2 + x_3  ->  A, home                   2 crossings
                   or:  A, at home: x_0 + x_1 + x_2 + x_3, where x_2 and x_3 crossed    2 crossings

`plans` chooses, and says how often a shard crosses. In an all-gather each shard crosses hosts - 1 times: to one rank of
each other host, where the other ranks read it.

Knows: which ranks share a host. Does not know: how hosts were found, or what moves bytes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..links.exposed_buffers import PeerBuffers
from ..messages import Chain, Tag, Work
from ..transport import Transport, as_a_whole, chunks
from .base import ADDING_UP
from .ordered_sum import ordered_sum
from .plans import Hosts, Plan, plans


class Hierarchical:
    """Reduce-scatter and all-gather for several hosts: shared memory within a host, messages between hosts.

    "auto" takes it on CPUs if the ranks are on several hosts, and some host has several ranks. `collectives.build` with
    "hierarchical" finds the hosts and builds it.
    """

    name = "hierarchical"
    exact = True

    def __init__(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> None:
        """``transport``: over a backend whose ranks map the memory of their host's ranks. ``hosts``: the ranks of each
        host; every rank is on one."""
        self.transport = transport
        self.hosts = Hosts(hosts)
        # A rank passes sums and shards on in a wait, perhaps after it has launched later collectives: so these messages
        # have their own order.
        self.onward, self.relay = transport.sibling(1), transport.sibling(2)
        self.neighbours = [r for r in self.hosts.ranks[self.hosts.of[transport.rank]] if r != transport.rank]
        self._plans: dict[tuple[bool, int, int], list[Plan]] = {}

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Receives running sums and contributions into scratch memory."""
        t = self.transport
        tag = tag.digested(tag.digest ^ zlib.crc32(b"started")) if start is not None else tag
        announced = t.announce_round(tag)
        way = (start is not None, source.itemsize, out.itemsize)
        if way not in self._plans:
            self._plans[way] = plans(self.hosts, *way)
        return Chain([announced, _HierarchicalReduceScatter(self, source, bounds, out, start, tag, self._plans[way])])

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        return _HierarchicalAllGather(self, buffer, bounds, tag)


@dataclass(frozen=True)
class _Arriving:
    """A tensor that another rank sends to a stop of this rank, by chunks."""

    tensor: Tensor
    works: Sequence[Work]


class _HierarchicalReduceScatter:
    """The stops of one reduce-scatter that are this rank's, in the order (hop, owner), which all ranks share."""

    def __init__(
        self,
        algorithm: Hierarchical,
        source: Tensor,
        bounds: Sequence[int],
        out: Tensor,
        start: Tensor | None,
        tag: Tag,
        plans: Sequence[Plan],
    ) -> None:
        t, neighbours = algorithm.transport, algorithm.neighbours
        self._transport, self._onward, self._tag = t, algorithm.onward, tag
        self._bounds, self._out, self._start = bounds, out, start
        self._neighbours = neighbours
        self._mapped = t.map_buffers([(rank, source.numel()) for rank in neighbours], source.dtype, tag)
        self._source = t.peer_readable(source)
        self._exposed = t.expose(self._source, [(to, 0, source.numel()) for to in neighbours], tag)
        mine = [(hop, plan) for plan in plans for hop, stop in enumerate(plan.stops) if stop.at == t.rank]
        mine.sort(key=lambda item: (item[0], item[1].owner))
        self._sums = {(hop, plan.owner): self._sum(hop, plan) for hop, plan in mine}
        # Stops that other ranks wait for come first. The last stop of a plan, at home, waits for other hosts itself.
        self._stops = deque(sorted(mine, key=lambda item: item[0] + 1 == len(item[1].stops)))
        self._direct = {
            rank: self._receive(t, source.dtype, t.rank, rank)
            for rank in plans[t.rank].stops[-1].adds
            if rank != t.rank and rank not in neighbours
        }
        self._sends = list(self._send_contributions(plans))
        self._own_plan: Plan | None = plans[t.rank]
        t.post_remaining()

    def wait(self) -> None:
        if self._own_plan is not None:
            plan, self._own_plan = self._own_plan, None
            self._sends += self._send_start(plan)
        if self._stops:
            self._mapped.wait()
        while self._stops:
            with as_a_whole(self._transport, ADDING_UP):
                self._stop(*self._stops[0])
            self._stops.popleft()
            if not self._stops:
                self._mapped.release()
        Chain(self._sends).wait()
        self._exposed.wait()

    # -- what is sent and expected at once ----------------------------------------------------------------------------

    def _shard(self, tensor: Tensor, owner: int) -> Tensor:
        return tensor[self._bounds[owner] : self._bounds[owner + 1]]

    def _chunks(self, owner: int) -> Iterator[tuple[int, int]]:
        return chunks(self._bounds[owner + 1] - self._bounds[owner])

    def _receive(self, transport: Transport, dtype: torch.dtype, owner: int, source: int) -> _Arriving:
        """Receive a tensor that its sender has as a whole: one message."""
        target = self._scratch(dtype, owner)
        return _Arriving(target, transport.irecv_chunks(target, source, self._tag, one_way=True))

    def _receive_onward(self, owner: int, source: int) -> _Arriving:
        """Receive a sum that its sender forms chunk by chunk: one message a chunk."""
        target = self._scratch(self._out.dtype, owner)
        works = [
            self._onward.irecv(target[low:high], source, self._tag, in_one_part=True, one_way=True)
            for low, high in self._chunks(owner)
        ]
        return _Arriving(target, works)

    def _scratch(self, dtype: torch.dtype, owner: int) -> Tensor:
        return self._transport.scratch(self._bounds[owner + 1] - self._bounds[owner], dtype, self._source.device)

    def _sum(self, hop: int, plan: Plan) -> _Arriving | None:
        """Return the running sum that comes to a stop of this rank; None if there is none yet."""
        if hop:
            return self._receive_onward(plan.owner, plan.stops[hop - 1].at)
        if self._start is None:
            return None
        if plan.owner == self._transport.rank:
            return _Arriving(self._start, ())
        return self._receive(self._onward, self._out.dtype, plan.owner, plan.owner)

    def _send_start(self, plan: Plan) -> list[Work]:
        """Send the sum so far to the first stop of the plan."""
        first = plan.stops[0].at
        if self._start is None or first == plan.owner:
            return []
        return [self._onward.isend(self._start, first, self._tag, one_way=True)]

    def _send_contributions(self, plans: Sequence[Plan]) -> Iterator[Work]:
        """Send the contributions of this rank that owners on other hosts add."""
        rank = self._transport.rank
        for plan in plans:
            if plan.owner != rank and plan.owner not in self._neighbours and rank in plan.stops[-1].adds:
                yield self._transport.isend(self._shard(self._source, plan.owner), plan.owner, self._tag, one_way=True)

    # -- what is done in a wait ---------------------------------------------------------------------------------------

    def _stop(self, hop: int, plan: Plan) -> None:
        """Add, chunk by chunk, and send each chunk on."""
        onward = plan.stops[hop + 1].at if hop + 1 < len(plan.stops) else None
        before = self._sums[hop, plan.owner]
        parts = [] if before is None else [before]
        parts += [self._contribution(rank, plan.owner) for rank in plan.stops[hop].adds]
        out = self._out
        if onward is not None:
            out = self._scratch(out.dtype, plan.owner)
        for number, (low, high) in enumerate(self._chunks(plan.owner)):
            for part in parts:
                if part.works:
                    part.works[number].wait()
            # host synchronisation: copies parts that came through the host's memory to the device of the sum
            ordered_sum([part.tensor[low:high].to(out.device) for part in parts], out[low:high])
            if onward is not None:
                self._sends.append(self._onward.isend(out[low:high], onward, self._tag, in_one_part=True, one_way=True))

    def _contribution(self, rank: int, owner: int) -> _Arriving:
        if rank in self._direct:
            return self._direct[rank]
        whole = self._mapped.tensor(rank) if rank in self._neighbours else self._source
        return _Arriving(self._shard(whole, owner), ())


class _HierarchicalAllGather:
    """A shard goes to its owner's neighbours, and to one rank of each other host, which exposes it there."""

    def __init__(self, algorithm: Hierarchical, buffer: Tensor, bounds: Sequence[int], tag: Tag) -> None:
        t, hosts, neighbours = algorithm.transport, algorithm.hosts, algorithm.neighbours
        self._algorithm, self._buffer, self._bounds, self._tag = algorithm, buffer, bounds, tag
        here = hosts.of[t.rank]
        relayed = {owner: hosts.delegate(owner, here) for owner in range(t.world_size) if hosts.of[owner] != here}
        self._unmapped = {owner: delegate for owner, delegate in relayed.items() if delegate != t.rank}
        self._mapped = {rank: self._map(t, rank, rank) for rank in neighbours}
        self._arriving = {}
        for owner, delegate in relayed.items():
            if delegate == t.rank:
                target = self._readable_target(owner)
                self._arriving[owner] = _Arriving(target, [t.irecv(target, owner, tag, one_way=True)])
        own = t.peer_readable(self._shard(t.rank))
        self._exposed = [t.expose(own, [(to, 0, own.numel()) for to in neighbours], tag)]
        delegates = [hosts.delegate(t.rank, host) for host in range(len(hosts.ranks)) if host != here]
        self._sends = [t.isend(own, to, tag, one_way=True) for to in delegates]
        t.post_remaining()

    def wait(self) -> None:
        """After an interrupt, a further call goes on where this one was."""
        relay = self._algorithm.relay
        for owner, delegate in list(self._unmapped.items()):
            self._mapped[owner] = self._map(relay, delegate, owner)
            del self._unmapped[owner]
        for owner, arriving in list(self._arriving.items()):
            Chain(arriving.works).wait()
            if arriving.tensor.data_ptr() != self._shard(owner).data_ptr():
                self._shard(owner).copy_(arriving.tensor)
            spans = [(to, 0, arriving.tensor.numel()) for to in self._algorithm.neighbours]
            self._exposed.append(relay.expose(arriving.tensor, spans, self._tag))
            del self._arriving[owner]
        for owner, (source, mapped) in list(self._mapped.items()):
            mapped.wait()
            self._shard(owner).copy_(mapped.tensor(source))  # host synchronisation: until a device has read it
            mapped.release()
            del self._mapped[owner]
        Chain([*self._sends, *self._exposed]).wait()

    def _shard(self, owner: int) -> Tensor:
        return self._buffer[self._bounds[owner] : self._bounds[owner + 1]]

    def _readable_target(self, owner: int) -> Tensor:
        """Return memory for an arriving shard that the neighbours can read: its own place, or scratch memory."""
        t, place = self._algorithm.transport, self._shard(owner)
        if t.peers_can_read(place):
            return place
        return t.scratch(place.numel(), place.dtype, torch.device("cpu"))

    def _map(self, transport: Transport, source: int, owner: int) -> tuple[int, PeerBuffers]:
        spans = [(source, self._bounds[owner + 1] - self._bounds[owner])]
        return source, transport.map_buffers(spans, self._buffer.dtype, self._tag)
