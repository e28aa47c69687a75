"""Shards that several replicas hold: an algorithm inside each replica, and only sums of shards between replicas.

    ranks 0 1 | 2 3 | 4 5, three replicas of two; rank 0, 2 and 4 own shard 0

    shard 0:  rank 0: start + x_0 + x_1  ->  rank 2: + x_2 + x_3  ->  rank 4: + x_4 + x_5      the sum goes on
              rank 0                     <-  rank 2               <-  rank 4                   and comes back

Sums of several buckets are on their way at a time: a rank that has passed one on goes on with the next, and waits for
the total later. The input of a bucket is not needed any more then, so this takes no memory.

A replica is a row of neighbouring ranks, so the sum is formed in rank order, as in a single replica. All replicas hold
the same shards, so an all-gather stays inside a replica. Between replicas a shard travels twice, except at the ends,
which is what a ring would send, and each rank talks to two others.

Sums go by messages (`_Messages`), or on devices by the backend's own collectives (`_OnDevice`), without the host.

Knows: the algorithm of a replica. Does not know: hosts. The caller chooses which ranks are neighbours.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from ..backend import Backend, Pending
from ..messages import Chain, Tag, Work, as_bytes
from ..transport import Transport, as_a_whole
from .base import Collective, all_gather_from, begun, nothing
from .ordered_sum import AddsAside

PASSING = "while passing a sum on"


class _Hops(Protocol):
    """How a sum goes through the replicas. ``before`` and ``after``: ranks that own the same shard; None at the ends.
    ``onward``: for separate messages, since a rank passes a sum on in a wait, perhaps after it has launched later
    collectives."""

    onward: Transport
    before: int | None
    after: int | None

    def arriving(self, start: Tensor, tag: Tag) -> Work:
        """Receive the sum of the replicas before. Called when a reduction is launched."""

    def forth(self, out: Tensor, tag: Tag) -> Work:
        """Send the sum on, and expect the total in its place."""

    def back(self, out: Tensor, tag: Tag) -> Work:
        """Send the total back, which has come. A total that still has to come is received."""


class _Messages:
    """Hops as messages."""

    def __init__(self, transport: Transport, before: int | None, after: int | None) -> None:
        self.onward, self.before, self.after = transport.sibling(1), before, after

    def arriving(self, start: Tensor, tag: Tag) -> Work:
        assert self.before is not None, "the first replica has no sum before its own"
        return self.onward.irecv(start, self.before, tag, one_way=True)

    def forth(self, out: Tensor, tag: Tag) -> Work:
        if self.after is None:
            return Chain(())
        total = self.onward.irecv(out, self.after, tag)  # sent only after this rank's sum has arrived there
        return Chain([self.onward.isend(out, self.after, tag, one_way=True), total])

    def back(self, out: Tensor, tag: Tag) -> Work:
        return Chain(()) if self.before is None else self.onward.isend(out, self.before, tag)


class _OnDevice:
    """Hops as transfers of the backend from device to device, and the total as its broadcast from the last replica.

    Such transfers have no headers. So each is announced by a message without bytes, and begins when this has come: a
    rank that is elsewhere is an error before its bytes are mixed with others.
    """

    def __init__(self, transport: Transport, before: int | None, after: int | None, owners: Backend) -> None:
        """``owners``: among the ranks that own this rank's shard, in the order of the replicas."""
        self._transport, self.onward, self._owners = transport, transport.sibling(1), owners
        self.before, self.after = before, after

    def arriving(self, start: Tensor, tag: Tag) -> Work:
        assert self.before is not None, "the first replica has no sum before its own"
        announced = self.onward.irecv(start[:0], self.before, _digested(tag, start), one_way=True)
        return _Announced(self._transport, announced, lambda: self._moved(start, tag, 0, 1, self._owners.take_from, -1))

    def forth(self, out: Tensor, tag: Tag) -> Work:
        if self.after is None:
            return Chain(())
        announced = self.onward.isend(out[:0], self.after, _digested(tag, out), one_way=True)
        return Chain([self._moved(out, tag, 1, 0, self._owners.pass_to, 1), announced])

    def back(self, out: Tensor, tag: Tag) -> Work:
        owners = self._owners
        last = owners.world_size - 1 - owners.rank
        return self._moved(out, tag, self.before is not None, self.after is not None, owners.broadcast, last)

    def _moved(
        self, tensor: Tensor, tag: Tag, sent: int, received: int, call: Callable[[Tensor, int], Pending], other: int
    ) -> Work:
        """Move a tensor. ``sent``, ``received``: how often, for the counters; ``other``: the other rank, counted from
        this one."""
        if not tensor.numel():
            return Chain(())
        self._transport.count_payload(sent * tensor.nbytes, received * tensor.nbytes)
        return begun(self._transport, tag, partial(call, as_bytes(tensor), self._owners.rank + other), nothing)


def _digested(tag: Tag, tensor: Tensor) -> Tag:
    return tag.digested(zlib.crc32(repr((tag.digest, tensor.numel(), tensor.dtype)).encode()))


class _Announced:
    """A transfer that begins when it was announced."""

    def __init__(self, transport: Transport, announced: Work, begin: Callable[[], Work]) -> None:
        self._transport, self._announced, self._begin = transport, announced, begin
        self._work: Work | None = None

    def wait(self) -> None:
        if self._work is None:
            self._announced.wait()
            with as_a_whole(self._transport, PASSING):
                self._work = self._begin()
        self._work.wait()


class Replicated:
    """Reduce-scatter over all ranks onto the shards of each replica, and all-gather inside a replica.

    A replica is a group of neighbouring ranks that hold one copy together (``sharding_factor``). ``bounds`` are the
    bounds of the ranks of a replica, `shard_group`, not of all ranks, `transport`. All ranks call `reduce_scatter`,
    which returns a `StagedWork`. Its name and exactness are those of the algorithm within a replica.
    """

    def __init__(self, transport: Transport, inner: Collective, owners: Backend | None = None) -> None:
        """``transport``: all ranks. ``inner``: the algorithm of this rank's replica. All replicas have the same number
        of ranks. ``owners``: the backend of the ranks that own this rank's shard, in the order of the replicas, if sums
        go from device to device; None: sums go by messages."""
        self.transport, self.inner, self.shard_group = transport, inner, inner.transport
        if isinstance(inner, AddsAside):
            inner.add_in_wait()  # a sum of other replicas comes after the launch
        width = self.shard_group.world_size
        first = transport.rank - self.shard_group.rank
        transport.attach(self.shard_group, range(first, first + width))
        self.name, self.exact = inner.name, inner.exact
        before = transport.rank - width if transport.rank >= width else None
        after = transport.rank + width if transport.rank + width < transport.world_size else None
        self.hops: _Hops = (
            _Messages(transport, before, after) if owners is None else _OnDevice(transport, before, after, owners)
        )

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. All replicas pass the same ``start``. A sum is received
        into ``start``, or into scratch memory if that is None."""
        return _HybridReduceScatter(self, source, bounds, out, start, tag, self.transport.announce_round(tag))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Every replica has the same shards."""
        return self.inner.all_gather(buffer, bounds, tag=tag)

    def all_gather_from(self, own: Tensor, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.all_gather_from`. Every replica has the same shards."""
        return all_gather_from(self.inner, own, buffer, bounds, tag=tag)


class _HybridReduceScatter:
    """A replica's part of a reduce-scatter: it adds to the sum of the replicas before and passes it on, and later
    receives the sum of all."""

    def __init__(
        self,
        algorithm: Replicated,
        source: Tensor,
        bounds: Sequence[int],
        out: Tensor,
        start: Tensor | None,
        tag: Tag,
        announced: Work,
    ) -> None:
        hops, works = algorithm.hops, [announced]
        if hops.before is not None:
            if start is None:
                start = algorithm.shard_group.scratch(out.numel(), out.dtype, out.device)
            works.append(hops.arriving(start, tag))
        works.append(algorithm.inner.reduce_scatter(source, bounds, out, start=start, tag=tag))
        hops.onward.post_remaining()
        self._transport = algorithm.transport
        self._under_way: Work = Chain(works)
        self._forth: Callable[[], Work] | None = lambda: hops.forth(out, tag)
        self._back: Callable[[], Work] | None = lambda: hops.back(out, tag)

    def pass_on(self) -> None:
        """Add this replica's contributions to the sum of those before, and send it to the next one."""
        if self._forth is not None:
            self._under_way.wait()
            with as_a_whole(self._transport, PASSING):
                forth, self._forth = self._forth, None
                self._under_way = forth()

    def wait(self) -> None:
        self.pass_on()
        self._under_way.wait()
        if self._back is not None:
            with as_a_whole(self._transport, PASSING):
                back, self._back = self._back, None
                self._under_way = back()
            self._under_way.wait()
