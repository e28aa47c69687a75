"""Detection of edits of gathered parameters. The other ranks do not have such an edit, so it is an error, never lost.

Knows: how to find an edit that no version counter shows. In memory that all ranks share, the written pages show it;
elsewhere, a comparison of the gathered slice with this rank's shard. Does not know: when units are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bits import first_unequal, host_readable, read_scalars, same_bits
from .unit_buffer import SharedBucketMemory, UnitBuffer


class EditDetector:
    """Collects the edits of one rank until `take` returns the first of them."""

    def __init__(self, rank: int) -> None:
        self.common: list[SharedBucketMemory] = []
        self._rank = rank
        self._found: str | None = None  # the first edit, as an error's text
        self.is_checked = True  # shared memory was checked since a unit was last installed
        self._pending_checks: dict[UnitBuffer, Tensor] = {}  # index of an edited element of the slice; -1: none

    def add(self, buffer: UnitBuffer) -> None:
        """Register a buffer."""
        if buffer.common is not None:
            buffer.common.buffers.append(buffer)
            if buffer.common not in self.common:
                self.common.append(buffer.common)

    def remove(self, buffer: UnitBuffer) -> None:
        """Unregister a buffer."""
        if buffer.common is not None:
            buffer.common.buffers.remove(buffer)
            self.common = [common for common in self.common if common.buffers]

    def take(self) -> str | None:
        """Return the first edit since the last call, as an error's text, or None. Waits for devices."""
        pending, self._pending_checks = self._pending_checks, {}
        found = read_scalars(list(pending.values()))  # host synchronisation: one between two agreements, for all units
        for buffer, element in zip(pending, found, strict=True):
            if element >= 0:
                low, _ = buffer.bucket.owned(self._rank)
                self.note_slot(buffer, buffer.slot_at(low + element))
        problem, self._found = self._found, None
        return problem

    def note_slot(self, buffer: UnitBuffer, slot: int) -> None:
        """Record that the parameter of a slot was edited or cast while it was installed."""
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
        """Record an edit. Only the first one is kept."""
        self._found = self._found or f"{problem}: edit it inside gathered(write=True)"

    # -- shared memory --------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Check all shared memory."""
        in_use = [common for common in self.common if not self._find_in(common)]
        self.is_checked = not in_use

    def find_in(self, common: SharedBucketMemory) -> None:
        """Check the shared memory of one bucket."""
        self.is_checked = self._find_in(common) and self.is_checked

    def _find_in(self, common: SharedBucketMemory) -> bool:
        """Check a bucket; return False if a part of it is in use and must be checked again later."""
        found, everywhere = common.edited()
        for buffer, slot in found:
            self.note_slot(buffer, slot)
        return everywhere

    # -- memory of one rank ---------------------------------------------------------------------------------------

    def compare(self, buffer: UnitBuffer) -> None:
        """Compare the gathered copy of this rank's slice with its shard, which no edit has reached."""
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
        """Launch the comparison on a device, where the host would have to wait for the result; `take` reads it."""
        if buffer.whole is not None and high > low:
            check = first_unequal(buffer.whole[low:high], buffer.shard)
            before = self._pending_checks.get(buffer)
            self._pending_checks[buffer] = check if before is None else torch.maximum(before, check)
