"""Direct exchange: every owner receives each rank's contribution to its slice and folds them in rank order.

    rank 0 | x00 | x01 | x02 |        owner 0:  start + x00 + x10 + x20
    rank 1 | x10 | x11 | x12 |        owner 1:  start + x01 + x11 + x21
    rank 2 | x20 | x21 | x22 |        owner 2:  start + x02 + x12 + x22

A rank sends all of its contribution but its own slice, as in a ring, and the sum is that of a single process.
Receives are posted before sends: on a real wire that halves the time. An empty slice is a header without bytes, so
that every rank hears from every other that it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .fold import fold
from .messages import Chain, Tag, Work
from .transport import Transport


class _ReduceScatter:
    def __init__(
        self,
        transport: Transport,
        recvs: Sequence[Work],
        sends: Sequence[Work],
        parts: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        self._transport = transport
        self._recvs, self._sends, self._parts, self._out = Chain(recvs), Chain(sends), list(parts), out

    def wait(self) -> None:
        if not self._parts:
            self._sends.wait()
            return
        self._recvs.wait()
        parts, self._parts = self._parts, []
        try:
            fold(parts, self._out)
        except BaseException as error:  # half a sum is no sum
            self._transport.abort(f"rank {self._transport.rank}, while adding up: {type(error).__name__}: {error}")
            raise
        self._sends.wait()
        self._sends = Chain(())


class Pairwise:
    """Reduce-scatter and all-gather by direct exchange; the default."""

    name = "pairwise"
    exact = True

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Receives (W - 1) slices into scratch memory."""
        t = self.transport
        low, high = bounds[t.rank], bounds[t.rank + 1]
        recvs: list[Work] = []
        parts: list[Tensor] = [] if start is None else [start]
        for rank in range(t.world_size):
            if rank == t.rank:
                parts.append(source[low:high])
            else:
                parts.append(t.scratch(high - low, source.dtype, source.device))
                recvs.append(t.irecv(parts[-1], rank, tag))
        sends = [t.isend(source[bounds[to] : bounds[to + 1]], to, tag) for to in t.peers()]
        return _ReduceScatter(t, recvs, sends, parts, out)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Each slice arrives in its place; no scratch memory."""
        t = self.transport
        recvs = [t.irecv(buffer[bounds[s] : bounds[s + 1]], s, tag) for s in t.peers()]
        own = buffer[bounds[t.rank] : bounds[t.rank + 1]]
        sends = [t.isend(own, to, tag) for to in t.peers()]
        return Chain([*recvs, *sends])
