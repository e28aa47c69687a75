"""A ring of neighbours, W - 1 rounds: the textbook algorithm, for comparison.

The sum of a shard travels around the ring and is formed in the order of the ring, which begins behind the owner. That
is another order than rank order, and so gives other bits. It is exact where sums are (integer-valued gradients).

    round 0:  rank r sends shard r - 1 (mod W); what it receives it adds to shard r - 2, which it sends in round 1 ...

Shards travel in chunks. A chunk goes on as soon as it was added, while later chunks of its shard still arrive. A rank
sends to one neighbour and receives from the other alone. If any other rank failed, it could not learn of that: so all
ranks announce themselves to each other before the first round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..messages import Chain, Tag, Work
from ..transport import Transport, chunks


class _Rounds:
    """The rounds of a ring, which run in the wait: each needs the one before."""

    def __init__(self, ring: Ring, tag: Tag, run: Callable[[], None]) -> None:
        self._transport, self._tag = ring.transport, tag
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._transport.announce(self._tag).wait()
            run()


class Ring:
    """Reduce-scatter and all-gather around a ring, over messages: a reference for comparison.

    It is not exact: sums are formed in the order of the ring. "auto" never takes it.
    """

    name = "ring"
    exact = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Adds in ``source``'s dtype, in the order of the ring.
        Scratch memory: all shards but one, in that dtype."""
        t = self.transport
        parts = [source[low:high] for low, high in itertools.pairwise(bounds)]

        def run() -> None:
            order = [parts[(t.rank - i - 1) % t.world_size] for i in range(t.world_size)]
            arriving = [t.scratch(part.numel(), part.dtype, part.device) for part in order[1:]]
            self._rounds(order, arriving, tag, lambda part, arrived: part.add_(arrived))
            own = order[-1]
            out.copy_(own) if start is None else torch.add(start, own, out=out)

        return _Rounds(self, tag, run)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        t = self.transport
        parts = [buffer[low:high] for low, high in itertools.pairwise(bounds)]
        order = [parts[(t.rank - i) % t.world_size] for i in range(t.world_size)]
        return _Rounds(self, tag, lambda: self._rounds(order, order[1:], tag, None))

    def _rounds(
        self,
        order: Sequence[Tensor],
        arriving: Sequence[Tensor],
        tag: Tag,
        add: Callable[[Tensor, Tensor], object] | None,
    ) -> None:
        """Send ``order[0]``. Then send each chunk that arrives on in the next round, except in the last round.

        ``arriving``: the memory into which the chunks of ``order[1:]`` are received. ``add``: is called with a chunk of
        this rank's shard and the one that arrived, before the former is sent on.
        """
        t = self.transport
        right, left = (t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size
        recvs = [
            [
                t.irecv(target[begin:end], left, tag, in_one_part=True, one_way=True)
                for begin, end in chunks(target.numel())
            ]
            for target in arriving
        ]
        first = order[0]
        sends: list[Work] = []
        if arriving:
            sends = [
                t.isend(first[begin:end], right, tag, in_one_part=True, one_way=True)
                for begin, end in chunks(first.numel())
            ]
        for part, target, works in zip(order[1:], arriving, recvs, strict=True):
            for (begin, end), work in zip(chunks(part.numel()), works, strict=True):
                work.wait()
                if add is not None:
                    add(part[begin:end], target[begin:end])
                if part is not order[-1]:
                    sends.append(t.isend(part[begin:end], right, tag, in_one_part=True, one_way=True))
        Chain(sends).wait()
