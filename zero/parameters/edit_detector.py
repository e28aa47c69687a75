"""Detection of edits of a unit's parameters. The other ranks do not have such an edit, so it is an error, never lost.

Knows: an error's text, and how to find an edit of gathered memory that no version counter shows. Does not know: when
units are gathered, or how edits of memory that all ranks share are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bits import first_unequal, host_readable, read_scalars, same_bits
from .unit_buffer import UnitBuffer


class EditDetector:
    """Collects the edits of one rank until `take` returns the first of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: str | None = None  # the first edit, as an error's text
        self.lasting: str | None = None  # an error that cannot be undone; reported at every agreement
        self._pending_checks: dict[UnitBuffer, Tensor] = {}  # index of an edited element of the shard; -1: none

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
        if now is not buffer.bucket.dtypes.param_dtype:
            self._found = self._found or (
                f"{buffer.name(slot)!r} was cast to {now} while its unit was gathered, which was undone: cast the "
                "model before the optimizer is built"
            )
            return
        self.note(
            f"{buffer.name(slot)!r} was edited while its unit was gathered (as an Embedding with max_norm does in its "
            "forward), which the other ranks cannot see"
        )

    def note_released(self, buffer: UnitBuffer, slot: int) -> None:
        """Record that the parameter of a slot was edited, or swapped for another tensor, while it was released."""
        if type(buffer.parameters[slot]) is not buffer.released[slot]:
            self.note_lasting(f"{buffer.name(slot)!r} was swapped for another tensor")
        else:
            self.note(f"{buffer.name(slot)!r} was edited while it was released")

    def note_lasting(self, problem: str) -> None:
        """Record what cannot be undone."""
        self.lasting = f"{problem}: build a new model and optimizer"

    def note(self, problem: str) -> None:
        """Record an edit. Only the first one is kept."""
        self._found = self._found or f"{problem}: edit it inside gathered(write=True)"

    def compare(self, buffer: UnitBuffer, whole: Tensor) -> None:
        """Compare this rank's part of an unsharded buffer with its shard, which no edit has reached."""
        low, high = buffer.bucket.owned(self._rank)
        if not host_readable(buffer.shard.device):
            self._doubt(buffer, whole[low:high])
            return
        if same_bits(whole[low:high], buffer.shard):
            return
        for piece in buffer.bucket.pieces(low, high):
            kept = buffer.shard[piece.begin - low : piece.end - low]
            if not same_bits(whole[piece.begin : piece.end], kept):
                self.note_slot(buffer, piece.slot)

    def _doubt(self, buffer: UnitBuffer, copy: Tensor) -> None:
        """Launch the comparison on a device, where the host would have to wait for the result; `take` reads it."""
        if copy.numel():
            check = first_unequal(copy, buffer.shard)
            before = self._pending_checks.get(buffer)
            self._pending_checks[buffer] = check if before is None else torch.maximum(before, check)
