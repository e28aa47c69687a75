"""The solution of the second exercise of zero/TOUR.md. The page has all of it but the lines between the two marks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from collectives import Chain, Tag, Transport, Work


class InTheWait:
    """A collective that runs in its wait, once."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()


class Relay:
    """The sum of each shard travels from rank 0 to the last rank, and then to the shard's owner."""

    name, exact = "relay", True

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        t = self.transport

        def run() -> None:
            t.announce_round(tag).wait()  # the protocol asks for it: a rank that meets the others learns of the round
            for owner, (low, high) in enumerate(itertools.pairwise(bounds)):
                part, total = source[low:high], t.scratch(high - low, out.dtype, out.device)
                # yours: begin
                if t.rank == owner:
                    total.fill_(-0.0) if start is None else total.copy_(start)  # -0.0 + x is x, whatever x is
                self._move(total, owner, 0, tag)
                for rank in range(t.world_size):
                    if t.rank == rank:
                        total.add_(part)
                    self._move(total, rank, owner if rank == t.world_size - 1 else rank + 1, tag)
                if t.rank == owner:
                    out.copy_(total)
                # yours: end

        return InTheWait(run)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        t, shards = self.transport, [buffer[low:high] for low, high in itertools.pairwise(bounds)]
        receives = [t.irecv(shards[peer], peer, tag) for peer in t.peers()]
        return Chain([*receives, *(t.isend(shards[t.rank], peer, tag) for peer in t.peers())])

    def _move(self, tensor: Tensor, source: int, to: int, tag: Tag) -> None:
        """Move a tensor from rank ``source`` to rank ``to``. Every rank calls it; the others do nothing."""
        if self.transport.rank == source != to:
            self.transport.isend(tensor, to, tag, one_way=True).wait()
        elif self.transport.rank == to != source:
            self.transport.irecv(tensor, source, tag, one_way=True).wait()
