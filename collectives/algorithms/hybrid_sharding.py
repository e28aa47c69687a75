"""Slices that several replicas hold: an algorithm inside each replica, and only sums of slices between replicas.

    ranks 0 1 | 2 3 | 4 5, three replicas of two; rank 0, 2 and 4 own slice 0

    slice 0:  rank 0: start + x_0 + x_1  ->  rank 2: + x_2 + x_3  ->  rank 4: + x_4 + x_5      the sum goes on
              rank 0                     <-  rank 2               <-  rank 4                   and comes back

Sums of several buckets are on their way at a time: a rank that has passed one on goes on with the next, and waits for
the total later. The input of a bucket is not needed any more then, so this takes no memory.

A replica is a row of neighbouring ranks, so the sum is formed in rank order, as in a single replica. All replicas hold
the same slices, so an all-gather stays inside a replica. Between replicas a slice travels twice, except at the ends,
which is what a ring would send, and each rank talks to two others.

Knows: the algorithm of a replica. Does not know: hosts. The caller chooses which ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..messages import Chain, Tag, Work
from ..transport import Transport
from .base import Collective


class Replicated:
    """Reduce-scatter over all ranks onto the slices of each replica, and all-gather inside a replica.

    ``bounds`` are for the ranks of a replica, `shards`, not for those of `transport`."""

    def __init__(self, transport: Transport, inner: Collective) -> None:
        """``inner``: the algorithm of this rank's replica. All replicas have the same number of ranks."""
        self.transport, self.inner, self.shards = transport, inner, inner.transport
        first = transport.rank - self.shards.rank
        transport.attach(self.shards, range(first, first + self.shards.world_size))
        self.name, self.exact = inner.name, inner.exact
        # A rank passes a sum on in a wait, perhaps after it has launched later collectives: an order of its own.
        self.onward = transport.sibling(1)
        before, after = transport.rank - self.shards.world_size, transport.rank + self.shards.world_size
        self.before = before if before >= 0 else None
        self.after = after if after < transport.world_size else None

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. All replicas have the same ``start``. Receives a sum into
        ``start``, or into scratch memory if that is None."""
        return _HybridReduceScatter(self, source, bounds, out, start, tag, self.transport.announce_round(tag))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Every replica has the same slices."""
        return self.inner.all_gather(buffer, bounds, tag=tag)


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
        onward, before, after = algorithm.onward, algorithm.before, algorithm.after
        works = [announced]
        if before is not None:
            if start is None:
                start = algorithm.shards.scratch(out.numel(), out.dtype, out.device)
            works.append(onward.irecv(start, before, tag, one_way=True))
        works.append(algorithm.inner.reduce_scatter(source, bounds, out, start=start, tag=tag))
        onward.post_remaining()

        def forth() -> Work:
            if after is None:
                return Chain(())
            total = onward.irecv(out, after, tag)  # sent only after this rank's sum has arrived there
            return Chain([onward.isend(out, after, tag, one_way=True), total])

        def back() -> Work:
            return Chain(()) if before is None else onward.isend(out, before, tag)

        self._transport = algorithm.transport
        self._under_way: Work = Chain(works)
        self._forth: Callable[[], Work] | None = forth
        self._back: Callable[[], Work] | None = back

    def pass_on(self) -> None:
        """Add this replica's contributions to the sum of those before, and send it to the next one."""
        if self._forth is not None:
            self._under_way.wait()
            forth, self._forth = self._forth, None
            self._under_way = self._sent(forth)

    def wait(self) -> None:
        self.pass_on()
        self._under_way.wait()
        if self._back is not None:
            back, self._back = self._back, None
            self._under_way = self._sent(back)
            self._under_way.wait()

    def _sent(self, send: Callable[[], Work]) -> Work:
        try:
            return send()
        except BaseException as error:  # what was sent is unknown
            rank_label = self._transport.rank_label
            self._transport.abort(f"{rank_label}, while passing a sum on: {type(error).__name__}: {error}")
            raise
