"""Edits of units that were gathered: a rank cannot keep what the others do not see, and must not lose it in silence.

Knows: how an edit is found that left no trace in a version: in common memory by the pages that this rank has written,
elsewhere by what became of its own slice. Does not know: when units come and go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bits import first_unequal, host_readable, read_scalars, same_bits
from .unit_buffer import SharedBucketMemory, UnitBuffer


class EditDetector:
    """What was edited on one rank since it was last told."""

    def __init__(self, rank: int) -> None:
        self.common: list[SharedBucketMemory] = []
        self._rank = rank
        self._found: str | None = None  # the first that would be lost
        self.is_checked = True  # at common memory, since a unit was shown
        self._doubts: dict[UnitBuffer, Tensor] = {}  # which element of a slice is not what it was; -1: all are

    def add(self, buffer: UnitBuffer) -> None:
        """Take up a shelf."""
        if buffer.common is not None:
            buffer.common.buffers.append(buffer)
            if buffer.common not in self.common:
                self.common.append(buffer.common)

    def remove(self, buffer: UnitBuffer) -> None:
        """Forget a shelf."""
        if buffer.common is not None:
            buffer.common.buffers.remove(buffer)
            self.common = [common for common in self.common if common.buffers]

    def take(self) -> str | None:
        """What would be lost, once; None where all is well."""
        doubts, self._doubts = self._doubts, {}
        found = read_scalars(list(doubts.values()))  # host synchronisation: one between two agreements, for all units
        for buffer, element in zip(doubts, found, strict=True):
            if element >= 0:
                low, _ = buffer.bucket.owned(self._rank)
                self.note_slot(buffer, buffer.slot_at(low + element))
        problem, self._found = self._found, None
        return problem

    def note_slot(self, buffer: UnitBuffer, slot: int) -> None:
        """A parameter was edited while it was shown."""
        now = buffer.parameters[slot].dtype
        if now is not buffer.nans[slot].dtype:
            self._found = self._found or (
                f"{buffer.name(slot)!r} was cast to {now} while its unit was gathered, which was undone: cast the "
                "model before the optimizer is built"
            )
            return
        self.note(
            f"{buffer.name(slot)!r} was edited while its unit was gathered (as an Embedding with max_norm does in its "
            "forward), which the other ranks cannot see"
        )

    def note(self, problem: str) -> None:
        """Something was edited; the first is told."""
        self._found = self._found or f"{problem}: edit it inside gathered(write=True)"

    # -- common memory --------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Look at all common memory."""
        in_use = [common for common in self.common if not self._find_in(common)]
        self.is_checked = not in_use

    def find_in(self, common: SharedBucketMemory) -> None:
        """Look at some of it."""
        self.is_checked = self._find_in(common) and self.is_checked

    def _find_in(self, common: SharedBucketMemory) -> bool:
        """False where some of it is in use, and must be looked at again."""
        found, everywhere = common.edited()
        for buffer, slot in found:
            self.note_slot(buffer, slot)
        return everywhere

    # -- elsewhere ------------------------------------------------------------------------------------------------

    def compare(self, buffer: UnitBuffer) -> None:
        """Compare this rank's own slice, which was gathered, with what it was."""
        assert buffer.whole is not None
        low, high = buffer.bucket.owned(self._rank)
        if not host_readable(buffer.shard.device):
            self._doubt(buffer, low, high)
            return
        if same_bits(buffer.whole[low:high], buffer.shard):
            return
        for piece in buffer.bucket.pieces(low, high):
            kept = buffer.shard[piece.begin - low : piece.end - low]
            if not same_bits(buffer.whole[piece.begin : piece.end], kept):
                self.note_slot(buffer, piece.slot)

    def _doubt(self, buffer: UnitBuffer, low: int, high: int) -> None:
        """Compare where the host would have to wait for the device: `take` looks."""
        if buffer.whole is not None and high > low:
            doubt = first_unequal(buffer.whole[low:high], buffer.shard)
            before = self._doubts.get(buffer)
            self._doubts[buffer] = doubt if before is None else torch.maximum(before, doubt)
