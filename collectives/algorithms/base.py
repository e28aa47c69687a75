"""What an algorithm is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..messages import Tag, Work
from ..transport import Transport


class Collective(Protocol):
    """An algorithm over a transport. All ranks of the group call each method, with equal bounds and tag.

    Works are waited for in the order in which they were launched, by every rank: a wait may end only when peers have
    read what this rank gave them.

    ``bounds`` has world_size + 1 entries, ascending from 0 to the number of elements: rank r owns
    ``[bounds[r], bounds[r + 1])``, which may be uneven or empty.
    """

    name: str
    exact: bool
    transport: Transport  # its messages' own; whoever uses the algorithm takes memory and makes exchanges there, too

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """Add all ranks' contributions to this rank's slice of ``source`` onto ``start`` and put the sum in ``out``.

        ``source``: this rank's contribution to every slice, 1-D; scratch to the algorithm until ``wait`` returns, as
        is ``start``, which is not read before somebody waits.
        ``out``: as long as this rank's slice, in the accumulator's dtype; may share memory with this rank's own slice
        of ``source``, or be ``start``. ``start``: the sum so far, in ``out``'s dtype, or None where there is none.
        Where `exact` is true, the sum is formed in rank order: ((start + x_0) + x_1) + ...

        The first of a round sends a header to every other rank before it waits for one, whatever the bounds: that is
        how a rank in `Transport.meet` learns of the round.
        """

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """Fill every other rank's slice of ``buffer`` with what that rank has there; one's own slice is the input."""
