"""The mean gradients that a rank steps with, as pieces of those parameters that some rank used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import torch
from torch import Tensor

from collectives.torch_internals import amp_unscale_

from ..core.bits import digest_of_part, read_scalars
from ..core.layout import Piece
from ..runtime.bucket import Bucket


class ReducedGrads:
    """The mean gradients of one optimizer on one rank, after the ranks have finalized them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: the list itself, which may grow."""
        self._buckets = buckets

    def shards(self) -> list[Tensor]:
        """Return the means in the shards that this rank owns, 1-D: over all owners, every element once."""
        return self._intervals(lambda bucket: bucket.grad.pieces)

    def shards_of(self, positions: Set[int], *, inside: bool) -> list[Tensor]:
        """Return those of `shards` that are of the parameters at these positions in the layout, or of all others."""

        def chosen(bucket: Bucket) -> list[Piece]:
            slots = bucket.spec.slots
            return [piece for piece in bucket.grad.pieces if (slots[piece.slot].parameter in positions) == inside]

        return self._intervals(chosen)

    def digests(self, positions: Iterable[int]) -> dict[int, int | None]:
        """Return the `digest_of_part` of this rank's shard of the mean of each of these parameters; None if no rank
        used it."""
        found: dict[int, int | None] = dict.fromkeys(positions)
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            for slot, place in enumerate(bucket.spec.slots):
                if place.parameter in found and bucket.used[slot] and gradient is not None:
                    mine = [piece for piece in bucket.grad.pieces if piece.slot == slot]
                    parts = [digest_of_part(gradient.piece(piece), piece.begin - place.offset) for piece in mine]
                    found[place.parameter] = sum(parts)
        return found

    def any_is_fp64(self) -> bool:
        """Return whether the gradient of a used parameter is accumulated in fp64."""
        doubles = [bucket for bucket in self._buckets if bucket.spec.dtypes.accumulate_dtype is torch.float64]
        return any(1 in bucket.used for bucket in doubles)

    def unscale(self, inverse: Tensor) -> bool:
        """Multiply the means that this rank steps with by ``inverse``, a tensor of one element.

        Returns whether any element was not finite. The result is this rank's alone.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for interval in self._intervals(lambda bucket: bucket.states.pieces):
            alike.setdefault((interval.dtype, interval.device), []).append(interval)
        found: dict[torch.device, Tensor] = {}
        for (_, device), intervals in alike.items():
            flag = found.setdefault(device, torch.zeros(1, device=device))
            amp_unscale_(intervals, flag, inverse.to(device))
        # host synchronisation: every rank must take or skip the same step
        return any(read_scalars([flag[0] for flag in found.values()]))

    def _intervals(self, pieces_of: Callable[[Bucket], Sequence[Piece]]) -> list[Tensor]:
        """Return the gradients of the pieces that some rank used. Pieces with no padding between them are one."""
        found = []
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            if gradient is not None:
                for begin, end in _joined([piece for piece in pieces_of(bucket) if bucket.used[piece.slot]]):
                    found.append(gradient.interval(begin, end))
        return found


class FoundInf:
    """The tensors in which a `GradScaler` learns that a gradient is not finite: in one `unscale_`, one for each device.

    It hands over the gradients by device and dtype; that of a further device belongs to the same `unscale_`.
    """

    def __init__(self) -> None:
        self._results: dict[torch.device, Tensor] = {}  # in the last `unscale_`
        self._overflow = False

    def repeats(self, found: Tensor, *, may_be_new: bool) -> bool:
        """Return whether this `unscale_` has unscaled the gradients already. If so, ``found``, one element, is set to
        the earlier result.

        ``may_be_new``: the gradients may be others than those of the last `unscale_`.
        """
        if self._results and not may_be_new and found.device not in self._results:
            self._set(found)
        return self._results.get(found.device) is found

    def note_elsewhere(self) -> None:
        """Note that a gradient of another part of the model is not finite: the step of this `unscale_` is skipped."""
        for found in self._results.values():
            found.fill_(1.0)

    def note(self, found: Tensor, overflow: bool) -> None:
        """Note the result of an `unscale_`, and set ``found`` of its first device to it."""
        self._results, self._overflow = {}, overflow
        self._set(found)

    def _set(self, found: Tensor) -> None:
        self._results[found.device] = found
        if self._overflow:
            found.fill_(1.0)


def _joined(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of pieces that touch."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        begin = runs.pop()[0] if runs and runs[-1][1] == piece.begin else piece.begin
        runs.append((begin, piece.end))
    return runs
