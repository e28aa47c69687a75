"""Units whose memory never leaves: that of one rank alone, or memory that all ranks which share a copy have in common.

Knows: where the whole of a bucket is, who may write there, which pages this rank has written. Does not know: modules,
autograd, or when a unit is needed: its caller installs and uninstalls.

A parameter is a view of the unsharded memory from `add_buffer` to `remove_buffer`. To release it is to change its class
alone. In common memory every rank writes its shards for all. What it writes elsewhere stays private to it, by pages:

    agreement   look at the written pages: a private page hides what the others write from now on
    meeting     every rank has looked, and released its units
    step        every rank counts the changes, which makes graphs of before raise, then writes its shards
    announce    and returns when every rank has written
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import Kind, Region, Tag, Transport, Work

from ..core.bits import same_bits
from ..core.layout import Piece
from ..core.parameter_specs import as_plain
from ..runtime.flat_buffer import Move, usable_later
from .edit_detector import EditDetector, UnitBuffer


@dataclass(eq=False)
class ResidentBuffer(UnitBuffer):
    """A bucket, or the part of one that belongs to a unit, of which this rank always sees the whole."""

    common: SharedBucketMemory | None = None  # None: one rank, whose shard is the whole
    begin: int = 0  # in the common memory, in elements
    in_use: bool = False  # its parameters are installed

    def __post_init__(self) -> None:
        super().__post_init__()
        self.put_unsharded()

    def put_unsharded(self) -> None:
        """Make the parameters, which must have their own classes, views of the whole. This counts as no edit."""
        self.unsharded = self.shard if self.common is None else self.common.whole(*self.span(0, self.bucket.numel))
        self.address = self.unsharded.data_ptr()
        self.set_data(self.views(self.unsharded))

    def apply(self, move: Move) -> None:
        super().apply(move)
        self.unsharded = move(self.unsharded)

    @property
    def moved(self) -> bool:
        """True if the whole has another address than at `put_unsharded`: `share_memory_` moves a storage, with all that
        lies there."""
        return self.unsharded.data_ptr() != self.address

    def _differing(self, now: list[tuple[int, int, torch.dtype]]) -> list[int]:
        if self.moved and self.common is None:  # the shard was moved, too: the parameters are still views of it
            self.put_unsharded()
            return []
        return super()._differing(now)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """The place of these elements of the bucket in the common memory."""
        return self.begin + begin, self.begin + end


class SharedBucketMemory:
    """A bucket in memory that all ranks share, and its buffers."""

    def __init__(self, region: Region, dtype: torch.dtype) -> None:
        self._region, self._dtype = region, dtype
        self.buffers: list[ResidentBuffer] = []

    def whole(self, begin: int, end: int) -> Tensor:
        """Return these elements as all ranks wrote them, 1-D."""
        return self._region.whole(begin * self._dtype.itemsize, end * self._dtype.itemsize).view(self._dtype)

    def own(self, begin: int, end: int) -> Tensor:
        """Return these elements of the memory in which this rank writes for all, 1-D."""
        return self._region.own(begin * self._dtype.itemsize, end * self._dtype.itemsize).view(self._dtype)

    def edited(self) -> Iterator[tuple[ResidentBuffer, int]]:
        """Yield the slots whose private pages differ from the common values. Private pages are discarded, but none with
        a buffer in use."""
        for begin, end in self._written():
            there = self._on(begin, end)
            if not any(buffer.in_use for buffer in there):
                for buffer in there:
                    yield from ((buffer, piece.slot) for piece in self._differing(buffer, begin, end))
                self._forget(begin, end)

    def restore(self, buffer: ResidentBuffer) -> None:
        """Undo this rank's writes into a buffer, and none beside it."""
        for begin, end in self._written():
            there = self._on(begin, end)
            if there == [buffer]:
                self._forget(begin, end)
            elif buffer in there:
                for piece in self._differing(buffer, begin, end):
                    span = buffer.span(piece.begin, piece.end)
                    self.whole(*span).copy_(self.own(*span))

    def _on(self, begin: int, end: int) -> list[ResidentBuffer]:
        """The buffers that contain some of these elements."""
        return [buffer for buffer in self.buffers if buffer.begin < end and begin < buffer.begin + buffer.bucket.numel]

    def _written(self) -> list[tuple[int, int]]:
        """Return the intervals of the whole, in elements, whose pages this rank has written."""
        size = self._dtype.itemsize
        return [(low // size, high // size) for low, high in self._region.written()]

    def _forget(self, begin: int, end: int) -> None:
        self._region.refresh(begin * self._dtype.itemsize, end * self._dtype.itemsize)

    def _differing(self, buffer: ResidentBuffer, begin: int, end: int) -> Iterator[Piece]:
        low, high = max(begin - buffer.begin, 0), min(end - buffer.begin, buffer.bucket.numel)
        for piece in buffer.bucket.pieces(low, high):
            span = buffer.span(piece.begin, piece.end)
            if not same_bits(self.whole(*span), self.own(*span)):
                yield piece


class ResidentUnits:
    """The policy of units that are resident."""

    def __init__(self, shard_group: Transport, edits: EditDetector) -> None:
        self._shard_group, self._edits = shard_group, edits
        self._common: list[SharedBucketMemory] = []
        self._writing: Work | None = None  # done when every rank has written its shards

    def add_buffer(self, buffer: ResidentBuffer) -> None:
        """Register a buffer."""
        if buffer.common is not None:
            buffer.common.buffers.append(buffer)
            if buffer.common not in self._common:
                self._common.append(buffer.common)

    def remove_buffer(self, buffer: ResidentBuffer) -> None:
        """Unregister a buffer, whose parameters have other memory now."""
        if buffer.common is not None:
            buffer.common.buffers.remove(buffer)
            self._common = [common for common in self._common if common.buffers]

    def in_common(self) -> frozenset[int]:
        """Return the addresses of the buffers that lie in common memory."""
        return frozenset(buffer.address for common in self._common for buffer in common.buffers)

    # -- install and uninstall ------------------------------------------------------------------------------------

    def install(self, buffers: Iterable[ResidentBuffer]) -> None:
        """Give the parameters of a unit, which are released, their own classes. Edits of them are noted and undone;
        with one rank they are kept."""
        if self._writing is not None:  # an interrupt has ended `announce`
            self.wait_for_writes()
        for buffer in buffers:
            with as_plain():
                edited = buffer.edited()
                for slot in edited:
                    if not self._keeps_edit(buffer, slot):
                        self._edits.note_released(buffer, slot)
            buffer.in_use = True
            buffer.set_classes(buffer.bases)
            if edited:
                self._undo_edits(buffer)

    def uninstall(self, buffers: Iterable[ResidentBuffer]) -> None:
        """Release the parameters of a unit, which is installed. Edits are noted; with one rank they are kept."""
        for buffer in buffers:
            edited = buffer.edited()
            for slot in edited:
                if not self._keeps_edit(buffer, slot):
                    self._edits.note_slot(buffer, slot)
            if edited:
                self._put_back(buffer)
            buffer.in_use = False
            buffer.set_classes(buffer.released)

    def undo_edits(self, buffers: Iterable[ResidentBuffer]) -> None:
        """Undo the edits of a unit that is installed, and note none; with one rank they are kept."""
        for buffer in buffers:
            self._undo_edits(buffer)

    def _keeps_edit(self, buffer: ResidentBuffer, slot: int) -> bool:
        """Return True if no other rank could miss an edit, and the parameter is a view of the whole."""
        return buffer.common is None and buffer.owns(slot)

    def _undo_edits(self, buffer: ResidentBuffer) -> None:
        self._put_back(buffer)
        if buffer.common is not None:
            buffer.common.restore(buffer)

    def _put_back(self, buffer: ResidentBuffer) -> None:
        """Make the parameters views of the whole again if the memory of one was replaced. Note their data."""
        if buffer.moved and buffer.common is not None:
            self._edits.note_lasting(
                f"the memory of {buffer.name(0)!r} was moved (by share_memory_() or a queue between processes), and "
                "what was moved does not follow the parameter: send a copy"
            )
        if buffer.displaced():
            with usable_later():
                buffer.put_unsharded()
        buffer.note()

    # -- edits and changes ----------------------------------------------------------------------------------------

    def find_edits(self) -> None:
        """Note the edits in the pages that this rank has written, and discard these pages."""
        if self._writing is not None:
            self.wait_for_writes()
        for common in self._common:
            for buffer, slot in common.edited():
                self._edits.note_slot(buffer, slot)

    def commit(self, buffer: ResidentBuffer, slots: Sequence[int]) -> None:
        """Copy the values of these slots, which are equal on all ranks, into this rank's shard."""
        if buffer.common is not None:
            buffer.commit(slots, buffer.unsharded, self._shard_group.rank)

    def announce(self) -> None:
        """Announce that this rank has written its shards, and wait until every rank has. Collective."""
        if self._common:
            self.wait_for_writes()
            self._writing = self._shard_group.announce(Tag(Kind.ALL_GATHER, "shards of units in common memory"))
            self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Wait until every rank has written its shards."""
        if self._writing is not None:
            self._writing.wait()
            self._writing = None
