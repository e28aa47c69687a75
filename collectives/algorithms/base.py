"""The protocol of an algorithm, for ``collective=`` as a class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..messages import Tag, Work
from ..transport import Transport


class Collective(Protocol):
    """An algorithm over a transport. All ranks of the group call each method, with equal bounds and tag.

    All ranks wait for works in the same order, which need not be that of the launches: a wait may return only after
    peers have read this rank's data. A reduce-scatter may be a `StagedWork`.

    ``bounds`` has world_size + 1 entries, ascending from 0 to the number of elements: rank r owns
    ``[bounds[r], bounds[r + 1])``, which may be uneven or empty.
    """

    name: str
    exact: bool
    transport: Transport  # of its messages; the caller also takes memory and makes exchanges there

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """Add all ranks' contributions to this rank's shard onto ``start`` and put the sum in ``out``.

        ``source``: this rank's contribution to every shard, 1-D. The algorithm may overwrite it until ``wait`` returns.
        ``out``: as long as this rank's shard, in the accumulator's dtype. It may share memory with this rank's own
        shard of ``source``, or be ``start``.
        ``start``: the sum so far, in ``out``'s dtype, or None. The algorithm may overwrite it, too, and reads it only
        in ``wait``.
        If `exact` is True, the sum is formed in rank order: ((start + x_0) + x_1) + ...

        The first call of a round must send a header to every other rank before it waits for one, whatever the bounds:
        that is how a rank in `Transport.meet` learns of the round. `Transport.announce_round` does it.
        """

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """Fill each shard of ``buffer`` with its owner's values. This rank's own shard is the input."""
