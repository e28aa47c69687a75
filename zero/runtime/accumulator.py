"""The gradients of one bucket on one rank: its next contribution, and the running sum of the shard that it owns.

Knows: the bucket's geometry, the buffers that the stage keeps, and the difference between a zero gradient and none.
Does not know: when a backward begins or ends, other buckets, optimizers.

    stage      local (this rank's contribution)   sum (owner's shard, undivided)     final (read by the update)
    0          whole, kept                        kept in a buffer of its own        whole: means of all shards
    1          whole, kept                        the owned shard of the whole       sum / divisor
    2, 3       whole, scratch during reduction    kept                               sum / divisor

If ``reduce_dtype`` is narrower than ``accumulate_dtype``, the whole means and the sum each have a buffer of their own.
Gradients added up under `no_sync` are then in ``accumulate_dtype``, too, and are rounded once, before the reduction.

A missing gradient contributes -0.0, the identity of IEEE addition: +0.0 would turn -0.0 into 0.0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport, Work
from collectives.pool import worth_keeping
from collectives.torch_internals import foreach_add_, foreach_copy_

from ..core.bits import differ, row_major_stride, same_bits
from ..core.layout import BucketSpec, ParameterSpec
from ..core.stage import Placement, Stage
from .flat_buffer import FlatBuffer, redistribute
from .offload import OffloadBackend
from .profiler_ranges import ProfilerRange, Waited, WaitedInStages
from .streams import Streams


class GradAccumulator:
    """The gradients of one bucket on one rank. Buffers are allocated with the first gradient."""

    def __init__(
        self,
        bucket: BucketSpec,
        specs: Sequence[ParameterSpec],
        stage: Stage,
        shard_group: Transport,
        streams: Streams,
        home: OffloadBackend | None = None,
    ) -> None:
        """Create an accumulator without gradients. ``specs``: of each slot's parameter; ``shard_group``: the ranks that
        own the bucket's shards, and their pool of memory; ``streams``: on which gradients come and are copied;
        ``home``: the host's memory, in which the sum lies between reductions; None: it stays on the device."""
        self.bucket, self._streams, self._home = bucket, streams, home
        self._at_home: FlatBuffer | None = None  # the memory there, of a frozen parameter when there is a sum
        self._specs, self._stage, self._shard_group = specs, stage, shard_group
        self.low, self.high = bucket.owned(shard_group.rank)
        self.pieces = bucket.pieces(self.low, self.high)
        self.label = f"bucket {bucket.index} ({' ... '.join(dict.fromkeys([specs[0].name, specs[-1].name]))})"
        number, rank = bucket.index, shard_group.rank_label
        self._launching = ProfilerRange(f"reduce_scatter bucket {number}", rank)
        self._passing = ProfilerRange(f"pass_on_reduce_scatter bucket {number}", rank)
        self._waiting = ProfilerRange(f"wait_for_reduce_scatter bucket {number}", rank)
        self._gathering = ProfilerRange(f"all_gather_gradients bucket {number}", rank)
        self._waiting_for_means = ProfilerRange(f"wait_for_all_gather_gradients bucket {number}", rank)
        self._in_place = stage.contributes_in_place(bucket.dtypes)
        self._keeps_memory = worth_keeping(torch.device(bucket.device))
        sum_is_mean = shard_group.world_size == 1 and not self._keeps_memory  # until a divisor is not 1
        self._sum_apart = self._sum_begins_apart = stage.sum_lies_apart(bucket.dtypes, is_mean=sum_is_mean)
        self._whole: FlatBuffer | None = None  # contributions, means, or first these and then those
        self._views: list[Tensor] = []  # of the whole, by slot
        self._kept_sum: FlatBuffer | None = None
        self._local: FlatBuffer | None = None  # the contribution, perhaps in the memory of the whole
        self._saved_sum: FlatBuffer | None = None  # a copy of the running sum, while a contribution uses its memory
        self._unwritten: set[int] = set()  # slots of the contribution without a gradient
        self._prefilled = False  # the unwritten slots are -0.0 already
        self.has_sum = False
        self.arrived: dict[int, Tensor] = {}  # slot -> stashed gradient, not copied yet
        self._versions: dict[int, int] = {}  # slot -> version of the gradient when it was stashed
        self._empty_row, self._row_places = self._nothing()
        self._contiguous = all(spec.stride == row_major_stride(spec.shape) for spec in specs)
        self.touched = False  # a backward ran with this bucket active, and its contribution has not been reduced
        self.missing = 0  # gradients that the backward under way has not brought yet
        if home is not None and specs[0].trainable:
            self._sum_at(home)

    def _nothing(self) -> tuple[list[Tensor], list[int]]:
        """Return tensors which, concatenated, form an empty contribution, and each slot's index among them.

        Slots are -0.0, expanded from one element. Padding is +0.0; it is contiguous, and left out if empty, since
        `torch.cat` is slower otherwise.
        """
        slots = self.bucket.slots
        nothing = torch.full((1,), -0.0, dtype=self.bucket.dtypes.reduce_dtype, device=self.bucket.device)
        row, places = list[Tensor](), list[int]()
        for slot, end in zip(slots, [*(after.offset for after in slots[1:]), self.bucket.numel], strict=True):
            places.append(len(row))
            row.append(nothing.expand(slot.numel))
            if end > slot.end:
                row.append(nothing.new_zeros(end - slot.end))
        return row, places

    # -- the contribution of this rank --------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """True if this rank has a contribution that was not reduced yet."""
        return self._local is not None or bool(self.arrived)

    def begin_backward(self, missing: int) -> None:
        """Note that a backward begins that brings so many gradients."""
        self.touched, self.missing = True, missing

    def add(self, slot: int, gradient: Tensor) -> None:
        """Hold the gradient of a slot, as autograd returned it, until the next `flush`."""
        if slot in self.arrived:  # pragma: no cover - autograd has never done that; if it did, a sum would be wrong
            raise RuntimeError(f"{self._specs[slot].name!r} received two gradients in one backward")
        self.arrived[slot] = gradient
        self._versions[slot] = gradient._version

    def flush(self, *, final: bool) -> None:
        """Add the stashed gradients to this rank's contribution. A slot's first gradient is assigned, as by autograd.

        ``final``: the contribution is reduced next, so that no gradient will be added to it any more. Raises
        `RuntimeError` if a gradient was edited in place after it was stashed.
        """
        arrived = self.arrived
        if not arrived:
            return
        edited = [slot for slot, gradient in arrived.items() if gradient._version != self._versions[slot]]
        if edited:
            name = self._specs[edited[0]].name
            raise RuntimeError(
                f"the gradient of {name!r} was modified in place after autograd had handed it over: a hook must "
                "return a new tensor instead"
            )
        row = self._cat_list(arrived) if self._local is None and (final or not self.bucket.dtypes.widens) else None
        self._open(final=final)
        assert self._local is not None
        if row is not None:
            torch.cat(row, out=self._local.data)
            self._prefilled = True
        else:
            first = {slot: gradient for slot, gradient in arrived.items() if slot in self._unwritten}
            later = {slot: gradient for slot, gradient in arrived.items() if slot not in self._unwritten}
            if first:
                foreach_copy_([self._view(slot) for slot in first], list(first.values()))
            if later:
                dtype = self._local.data.dtype  # a gradient of a wider dtype is rounded before it is added
                narrowed = [g.to(dtype) if g.itemsize > dtype.itemsize else g for g in later.values()]
                foreach_add_([self._view(slot) for slot in later], narrowed)
        self._unwritten.difference_update(arrived)
        self._streams.keep_memory(arrived.values())
        self.arrived = {}

    def _cat_list(self, arrived: Mapping[int, Tensor]) -> list[Tensor] | None:
        """Return tensors which, concatenated, form the whole contribution, with -0.0 for missing gradients.

        They are copied in one call, without a view of each slot. None if a gradient or a parameter is not contiguous,
        or if a gradient has another dtype than ``reduce_dtype``.
        """
        row = self._empty_row.copy()
        for slot, gradient in arrived.items():
            if not gradient.is_contiguous() or gradient.dtype is not self.bucket.dtypes.reduce_dtype:
                return None
            row[self._row_places[slot]] = gradient if gradient.dim() == 1 else gradient.view(-1)
        return row if self._contiguous else None

    def _open(self, *, final: bool) -> None:
        if self._local is not None:
            return
        sent_next, wide = final or not self.bucket.dtypes.widens, self.bucket.dtypes.accumulate_dtype
        self._local = self._reduce_buffer() if sent_next else self._scratch(Placement.PARTIAL, wide)
        self._unwritten, self._prefilled = set(range(len(self.bucket.slots))), False

    def _reduce_buffer(self) -> FlatBuffer:
        """Return a buffer of ``reduce_dtype`` from which the contribution is reduced."""
        bucket = self.bucket
        if self._in_place:
            if self._whole is None:
                self._whole = self._empty(Placement.WHOLE, bucket.dtypes.reduce_dtype)
            if self.has_sum and not self._sum_apart:
                self._saved_sum = self._scratch(Placement.SHARD, bucket.dtypes.accumulate_dtype)
                self._saved_sum.data.copy_(self._whole.interval(self.low, self.high))
            return FlatBuffer(self._whole.data, Placement.PARTIAL)
        if self._shard_group.world_size == 1 and not self.has_sum and not bucket.dtypes.widens:
            # the first contribution of a single rank is the sum: nothing is copied
            return FlatBuffer(self._sum().data, Placement.PARTIAL)
        return self._scratch(Placement.PARTIAL, bucket.dtypes.reduce_dtype)

    def _view(self, slot: int) -> Tensor:
        """Return the slot of this rank's contribution, in the parameter's shape."""
        assert self._local is not None
        in_place = self._whole is not None and self._local.data is self._whole.data
        return self.mean_view(slot) if in_place else self._slot_of(self._local, slot)

    def mean_view(self, slot: int) -> Tensor:
        """Return the slot of the whole buffer, in the parameter's shape: its mean gradient, once means are there."""
        return self.mean_views()[slot]

    def mean_views(self) -> list[Tensor]:
        """Return `mean_view` of each slot."""
        if not self._views:
            assert self._whole is not None
            self._views = [self._slot_of(self._whole, slot) for slot in range(len(self.bucket.slots))]
        return self._views

    def _slot_of(self, buffer: FlatBuffer, number: int) -> Tensor:
        return buffer.slot(self.bucket.slots[number], self._specs[number])

    # -- reduction ------------------------------------------------------------------------------------------------

    def launch(self, collective: Collective, label: str, round_: int, trainable: bytes | bytearray) -> Work:
        """Launch the reduce-scatter of this rank's contribution. All owners of the bucket must call it.

        ``trainable``: whether each slot's parameter is trainable; must be equal on all ranks. ``label`` and ``round_``
        are part of the tag, which errors quote.
        """
        with self._launching():
            tag = Tag(Kind.REDUCE_SCATTER, label, round_, self.bucket.index, zlib.crc32(trainable))
            return self._launch(collective, tag)

    def _launch(self, collective: Collective, tag: Tag) -> Work:
        self.flush(final=True)
        self._open(final=True)
        assert self._local is not None
        if not self._prefilled:
            for slot in self._unwritten:
                self._view(slot).fill_(-0.0)
        if self._local.data.dtype is not self.bucket.dtypes.reduce_dtype:
            narrow = self._reduce_buffer()
            narrow.data.copy_(self._local.data)
            self._local = narrow
        before = self.running_sum()
        start = None if before is None else before.data.to(self.bucket.device, non_blocking=True)
        if self._home is not None and before is not None:  # else it may be the contribution of a single rank
            self._kept_sum = None
        work = redistribute(self._local, self._sum(), self.bucket.cuts, collective, tag, start=start)
        return WaitedInStages(work, self._passing, self._passed_on, self._waiting, self._reduced)

    def _passed_on(self) -> None:
        """Note that the contribution is part of a sum: its memory, and that of the running sum, is free."""
        self._local = self._saved_sum = None

    def _reduced(self) -> None:
        """Note that the reduction of the contribution is complete."""
        if self._home is not None:  # `wait_for_host` follows, when the backward is over
            total, kept = self._sum(), self._sum_at(self._home)
            self._streams.keep_memory([total.data])
            kept.data.copy_(total.data, non_blocking=True)
            self._kept_sum = kept
        self.has_sum = True
        self._close()

    def _close(self) -> None:
        self.touched = False
        self._local = self._saved_sum = None
        self._unwritten, self.arrived = set(), {}

    def _sum(self) -> FlatBuffer:
        """Return the buffer of the owned shard's sum, allocated on the first call."""
        if not self._sum_apart:
            assert self._whole is not None
            return self._whole.shard(self.bucket.cuts, self._shard_group.rank)
        if self._kept_sum is None:
            self._kept_sum = self._empty(Placement.SHARD, self.bucket.dtypes.accumulate_dtype)
        return self._kept_sum

    def _sum_at(self, home: OffloadBackend) -> FlatBuffer:
        """Return the host's memory for the owned shard's sum, the same each time."""
        if self._at_home is None:
            memory = home.empty(self.high - self.low, self.bucket.dtypes.accumulate_dtype)
            self._at_home = FlatBuffer(memory, Placement.SHARD, self.low)
        return self._at_home

    # -- sums and means -------------------------------------------------------------------------------------------

    def running_sum(self) -> FlatBuffer | None:
        """Return the undivided sum of the shard that this rank owns; None before the first reduction."""
        if not self.has_sum:
            return None
        return self._saved_sum if self._saved_sum is not None else self._sum()

    def final_grad(self) -> FlatBuffer | None:
        """Return the gradients of the interval that this rank updates; None before the first reduction."""
        if not self.has_sum:
            return None
        return self._whole if self._stage.grads_replicated else self._sum()

    def gather_means(self, collective: Collective, round_: int, divisor: float) -> Work:
        """Launch the all-gather of the means: sum / ``divisor``. All owners of the bucket must call it."""
        with self._gathering():
            if self._whole is None:
                self._whole = self._empty(Placement.WHOLE, self.bucket.dtypes.accumulate_dtype)
            own = self._whole.shard(self.bucket.cuts, self._shard_group.rank)
            if not self._sum_apart and divisor != 1:
                self._kept_sum, self._sum_apart = FlatBuffer(own.data.clone(), Placement.SHARD, own.begin), True
            total = self._sum().data
            if divisor != 1:
                torch.div(total, divisor, out=own.data)
            elif self._sum_apart:
                own.data.copy_(total)
            tag = Tag(Kind.ALL_GATHER, f"means of {self.label}", round_, self.bucket.index)
            work = redistribute(own, self._whole, self.bucket.cuts, collective, tag)
            return Waited(work, self._waiting_for_means)

    def open_means(self) -> FlatBuffer:
        """Return `final_grad`; if there was no reduction, all of it is -0.0, which is no gradient."""
        if not self.has_sum:
            if self._whole is None and (self._stage.grads_replicated or not self._sum_apart):
                self._whole = self._empty(Placement.WHOLE, self.bucket.dtypes.accumulate_dtype)
            if self._home is not None:
                self._kept_sum = self._sum_at(self._home)
            self.has_sum = True
            for kept in (self._sum().data, *self.tensors()):
                kept.fill_(-0.0)
        final = self.final_grad()
        assert final is not None
        return final

    # -- clearing -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Reset to "no gradient", which is not the same as a zero gradient."""
        self.has_sum = False
        self._close()
        if not self._keeps_memory or self._home is not None:
            self._streams.keep_memory(self.tensors())
            self._whole, self._kept_sum, self._views = None, None, []
            self._sum_apart = self._sum_begins_apart

    def clear_slot(self, slot: int) -> None:
        """Reset one parameter to "no gradient": -0.0 in the contribution and in the sum."""
        self.arrived.pop(slot, None)
        if self._local is not None and slot not in self._unwritten:
            self._view(slot).fill_(-0.0)
            self._unwritten.add(slot)
        self._fill_sum(slot, -0.0)

    def zero_slot(self, slot: int) -> None:
        """Set a parameter's gradient to +0.0, if all ranks know that it exists. Zero is not the same as no gradient."""
        self.clear_slot(slot)
        self._fill_sum(slot, 0.0)

    def contribute_zero(self, slot: int) -> None:
        """Set a parameter's gradient to zero, if only this rank knows that it exists: its contribution is +0.0."""
        self.clear_slot(slot)
        self._open(final=False)
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
                total.piece(piece).fill_(value)

    @property
    def shows_means(self) -> bool:
        """True while this rank holds the means of the whole bucket, and also the sum of the shard that it owns."""
        return self._stage.grads_replicated and self._whole is not None and self.has_sum and self._local is None

    def edited(self, divisor: float) -> Tensor:
        """Return whether the means of the owned shard were edited since `gather_means`: 0-dim, bool, on the bucket's
        device, without a host synchronisation."""
        assert self._whole is not None
        own, total = self._whole.interval(self.low, self.high), self._sum().data
        return differ(own, total / divisor if divisor != 1 else total)

    def edits(self, divisor: float, used: bytearray) -> list[int]:
        """Return the slots whose mean was edited since `gather_means`, as far as the owned shard shows it.

        A mean that was set to zero is no edit: its sum is set to the same zeros, of either sign.
        ``used``: whether each slot's parameter was used.
        """
        assert self._whole is not None
        total = self._sum()
        expected = FlatBuffer(total.data / divisor, Placement.SHARD, total.begin) if divisor != 1 else total
        found = []
        for piece in self.pieces:
            mean = self._whole.piece(piece)
            if not used[piece.slot] or same_bits(mean, expected.piece(piece)):
                continue
            if torch.count_nonzero(mean):
                found.append(piece.slot)
            else:
                total.piece(piece).copy_(mean)
        return found

    # -- memory ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Return the buffers that are kept between steps."""
        return [buffer.data for buffer in (self._whole, self._kept_sum, self._at_home) if buffer is not None]

    def _empty(self, placement: Placement, dtype: torch.dtype) -> FlatBuffer:
        return self._made(self._shard_group.empty, placement, dtype)

    def _scratch(self, placement: Placement, dtype: torch.dtype) -> FlatBuffer:
        return self._made(self._shard_group.scratch, placement, dtype)

    def _made(self, allocate: Callable[..., Tensor], placement: Placement, dtype: torch.dtype) -> FlatBuffer:
        begin, end = (self.low, self.high) if placement is Placement.SHARD else (0, self.bucket.numel)
        return FlatBuffer(allocate(end - begin, dtype, torch.device(self.bucket.device)), placement, begin)
