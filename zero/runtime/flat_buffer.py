"""Memory of a bucket's elements in one dtype, and the collective that changes its placement.

Knows: intervals and placements. Does not know: what the elements mean, stages, steps.

    here       wanted    collective
    PARTIAL    SHARD     reduce-scatter: the contributions of all ranks are added up, each owner gets its shard
    SHARD      WHOLE     all-gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from collectives import Collective, Tag, Work

from ..core.bits import strided
from ..core.layout import BucketSpec, Cuts, ParameterSpec, PartOfCuts, Piece, Slot
from ..core.stage import Placement
from .profiler_ranges import NOTHING

Move = Callable[[Tensor], Tensor]  # from a tensor to the one with the same values elsewhere, or itself


def usable_later() -> AbstractContextManager[None]:
    """Leave inference mode in the block, without gradients: memory that is allocated in that mode cannot be used in a
    backward, or written outside of that mode, later."""
    return _outside_of_inference() if torch.is_inference_mode_enabled() else NOTHING


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class FlatBuffer:
    """The elements ``[begin, end)`` of a bucket in one dtype.

    Attributes:
        data: the elements, 1-D.
        begin: the first of them.
        placement: which elements a rank has, and whether they are final.
    """

    __slots__ = ("begin", "data", "placement")

    def __init__(self, data: Tensor, placement: Placement, begin: int = 0) -> None:
        self.data, self.begin, self.placement = data, begin, placement

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.begin + self.data.numel()

    @property
    def device(self) -> torch.device:
        """Where the elements are."""
        return self.data.device

    @property
    def source(self) -> Tensor:
        """The elements, 1-D, to be read."""
        return self.data

    def kept(self) -> list[Tensor]:
        """Return the memory that is kept for the elements."""
        return [self.data]

    def apply(self, move: Move) -> None:
        """Replace the memory by what ``move`` returns for it."""
        self.data = move(self.data)

    def values(self) -> FlatBuffer:
        """Return the elements to be read, not written: they may be a copy."""
        return self

    def interval(self, begin: int, end: int) -> Tensor:
        """Return elements ``[begin, end)`` of the bucket as a view, 1-D."""
        return self.data[begin - self.begin : end - self.begin]

    def piece(self, piece: Piece) -> Tensor:
        """Return a piece as a view, 1-D."""
        return self.interval(piece.begin, piece.end)

    def shard(self, cuts: Cuts, rank: int) -> FlatBuffer:
        """Return what ``rank`` owns of these elements as a view."""
        low, high = cuts.owned(rank)
        return FlatBuffer(self.interval(low, high), Placement.SHARD, low)

    def slot(self, slot: Slot, spec: ParameterSpec) -> Tensor:
        """Return a slot as a view with its parameter's shape and strides. All of it must be here."""
        return strided(self.data, slot.offset - self.begin, spec.shape, spec.stride)


def redistribute(
    source: FlatBuffer,
    target: FlatBuffer,
    cuts: Cuts,
    collective: Collective,
    tag: Tag,
    *,
    start: Tensor | None = None,
) -> Work:
    """Launch the collective from the placement of ``source`` to that of ``target``. Collective.

    Args:
        source: what this rank has. A shard may be a view of ``target``.
        target: what it gets; of the same bucket.
        cuts: which elements each rank owns.
        collective: the algorithm.
        tag: the tag of the messages.
        start: for a reduce-scatter, the sum of earlier contributions in this rank's shard, 1-D.
    """
    match source.placement, target.placement:
        case Placement.PARTIAL, Placement.SHARD:
            return collective.reduce_scatter(source.data, cuts, target.data, start=start, tag=tag)
        case Placement.SHARD, Placement.WHOLE:
            own = target.interval(source.begin, source.end)
            if own.data_ptr() != source.data.data_ptr():
                own.copy_(source.data)
            return collective.all_gather(target.data, cuts, tag=tag)
        case here, wanted:
            raise ValueError(f"no collective leads from {here} to {wanted}")


def gather_slot(
    buffer: FlatBuffer, slot: Slot, bucket: BucketSpec, rank: int, collective: Collective, tag: Tag
) -> Tensor:
    """Gather one slot of a buffer of ``bucket``, of which each rank has at least its shard. Collective.

    ``rank``: whose shard this rank holds. Returns the slot's elements, 1-D, as a copy on the bucket's device.
    """
    cuts = bucket.cuts
    of_slot = PartOfCuts(cuts, slot.offset, slot.end)
    low, high = of_slot.owned(rank)
    own = buffer.interval(slot.offset + low, slot.offset + high).to(bucket.device)
    whole = torch.empty(slot.numel, dtype=own.dtype, device=own.device)
    source = FlatBuffer(own, Placement.SHARD, low)
    redistribute(source, FlatBuffer(whole, Placement.WHOLE), of_slot, collective, tag).wait()
    return whole
