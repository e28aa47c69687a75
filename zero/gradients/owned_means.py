"""The mean gradients that a rank steps with, as pieces of those parameters that some rank used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.torch_internals import amp_unscale_

from ..core.layout import Piece
from ..core.stage import Stage
from ..runtime.accumulator import GradAccumulator


class OwnedMeans:
    """The mean gradients of one optimizer on one rank, after the ranks have finalized them."""

    def __init__(self, stage: Stage, rank: int, stores: Sequence[GradAccumulator], used: Sequence[bool]) -> None:
        """Create a view of the means.

        Args:
            stage: gives the interval of each bucket that a rank updates.
            rank: this rank's number among those that own slices.
            stores: the accumulators of all buckets; the list itself, which may grow.
            used: whether some rank used each parameter, in the layout's order; the list itself.
        """
        self._stage, self._rank = stage, rank
        self._stores, self._used = stores, used

    def slices(self) -> list[Tensor]:
        """Return the means in the slices that this rank owns: over all owners, every element once."""
        return self._pieces(lambda store: store.pieces)

    def any_is_double(self) -> bool:
        """Return whether the gradient of a used parameter is accumulated in fp64."""
        doubles = [store.bucket for store in self._stores if store.bucket.dtypes.accumulate_dtype is torch.float64]
        return any(self._used[slot.parameter] for bucket in doubles for slot in bucket.slots)

    def unscale(self, found: Tensor, inverse: Tensor) -> bool:
        """Multiply the means that this rank steps with by ``inverse``; return whether any element was not finite.

        ``found`` is a zero of one element, which is set to 1 in that case. The result is this rank's alone.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        stepped = self._pieces(
            lambda store: store.bucket.pieces(*self._stage.update_interval(store.bucket, self._rank))
        )
        for piece in stepped:
            by_dtype.setdefault(piece.dtype, []).append(piece)
        for pieces in by_dtype.values():
            amp_unscale_(pieces, found, inverse)
        return bool(found.item())  # host synchronisation: every rank must take or skip the same step

    def _pieces(self, pieces_of: Callable[[GradAccumulator], Sequence[Piece]]) -> list[Tensor]:
        found = []
        for store in self._stores:
            gradient = store.final_grad()
            if gradient is not None:
                for piece in pieces_of(store):
                    if self._used[store.bucket.slots[piece.slot].parameter]:
                        found.append(gradient.piece(piece))
        return found
