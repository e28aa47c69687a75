"""Direct exchange by the carrier's own all-to-all, and the sum in rank order: for NCCL, which folds nothing in order.

    rank 0 | x00 | x01 | x02 |   all-to-all    rank 0 | x00 | x10 | x20 |   fold    start + x00 + x10 + x20
    rank 1 | x10 | x11 | x12 |      --->       rank 1 | x01 | x11 | x21 |   --->    start + x01 + x11 + x21
    rank 2 | x20 | x21 | x22 |                 rank 2 | x02 | x12 | x22 |           start + x02 + x12 + x22

One collective moves what a reduce-scatter moves, (W - 1)/W of a contribution a rank, and nothing is added on the way.
Among GPUs of one host that costs no more; between hosts NCCL's own reduce-scatter, which adds what a host has before it
sends, sends less. What carries the bytes is the backend of the tensor's device, in the same process group: NCCL for
CUDA in a group "cpu:gloo,cuda:nccl", whose headers travel by gloo. This was run over gloo, never on NCCL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from ..messages import Tag, Work, as_bytes
from ..transport import Transport
from .ordered_sum import fold
from .process_group import CarrierCalls


class AllToAll:
    """Reduce-scatter by one all-to-all and a fold, all-gather by the process group's own."""

    name = "all_to_all"
    exact = True

    def __init__(self, transport: Transport) -> None:
        """``transport``: over a torch.distributed process group of exactly its ranks."""
        self.transport, self._calls = transport, CarrierCalls(transport, self.name)

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Receives W slices, one's own among them, into scratch memory."""
        t = self.transport
        sizes = [(high - low) * source.itemsize for low, high in itertools.pairwise(bounds)]
        own, numel = sizes[t.rank], out.numel()
        alone = t.world_size == 1
        arrived = source if alone else t.scratch(t.world_size * numel, source.dtype, source.device)

        def add() -> None:
            parts = arrived.view(t.world_size, numel).unbind()
            fold(parts if start is None else [start, *parts], out)

        work = self._calls.start(
            tag,
            bounds,
            source.dtype,
            lambda carrier: carrier.all_to_all(as_bytes(arrived), as_bytes(source), [own] * t.world_size, sizes),
            add,
        )
        t.count_payload(sum(sizes) - own, (t.world_size - 1) * own)
        return work

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        return self._calls.all_gather(buffer, bounds, tag)
