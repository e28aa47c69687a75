"""Units that are gathered from the ranks that share a copy: the shard, which is always here, and the whole.

Knows: shards, gathered buffers, the tensor in each parameter's ``data``. Does not know: modules, autograd, or when a
unit is needed: its caller unshards, installs, uninstalls and reshards.

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED    installed there alone: parameters are views of the buffers
       ^                                         |          else: each parameter's data is one NaN
       +---------------- reshard ----------------+

A buffer lives as long as its storage is referenced. If something outside of this package references it (a view that a
module cached, an array that shares the memory), the next gather writes into the same buffer, so that the view follows
the parameter as it would in a plain loop. If a step changes the parameter in between, the buffer is filled with NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from collectives import Choice, Collective, Kind, Tag, Transport, Work, all_gather_from
from collectives.pool import Pool, holders

from ...core.cuts import Cuts
from ...core.layout import BucketSpec
from ...core.parameter_specs import as_plain
from ...runtime.joining import Joining
from ...runtime.staging import CopyStream
from ..edit_detector import EditDetector
from ..unit_buffer import usable_later
from .buffers import GatheredBuffer, GatheredUnit, State
from .saved_tensors import SavedTensorIndex


class GatheredUnits:
    """The policy of units that are gathered."""

    def __init__(
        self,
        shard_group: Transport,
        collective: Collective,
        post_forward_group: Choice | None,
        edits: EditDetector,
        joining: Joining,
    ) -> None:
        """``post_forward_group``: the ranks that share the shards kept between a forward and its backward."""
        self._rank, self._edits, self._joining = shard_group.rank, edits, joining
        self._collective, self._post_forward_group = collective, post_forward_group
        self.pool = Pool(exact=True)
        self.saved_tensors = SavedTensorIndex()
        self._externally_held: list[GatheredBuffer] = []
        self._copies: dict[torch.device, CopyStream] = {}  # of shards in the host's memory

    def add_buffer(self, unit: GatheredUnit, buffer: GatheredBuffer) -> None:
        """Add a buffer. Its parameters lose their own memory."""
        unit.buffers.append(buffer)
        buffer.put_nans()

    def remove_buffer(self, unit: GatheredUnit, buffer: GatheredBuffer) -> None:
        """Remove a buffer, whose parameters have other memory now."""
        unit.buffers.remove(buffer)
        buffer.unsharded = None
        buffer.end_gather()
        self.saved_tensors.remove(buffer)

    # -- unshard and reshard --------------------------------------------------------------------------------------

    def unshard(self, unit: GatheredUnit) -> None:
        """Launch the all-gathers of a unit that is sharded. Collective."""
        if unit.state is not State.SHARDED:
            return
        if not self._joining.gathers_are_broadcast:
            self._unshard(unit)
        else:
            with self._joining.broadcast("gather", unit=unit.number):
                self._unshard(unit)
                self.wait(unit)  # a rank that gathers only for others waits until all have read its shards

    def _unshard(self, unit: GatheredUnit) -> None:
        with unit.unsharding():
            with usable_later():
                self._sweep()
                for buffer in unit.buffers:
                    unit.work.append(self._gather(unit, buffer))
                    assert buffer.unsharded is not None
                    self.saved_tensors.remember(unit.number, buffer, buffer.unsharded)
            unit.state = State.GATHERING

    def _gather(self, unit: GatheredUnit, buffer: GatheredBuffer) -> Work:
        if buffer.externally_held is not None:
            self._externally_held.remove(buffer)
            buffer.unsharded, buffer.externally_held = buffer.externally_held, None
        else:
            buffer.unsharded = self._room(buffer, buffer.bucket.numel)
        return self._start(unit, buffer, buffer.unsharded.data)  # with a version counter of its own: this is no edit

    def _room(self, buffer: GatheredBuffer, numel: int) -> Tensor:
        bucket = buffer.bucket
        return self.pool.take(numel, bucket.dtypes.param_dtype, torch.device(bucket.device))

    def _start(self, unit: GatheredUnit, buffer: GatheredBuffer, target: Tensor) -> Work:
        """Launch the all-gather of a bucket into ``target``, in the post-forward group if its shard was kept."""
        bucket, (kept, buffer.post_forward_shard) = buffer.bucket, (buffer.post_forward_shard, None)
        buffer.begin_gather(partial(self._room, buffer))
        if kept is not None and self._post_forward_group is not None:
            with self._copying(buffer):
                buffer.copy_kept()
            cuts, (low, high) = self._kept(self._post_forward_group, bucket)
            target[low:high].copy_(kept)
            return self._post_forward_group.collective.all_gather(target, cuts, tag=_tag(unit, buffer))
        if buffer.kept is not None:  # nothing else writes into its copy, so it can be read until the wait
            with self._copying(buffer):
                buffer.copy_kept()
                return all_gather_from(self._collective, buffer.shard, target, bucket.cuts, tag=_tag(unit, buffer))
        low, high = bucket.owned(self._rank)
        target[low:high].copy_(buffer.shard)
        return self._collective.all_gather(target, bucket.cuts, tag=_tag(unit, buffer))

    @contextmanager
    def _copying(self, buffer: GatheredBuffer) -> Iterator[None]:
        """Launch the work of the block beside the current stream if it copies from the host; `wait` orders its end."""
        if not buffer.bucket.offloaded:
            yield
            return
        device = torch.device(buffer.bucket.device)
        copies = self._copies.setdefault(device, CopyStream(device))
        try:
            with copies.beside():
                yield
        finally:
            buffer.copied = copies.event()

    def _kept(self, group: Choice, bucket: BucketSpec) -> tuple[Cuts, tuple[int, int]]:
        """Return the cuts of a whole bucket in the post-forward group, and the interval that this rank keeps."""
        cuts = bucket.even_cuts(group.shard_group.world_size)
        return cuts, cuts.owned(group.shard_group.rank)

    def wait(self, unit: GatheredUnit) -> None:
        """Wait for the all-gathers under way."""
        if unit.state is State.GATHERING:
            with unit.waiting():
                for buffer in unit.buffers:
                    buffer.await_copy()
                while unit.work:
                    unit.work[0].wait()
                    unit.work.pop(0)
            unit.state = State.UNSHARDED

    def reshard(self, unit: GatheredUnit, after_forward: bool) -> None:
        """Free the buffers of a unit that is unsharded and not installed. ``after_forward``: a backward will need it;
        the shards of the ``post_forward_group`` are kept."""
        unit.state = State.SHARDED
        for buffer in unit.buffers:
            if after_forward and self._post_forward_group and not self._joining.gathers_are_broadcast:
                assert buffer.unsharded is not None
                _, (low, high) = self._kept(self._post_forward_group, buffer.bucket)
                buffer.post_forward_shard = self._room(buffer, high - low).copy_(buffer.unsharded.data[low:high])
            buffer.externally_held, buffer.unsharded = buffer.unsharded, None
            buffer.end_gather()
            self._externally_held.append(buffer)
        self._sweep()

    def free_post_forward_shards(self, unit: GatheredUnit) -> None:
        """Free the shards that were kept for a backward."""
        for buffer in unit.buffers:
            buffer.post_forward_shard = None

    def abandon(self, unit: GatheredUnit) -> None:
        """Abandon the all-gathers under way, after a failure of the ranks' communication."""
        unit.work = []
        if unit.state is State.GATHERING:
            unit.state = State.UNSHARDED

    def _sweep(self) -> None:
        """Reclaim the resharded buffers that have no external references any more."""
        for buffer in list(self._externally_held):
            if buffer.externally_held is not None and holders(buffer.externally_held) == 0:
                self.saved_tensors.forget(buffer)
                buffer.externally_held = None
                self._externally_held.remove(buffer)

    # -- install and uninstall ------------------------------------------------------------------------------------

    def install(self, unit: GatheredUnit) -> None:
        """Give the parameters of a whole unit, which are released, their own classes, and make them views of its
        buffers."""
        with usable_later():
            for buffer in unit.buffers:
                with as_plain():
                    edited = buffer.edited()
                for slot in edited:
                    self._edits.note_released(buffer, slot)
                    buffer.renew_nan(slot)
                buffer.set_classes(buffer.bases)
                buffer.put_unsharded()

    def uninstall(self, unit: GatheredUnit) -> None:
        """Release the parameters of a unit, and put a NaN into each. Edits are noted."""
        for buffer in unit.buffers:
            for slot in buffer.edited():
                self._edits.note_slot(buffer, slot)
            buffer.put_nans()
            buffer.set_classes(buffer.released)
            if buffer.unsharded is not None:
                self._edits.compare(buffer, buffer.unsharded)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, buffer: GatheredBuffer, slots: Sequence[int]) -> None:
        """Note that the values of these slots change: saved tensors and external references are out of date."""
        buffer.post_forward_shard = None
        for slot in slots:
            buffer.versions[slot] += 1
        self._sweep()
        if buffer.unsharded is not None:
            torch.autograd.graph.increment_version(buffer.unsharded)
        if buffer.externally_held is not None:
            buffer.externally_held.fill_(float("nan"))

    def commit(self, buffer: GatheredBuffer, slots: Sequence[int]) -> None:
        """Copy the values of these slots, which are whole and equal on all ranks, into this rank's shard."""
        assert buffer.unsharded is not None
        buffer.commit(slots, buffer.unsharded, self._rank)

    def undo_edits(self, unit: GatheredUnit) -> None:
        """Undo the edits of an installed unit."""
        for buffer in unit.buffers:
            buffer.note()
            if buffer.unsharded is not None:
                low, high = buffer.bucket.owned(self._rank)
                buffer.unsharded.data[low:high].copy_(buffer.shard)


def _tag(unit: GatheredUnit, buffer: GatheredBuffer) -> Tag:
    digest = zlib.crc32(f"{unit.name} {buffer.updated}".encode())  # the label may be cut
    return Tag(Kind.ALL_GATHER, f"gather of unit {unit.name!r}", index=buffer.bucket.index, digest=digest)
