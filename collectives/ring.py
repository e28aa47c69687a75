"""Neighbours only, W - 1 rounds: the textbook algorithm, to compare with.

A slice's sum travels around the ring and is formed in the order of the ring, which begins behind the owner: another
order, and so other bits, than the fold in rank order. It is exact where sums are (integer-valued gradients).

A rank sends to one neighbour and hears only from the other. So that it need not wait for one that failed and cannot
say so, all ranks announce themselves to each other before the first round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .messages import Chain, Tag, Work
from .transport import Transport


class _Rounds:
    """The rounds of a ring, which run when somebody waits: each needs the one before."""

    def __init__(self, run: _Run) -> None:
        self._run: _Run | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.ring.transport.announce(run.tag).wait()
            run()


class _Run:
    def __init__(self, ring: Ring, tensor: Tensor, bounds: Sequence[int], tag: Tag) -> None:
        self.ring, self.tensor, self.bounds, self.tag = ring, tensor, list(bounds), tag

    def slice(self, index: int) -> Tensor:
        index %= self.ring.transport.world_size
        return self.tensor[self.bounds[index] : self.bounds[index + 1]]

    def shift(self, sent: Tensor, received: Tensor) -> None:
        """Send one slice to the right neighbour while another comes from the left."""
        t = self.ring.transport
        right, left = (t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size
        Chain([t.irecv(received, left, self.tag), t.isend(sent, right, self.tag)]).wait()

    def __call__(self) -> None:
        raise NotImplementedError  # pragma: no cover - the two kinds of run say what is done


class _GatherRun(_Run):
    def __call__(self) -> None:
        rank = self.ring.transport.rank
        for i in range(self.ring.transport.world_size - 1):
            self.shift(self.slice(rank - i), self.slice(rank - i - 1))


class _ReduceRun(_Run):
    def __init__(
        self, ring: Ring, source: Tensor, bounds: Sequence[int], tag: Tag, out: Tensor, start: Tensor | None
    ) -> None:
        super().__init__(ring, source, bounds, tag)
        self.out, self.start = out, start

    def __call__(self) -> None:
        t = self.ring.transport
        for i in range(t.world_size - 1):
            mine = self.slice(t.rank - i - 2)
            received = t.scratch(mine.numel(), mine.dtype, mine.device)
            self.shift(self.slice(t.rank - i - 1), received)
            mine.add_(received)
        own = self.slice(t.rank)
        if self.start is None:
            self.out.copy_(own)
        else:
            torch.add(self.start, own, out=self.out)


class Ring:
    """Reduce-scatter and all-gather around a ring."""

    name = "ring"
    exact = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`; sums in ``source``'s dtype, in the order of the ring."""
        return _Rounds(_ReduceRun(self, source, bounds, tag, out, start))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        return _Rounds(_GatherRun(self, buffer, bounds, tag))
