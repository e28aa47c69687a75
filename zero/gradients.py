"""The gradients of one bucket on one rank: what it contributes next, and the running sum of its own slice.

Knows: the bucket's geometry, which buffers its stage keeps, and where zero is not the same as nothing. Does not know:
when a backward begins or ends, other buckets, optimizers.

    stage      local (this rank's contribution)   sum (owner's slice, undivided)     settled (what the update reads)
    0          whole, kept                        kept beside it                     whole: means of all slices
    1          whole, kept                        its own slice of the whole         sum / divisor
    2, 3       whole, scratch while it travels    kept                               sum / divisor

A gradient that is missing contributes -0.0, the identity of IEEE addition: +0.0 would turn -0.0 into 0.0.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport, Work

from .layout import Bucket, Layout
from .stages import Stage, same_bits, strided


class _Reduction:
    """A bucket under way to its owners."""

    def __init__(self, store: GradientStore, work: Work) -> None:
        self._store: GradientStore | None = store
        self._work = work

    def wait(self) -> None:
        if self._store is not None:
            self._work.wait()
            store, self._store = self._store, None
            store.reduced()


class GradientStore:
    """See the module. Buffers are allocated with the first gradient."""

    def __init__(self, bucket: Bucket, layout: Layout, stage: Stage, transport: Transport) -> None:
        self.bucket = bucket
        self._layout, self._stage, self._transport = layout, stage, transport
        self.low, self.high = bucket.owned(transport.rank)
        self.pieces = bucket.pieces(self.low, self.high)
        names = [layout.parameters[slot.parameter].name for slot in bucket.slots]
        self.label = f"bucket {bucket.index} ({names[0]}{' ... ' + names[-1] if len(names) > 1 else ''})"
        self._whole: Tensor | None = None
        self._views: list[Tensor] = []
        self._kept_sum: Tensor | None = None
        self._local: Tensor | None = None
        self._aside: Tensor | None = None  # the running sum, while a contribution fills its place
        self._fresh: set[int] = set()  # slots of the contribution that hold nothing yet
        self.has_sum = False
        self.arrived: dict[int, Tensor] = {}  # slot -> gradient that autograd gave and that is not copied yet
        self._versions: dict[int, int] = {}  # of these, when they came
        self.touched = False  # a backward ran with this bucket active, and its contribution has not been reduced

    # -- what this rank contributes -----------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """True when this rank has a contribution that was not reduced."""
        return self._local is not None or bool(self.arrived)

    def arrive(self, slot: int, gradient: Tensor) -> None:
        """Hold a gradient that autograd gave until it is copied."""
        self.arrived[slot] = gradient
        self._versions[slot] = gradient._version

    def absorb(self) -> None:
        """Add the gradients that arrived to this rank's contribution, as autograd would have: the first is assigned."""
        if not self.arrived:
            return
        for slot, gradient in self.arrived.items():
            if gradient._version != self._versions[slot]:
                name = self._layout.parameters[self.bucket.slots[slot].parameter].name
                raise RuntimeError(
                    f"the gradient of {name!r} was modified in place after autograd had handed it over: a hook must "
                    "return a new tensor instead"
                )
        self._open()
        first = [(slot, gradient) for slot, gradient in self.arrived.items() if slot in self._fresh]
        later = [(slot, gradient) for slot, gradient in self.arrived.items() if slot not in self._fresh]
        if first:
            torch._foreach_copy_([self._views[slot] for slot, _ in first], [gradient for _, gradient in first])
        if later:
            torch._foreach_add_([self._views[slot] for slot, _ in later], [gradient for _, gradient in later])
        self._fresh.difference_update(self.arrived)
        self.arrived = {}

    def _open(self) -> None:
        if self._local is not None:
            return
        bucket, stage = self.bucket, self._stage
        if stage.contributions_stay:
            if self._whole is None:
                self._whole = self._empty(bucket.numel, bucket.dtypes.accumulate)
                self._views = self._slot_views(self._whole)
            self._local = self._whole
            if self.has_sum and self._kept_sum is None:
                self._aside = self._scratch(self.high - self.low, bucket.dtypes.accumulate)
                self._aside.copy_(self._whole[self.low : self.high])
        else:
            self._local = self._scratch(bucket.numel, bucket.dtypes.travel)
            self._views = self._slot_views(self._local)
        self._fresh = set(range(len(bucket.slots)))

    # -- to the owners --------------------------------------------------------------------------------------------

    def launch(self, collective: Collective, label: str, round_: int, trainable: Sequence[bool]) -> Work:
        """Start to reduce this rank's contribution. Collective; ``trainable``: of each slot, equal on all ranks."""
        self.absorb()
        self._open()
        assert self._local is not None
        for slot in self._fresh:
            self._views[slot].fill_(-0.0)
        source = self._local
        tag = Tag(Kind.REDUCE_SCATTER, label, round_, self.bucket.index, zlib.crc32(bytes(trainable)))
        start = (self._aside if self._aside is not None else self._sum()) if self.has_sum else None
        work = collective.reduce_scatter(source, self.bucket.bounds, self._sum(), start=start, tag=tag)
        return _Reduction(self, work)

    def reduced(self) -> None:
        """The contribution has arrived everywhere."""
        self.has_sum = True
        self._close()

    def _close(self) -> None:
        self.touched = False
        self._local = self._aside = None
        self._fresh, self.arrived = set(), {}
        if not self._stage.contributions_stay:
            self._views = []

    def _sum(self) -> Tensor:
        """The owner's slice, allocated when first asked for."""
        stage, size, dtype = self._stage, self.high - self.low, self.bucket.dtypes.accumulate
        if stage.contributions_stay and not stage.means_are_gathered:
            assert self._whole is not None
            return self._whole[self.low : self.high]
        if self._kept_sum is None:
            self._kept_sum = self._empty(size, dtype)
        return self._kept_sum

    # -- what the sum says ----------------------------------------------------------------------------------------

    def running_sum(self) -> Tensor | None:
        """The undivided sum of this rank's own slice, wherever it lies now; None before the first reduction."""
        if not self.has_sum:
            return None
        return self._aside if self._aside is not None else self._sum()

    def settled(self) -> Tensor | None:
        """What the update reads, of the interval that this rank steps; None where nothing was reduced."""
        if not self.has_sum:
            return None
        return self._whole if self._stage.means_are_gathered else self._sum()

    def divide(self, divisor: float) -> None:
        """Turn the sum into the mean, where the owner alone needs it."""
        if self.has_sum and divisor != 1:
            self._sum().div_(divisor)

    def gather_means(self, collective: Collective, round_: int, divisor: float) -> Work:
        """Start to give every rank the mean of every slice. Collective."""
        assert self._whole is not None
        own = self._whole[self.low : self.high]
        torch.div(self._sum(), divisor, out=own) if divisor != 1 else own.copy_(self._sum())
        tag = Tag(Kind.ALL_GATHER, f"means of {self.label}", round_, self.bucket.index)
        return collective.all_gather(self._whole, self.bucket.bounds, tag=tag)

    def mean_view(self, slot: int) -> Tensor:
        """The slot of the whole mean gradient, in the parameter's shape."""
        return self._views[slot]

    # -- clearing -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: no gradient is a zero gradient's opposite."""
        self.has_sum = False
        self._close()

    def clear_slot(self, slot: int) -> None:
        """Forget one parameter's gradient."""
        self.arrived.pop(slot, None)
        if self._local is not None:
            self._fresh.add(slot)
        self._fill_sum(slot, -0.0)

    def zero_slot(self, slot: int) -> None:
        """Set a parameter's gradient to zero, where all ranks know that it exists: zero is not the same as nothing."""
        self.clear_slot(slot)
        self._fill_sum(slot, 0.0)

    def contribute_zero(self, slot: int) -> None:
        """Set a parameter's gradient to zero, where only this rank knows that it exists: its contribution is +0.0."""
        self.clear_slot(slot)
        self._open()
        self._views[slot].zero_()
        self._fresh.discard(slot)

    def _fill_sum(self, slot: int, value: float) -> None:
        total = self.running_sum()
        if total is None:
            return
        if self._stage.means_are_gathered and self._local is None:
            self._views[slot].fill_(value)
        for piece in self.pieces:
            if piece.slot == slot:
                total[piece.begin - self.low : piece.end - self.low].fill_(value)

    def edits(self, divisor: float, used: Sequence[bool]) -> list[int]:
        """Slots whose whole mean was edited since it was gathered, as far as this rank's own slice shows it. One that
        was set to zero counts as zeroed; its sum follows. ``used``: of each parameter in the layout."""
        if self._whole is None or not self.has_sum or self._local is not None:
            return []
        expected = self._sum() / divisor if divisor != 1 else self._sum()
        found = []
        for piece in self.pieces:
            mean = self._whole[piece.begin : piece.end]
            if not used[self.bucket.slots[piece.slot].parameter]:
                continue
            if same_bits(mean, expected[piece.begin - self.low : piece.end - self.low]):
                continue
            if torch.count_nonzero(mean):
                found.append(piece.slot)
            else:
                self._fill_sum(piece.slot, 0.0)
        return found

    # -- memory ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """The buffers that are kept between steps."""
        return [t for t in (self._whole, self._kept_sum) if t is not None]

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._transport.empty(numel, dtype, torch.device(self.bucket.device))

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._transport.scratch(numel, dtype, torch.device(self.bucket.device))

    def _slot_views(self, flat: Tensor) -> list[Tensor]:
        specs = self._layout.parameters
        return [
            strided(flat, slot.offset, specs[slot.parameter].shape, specs[slot.parameter].stride)
            for slot in self.bucket.slots
        ]
