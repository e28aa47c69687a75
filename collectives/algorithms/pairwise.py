"""Direct exchange: every owner receives each rank's contribution to its shard and adds them up in rank order.

    rank 0 | x00 | x01 | x02 |        owner 0:  start + x00 + x10 + x20
    rank 1 | x10 | x11 | x12 |        owner 1:  start + x01 + x11 + x21
    rank 2 | x20 | x21 | x22 |        owner 2:  start + x02 + x12 + x22

A rank sends all of its contribution except its own shard, as in a ring, and the sum is that of a single process.
Receives are posted before sends, which halves the time on a real network. (Those behind the first chunk are posted
while the first send is under way.) Everything travels in chunks, and chunks are added up while later ones arrive. An
empty shard is a header without bytes, so every rank hears from every other rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ..messages import Chain, Tag, Work
from ..transport import GRAIN, Transport, as_a_whole, chunks
from .base import ADDING_UP
from .ordered_sum import ordered_sum

_NOTHING = Chain(())  # of a single rank


class _PairwiseReduceScatter:
    """``pieces``: for each chunk of the owner's shard, the receives, the parts in rank order, and the sum."""

    def __init__(
        self, transport: Transport, pieces: Sequence[tuple[Chain, list[Tensor], Tensor]], sends: Sequence[Work]
    ) -> None:
        self._transport, self._pieces, self._sends = transport, deque(pieces), Chain(sends)

    def wait(self) -> None:
        while self._pieces:
            recvs, parts, out = self._pieces[0]
            recvs.wait()
            self._pieces.popleft()
            with as_a_whole(self._transport, ADDING_UP):
                ordered_sum(parts, out)
        self._sends.wait()


class Pairwise:
    """Reduce-scatter and all-gather by direct exchange between every two ranks, over messages.

    It needs nothing but a transport. "auto" takes it if each rank is on its own host, if ranks are threads, or if
    memory cannot be shared.
    """

    name = "pairwise"
    exact = True

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Scratch memory: W - 1 shards in ``source``'s dtype."""
        t = self.transport
        if t.world_size == 1:  # nothing arrives, but ``start`` may be a sum that does
            return _PairwiseReduceScatter(t, [(_NOTHING, [source] if start is None else [start, source], out)], ())
        low, high = bounds[t.rank], bounds[t.rank + 1]
        width = -(-(high - low) // GRAIN) * GRAIN  # each contribution begins on a boundary
        scratch = t.scratch((t.world_size - 1) * width, source.dtype, source.device)
        arriving = {rank: scratch[n * width : n * width + high - low] for n, rank in enumerate(t.peers())}
        works = [t.irecv_chunks(tensor, rank, tag) for rank, tensor in arriving.items()]
        pieces = []
        for number, (begin, end) in enumerate(chunks(high - low)):
            parts = [] if start is None else [start[begin:end]]
            for rank in range(t.world_size):
                parts.append((source[low:high] if rank == t.rank else arriving[rank])[begin:end])
            pieces.append((Chain(chunk[number] for chunk in works), parts, out[begin:end]))
        return _PairwiseReduceScatter(
            t, pieces, [t.isend(source[bounds[to] : bounds[to + 1]], to, tag) for to in t.peers()]
        )

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Each shard arrives in its place, without scratch memory."""
        t = self.transport
        if t.world_size == 1:
            return _NOTHING
        recvs = [t.irecv(buffer[bounds[source] : bounds[source + 1]], source, tag) for source in t.peers()]
        own = buffer[bounds[t.rank] : bounds[t.rank + 1]]
        return Chain([*recvs, *(t.isend(own, to, tag) for to in t.peers())])
