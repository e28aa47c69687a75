"""The gradients of one bucket on one rank: what it contributes next, and the running sum of its own slice.

Knows: the bucket's geometry, which buffers its stage keeps, and where zero is not the same as nothing. Does not know:
when a backward begins or ends, other buckets, optimizers.

    stage      local (this rank's contribution)   sum (owner's slice, undivided)     settled (what the update reads)
    0          whole, kept                        kept beside it                     whole: means of all slices
    1          whole, kept                        its own slice of the whole         sum / divisor
    2, 3       whole, scratch while it travels    kept                               sum / divisor

Where what travels is narrower than the sum, whole means have memory of their own, and so has the sum; what `no_sync`
adds up is in the sum's dtype, too, and is rounded once, when it travels.

A gradient that is missing contributes -0.0, the identity of IEEE addition: +0.0 would turn -0.0 into 0.0.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport, Work
from collectives.torch_internals import foreach_add_, foreach_copy_

from ..core.bits import first_unequal, same_bits, strided
from ..core.layout import Bucket, Layout
from ..core.stage import Stage
from ..events import Event, Waited


class _Reduction:
    """A bucket under way to its owners."""

    def __init__(self, store: GradAccumulator, work: Work) -> None:
        self._store: GradAccumulator | None = store
        self._work = work

    def wait(self) -> None:
        if self._store is not None:
            with self._store.waiting():
                self._work.wait()
            store, self._store = self._store, None
            store.reduced()


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


class GradAccumulator:
    """See the module. Buffers are allocated with the first gradient."""

    def __init__(self, bucket: Bucket, layout: Layout, stage: Stage, shards: Transport) -> None:
        """``shards``: the ranks that own the bucket's slices, and whence memory comes."""
        self.bucket = bucket
        self._layout, self._stage, self._shards = layout, stage, shards
        self.low, self.high = bucket.owned(shards.rank)
        self.pieces = bucket.pieces(self.low, self.high)
        names = [layout.parameters[slot.parameter].name for slot in bucket.slots]
        self.label = f"bucket {bucket.index} ({names[0]}{' ... ' + names[-1] if len(names) > 1 else ''})"
        number, rank = bucket.index, shards.rank_label
        self._launching = Event(f"reduce_scatter bucket {number}", rank)
        self.waiting = Event(f"wait_for_reduce_scatter bucket {number}", rank)
        self._gathering = Event(f"all_gather_gradients bucket {number}", rank)
        self._waiting_for_means = Event(f"wait_for_all_gather_gradients bucket {number}", rank)
        self._in_place = stage.contributes_in_place(bucket.dtypes)
        self._sum_apart = stage.sum_lies_apart(bucket.dtypes)
        self._whole: Tensor | None = None  # means, contributions, or one after the other
        self._views: dict[int, Tensor] = {}  # of its slots
        self._kept_sum: Tensor | None = None
        self._local: Tensor | None = None
        self._saved_sum: Tensor | None = None  # the running sum, while a contribution fills its place
        self._unwritten: set[int] = set()  # slots of the contribution that hold nothing yet
        self._prefilled = False  # what holds nothing yet is -0.0 already
        self.has_sum = False
        self.arrived: dict[int, Tensor] = {}  # slot -> gradient that autograd gave and that is not copied yet
        self._versions: dict[int, int] = {}  # of these, when they came
        self._empty_row, self._row_places = self._nothing()
        shapes = [
            (layout.parameters[slot.parameter].shape, layout.parameters[slot.parameter].stride) for slot in bucket.slots
        ]
        self._contiguous = all(stride == _contiguous_stride(shape) for shape, stride in shapes)
        self.touched = False  # a backward ran with this bucket active, and its contribution has not been reduced

    def _nothing(self) -> tuple[list[Tensor], list[int]]:
        """Of each slot -0.0, and behind it the padding, where there is any: in a row, the bucket; and each slot's place
        in the row. A padding that is not contiguous, or empty, would take torch's slower way to put it all together."""
        device, slots = torch.device(self.bucket.device), self.bucket.slots
        dtype = self.bucket.dtypes.reduce_dtype
        nothing = torch.full((1,), -0.0, dtype=dtype, device=device)
        row, places = list[Tensor](), list[int]()
        for slot, end in zip(slots, [*(after.offset for after in slots[1:]), self.bucket.numel], strict=True):
            places.append(len(row))
            row.append(nothing.expand(slot.numel))
            if end > slot.end:
                row.append(torch.zeros(end - slot.end, dtype=dtype, device=device))
        return row, places

    # -- what this rank contributes -----------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """True when this rank has a contribution that was not reduced."""
        return self._local is not None or bool(self.arrived)

    def stash(self, slot: int, gradient: Tensor) -> None:
        """Hold a gradient that autograd gave until it is copied."""
        self.arrived[slot] = gradient
        self._versions[slot] = gradient._version

    def flush(self, *, travels: bool) -> None:
        """Add the gradients that arrived to this rank's contribution, as autograd would have: the first is assigned.
        ``travels``: at once, so that no other will be added."""
        arrived = self.arrived
        if not arrived:
            return
        edited = [slot for slot, gradient in arrived.items() if gradient._version != self._versions[slot]]
        if edited:
            name = self._layout.parameters[self.bucket.slots[edited[0]].parameter].name
            raise RuntimeError(
                f"the gradient of {name!r} was modified in place after autograd had handed it over: a hook must "
                "return a new tensor instead"
            )
        row = self._cat_list(arrived) if self._local is None and (travels or not self.bucket.dtypes.widens) else None
        self._open(travels=travels)
        assert self._local is not None
        if row is not None:
            torch.cat(row, out=self._local)
            self._prefilled = True
        else:
            first = {slot: gradient for slot, gradient in arrived.items() if slot in self._unwritten}
            later = {slot: gradient for slot, gradient in arrived.items() if slot not in self._unwritten}
            if first:
                foreach_copy_([self._view(slot) for slot in first], list(first.values()))
            if later:
                dtype = self._local.dtype  # in which a gradient is added: a wider one is rounded first
                narrowed = [g.to(dtype) if g.itemsize > dtype.itemsize else g for g in later.values()]
                foreach_add_([self._view(slot) for slot in later], narrowed)
        self._unwritten.difference_update(arrived)
        self.arrived = {}

    def _cat_list(self, arrived: Mapping[int, Tensor]) -> list[Tensor] | None:
        """The whole contribution as tensors in a row, -0.0 for what is missing: they are copied in one call, without a
        view for each. None where memory has another order than the slots, or another dtype."""
        row = self._empty_row.copy()
        for slot, gradient in arrived.items():
            if not gradient.is_contiguous() or gradient.dtype is not self.bucket.dtypes.reduce_dtype:
                return None
            row[self._row_places[slot]] = gradient if gradient.dim() == 1 else gradient.view(-1)
        return row if self._contiguous else None

    def _open(self, *, travels: bool) -> None:
        if self._local is not None:
            return
        if travels or not self.bucket.dtypes.widens:
            self._local = self._to_travel()
        else:
            self._local = self._scratch(self.bucket.numel, self.bucket.dtypes.accumulate_dtype)
        self._unwritten, self._prefilled = set(range(len(self.bucket.slots))), False

    def _to_travel(self) -> Tensor:
        """A buffer from which a contribution can travel."""
        bucket = self.bucket
        if self._in_place:
            if self._whole is None:
                self._whole = self._empty(bucket.numel, bucket.dtypes.reduce_dtype)
            if self.has_sum and not self._sum_apart:
                self._saved_sum = self._scratch(self.high - self.low, bucket.dtypes.accumulate_dtype)
                self._saved_sum.copy_(self._whole[self.low : self.high])
            return self._whole
        if self._shards.world_size == 1 and not self.has_sum and not bucket.dtypes.widens:
            return self._sum()  # what one rank contributes first is the sum: nothing is copied
        return self._scratch(bucket.numel, bucket.dtypes.reduce_dtype)

    def _view(self, slot: int) -> Tensor:
        """The slot of this rank's contribution, in the parameter's shape."""
        assert self._local is not None
        return self.mean_view(slot) if self._local is self._whole else self._slot_of(self._local, slot)

    def mean_view(self, slot: int) -> Tensor:
        """The slot of the whole buffer, in the parameter's shape: of the mean gradient, where it lies there."""
        if slot not in self._views:
            assert self._whole is not None
            self._views[slot] = self._slot_of(self._whole, slot)
        return self._views[slot]

    def _slot_of(self, flat: Tensor, number: int) -> Tensor:
        slot = self.bucket.slots[number]
        spec = self._layout.parameters[slot.parameter]
        return strided(flat, slot.offset, spec.shape, spec.stride)

    # -- to the owners --------------------------------------------------------------------------------------------

    def launch(self, collective: Collective, label: str, round_: int, trainable: Sequence[bool]) -> Work:
        """Start to reduce this rank's contribution. Collective; ``trainable``: of each slot, equal on all ranks."""
        with self._launching():
            return self._launch(collective, label, round_, trainable)

    def _launch(self, collective: Collective, label: str, round_: int, trainable: Sequence[bool]) -> Work:
        self.flush(travels=True)
        self._open(travels=True)
        assert self._local is not None
        if not self._prefilled:
            for slot in self._unwritten:
                self._view(slot).fill_(-0.0)
        if self._local.dtype is not self.bucket.dtypes.reduce_dtype:
            self._local = self._to_travel().copy_(self._local)
        source = self._local
        tag = Tag(Kind.REDUCE_SCATTER, label, round_, self.bucket.index, zlib.crc32(bytes(trainable)))
        start = (self._saved_sum if self._saved_sum is not None else self._sum()) if self.has_sum else None
        work = collective.reduce_scatter(source, self.bucket.bounds, self._sum(), start=start, tag=tag)
        return _Reduction(self, work)

    def reduced(self) -> None:
        """The contribution has arrived everywhere."""
        self.has_sum = True
        self._close()

    def _close(self) -> None:
        self.touched = False
        self._local = self._saved_sum = None
        self._unwritten, self.arrived = set(), {}

    def _sum(self) -> Tensor:
        """The owner's slice, allocated when first asked for."""
        if not self._sum_apart:
            assert self._whole is not None
            return self._whole[self.low : self.high]
        if self._kept_sum is None:
            self._kept_sum = self._empty(self.high - self.low, self.bucket.dtypes.accumulate_dtype)
        return self._kept_sum

    # -- what the sum says ----------------------------------------------------------------------------------------

    def running_sum(self) -> Tensor | None:
        """The undivided sum of this rank's own slice, wherever it lies now; None before the first reduction."""
        if not self.has_sum:
            return None
        return self._saved_sum if self._saved_sum is not None else self._sum()

    def settled(self) -> Tensor | None:
        """What the update reads, of the interval that this rank steps; None where nothing was reduced."""
        if not self.has_sum:
            return None
        return self._whole if self._stage.grads_replicated else self._sum()

    def divide(self, divisor: float) -> None:
        """Turn the sum into the mean, where the owner alone needs it."""
        if self.has_sum and divisor != 1:
            self._sum().div_(divisor)

    def gather_means(self, collective: Collective, round_: int, divisor: float) -> Work:
        """Start to give every rank the mean of every slice. Collective."""
        with self._gathering():
            if self._whole is None:
                self._whole = self._empty(self.bucket.numel, self.bucket.dtypes.accumulate_dtype)
            own = self._whole[self.low : self.high]
            torch.div(self._sum(), divisor, out=own) if divisor != 1 else own.copy_(self._sum())
            tag = Tag(Kind.ALL_GATHER, f"means of {self.label}", round_, self.bucket.index)
            work = collective.all_gather(self._whole, self.bucket.bounds, tag=tag)
            return Waited(work, self._waiting_for_means)

    # -- clearing -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: no gradient is a zero gradient's opposite."""
        self.has_sum = False
        self._close()

    def clear_slot(self, slot: int) -> None:
        """Forget one parameter's gradient."""
        self.arrived.pop(slot, None)
        if self._local is not None and slot not in self._unwritten:
            self._view(slot).fill_(-0.0)
            self._unwritten.add(slot)
        self._fill_sum(slot, -0.0)

    def zero_slot(self, slot: int) -> None:
        """Set a parameter's gradient to zero, where all ranks know that it exists: zero is not the same as nothing."""
        self.clear_slot(slot)
        self._fill_sum(slot, 0.0)

    def contribute_zero(self, slot: int) -> None:
        """Set a parameter's gradient to zero, where only this rank knows that it exists: its contribution is +0.0."""
        self.clear_slot(slot)
        self._open(travels=False)
        self._view(slot).zero_()
        self._unwritten.discard(slot)

    def _fill_sum(self, slot: int, value: float) -> None:
        total = self.running_sum()
        if total is None:
            return
        if self.shows_means:
            self.mean_view(slot).fill_(value)
        for piece in self.pieces:
            if piece.slot == slot:
                total[piece.begin - self.low : piece.end - self.low].fill_(value)

    @property
    def shows_means(self) -> bool:
        """True while the whole means lie here, and this rank's own slice of them beside its sum."""
        return self._stage.grads_replicated and self._whole is not None and self.has_sum and self._local is None

    def edited(self, divisor: float) -> Tensor:
        """Whether this rank's own slice was edited since it was gathered: 0-dim, where the gradients are."""
        assert self._whole is not None
        own, total = self._whole[self.low : self.high], self._sum()
        if not own.numel():
            return torch.zeros((), dtype=torch.bool, device=own.device)
        return first_unequal(own, total / divisor if divisor != 1 else total) >= 0

    def edits(self, divisor: float, used: Sequence[bool]) -> list[int]:
        """Slots whose whole mean was edited since it was gathered, as far as this rank's own slice shows it. One that
        was set to zero counts as zeroed; its sum follows. ``used``: of each parameter in the layout."""
        assert self._whole is not None
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
        return self._shards.empty(numel, dtype, torch.device(self.bucket.device))

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._shards.scratch(numel, dtype, torch.device(self.bucket.device))
