"""The mean gradients that a rank steps with, as pieces of those parameters that some rank used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.torch_internals import amp_unscale_

from ..core.layout import Piece
from ..runtime.bucket import Bucket


class OwnedMeans:
    """The mean gradients of one optimizer on one rank, after the ranks have finalized them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: the list itself, which may grow."""
        self._buckets = buckets

    def slices(self) -> list[Tensor]:
        """Return the means in the shards that this rank owns, 1-D: over all owners, every element once."""
        return self._intervals(lambda bucket: bucket.grad.pieces)

    def any_is_double(self) -> bool:
        """Return whether the gradient of a used parameter is accumulated in fp64."""
        doubles = [bucket for bucket in self._buckets if bucket.spec.dtypes.accumulate_dtype is torch.float64]
        return any(1 in bucket.used for bucket in doubles)

    def unscale(self, found: Tensor, inverse: Tensor) -> bool:
        """Multiply the means that this rank steps with by ``inverse``; return whether any element was not finite.

        ``found`` is a zero of one element, which is set to 1 in that case. The result is this rank's alone.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for interval in self._intervals(lambda bucket: bucket.states.pieces):
            by_dtype.setdefault(interval.dtype, []).append(interval)
        for intervals in by_dtype.values():
            amp_unscale_(intervals, found, inverse)
        return bool(found.item())  # host synchronisation: every rank must take or skip the same step

    def _intervals(self, pieces_of: Callable[[Bucket], Sequence[Piece]]) -> list[Tensor]:
        """Return the gradients of the pieces that some rank used. Pieces with no padding between them are one."""
        found = []
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            if gradient is not None:
                for begin, end in _joined([piece for piece in pieces_of(bucket) if bucket.used[piece.slot]]):
                    found.append(gradient.interval(begin, end))
        return found


def _joined(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of pieces that touch."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        begin = runs.pop()[0] if runs and runs[-1][1] == piece.begin else piece.begin
        runs.append((begin, piece.end))
    return runs
