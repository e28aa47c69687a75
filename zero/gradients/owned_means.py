"""The mean gradients that a rank updates with, as pieces of the parameters that some rank used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.torch_internals import amp_unscale_

from ..core.layout import Piece
from ..core.stage import Stage
from .accumulator import GradAccumulator


class OwnedMeans:
    """Those of one optimizer on one rank, when ranks have agreed on them."""

    def __init__(self, stage: Stage, rank: int, stores: Sequence[GradAccumulator], used: Sequence[bool]) -> None:
        """``rank``: among those that own slices; ``stores`` and ``used``: of all buckets and parameters, live lists."""
        self._stage, self._rank = stage, rank
        self._stores, self._used = stores, used

    def slices(self) -> list[Tensor]:
        """Of this rank's own slices: those of all ranks are every element once."""
        return self._pieces(lambda store: store.pieces)

    def any_is_double(self) -> bool:
        """Whether a gradient that some rank used is added up in fp64."""
        doubles = [store.bucket for store in self._stores if store.bucket.dtypes.accumulate_dtype is torch.float64]
        return any(self._used[slot.parameter] for bucket in doubles for slot in bucket.slots)

    def unscale(self, found: Tensor, inverse: Tensor) -> bool:
        """Multiply all that this rank steps with by ``inverse``. Returns whether any of it is not finite; ``found``: a
        zero of one element, where that is noted down."""
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
            gradient = store.settled()
            if gradient is not None:
                begin, _ = self._stage.update_interval(store.bucket, self._rank)
                for piece in pieces_of(store):
                    if self._used[store.bucket.slots[piece.slot].parameter]:
                        found.append(gradient[piece.begin - begin : piece.end - begin])
        return found
