"""The order in which a rank has used units outside of its training, where units need no gather.

Where ranks share memory, each may evaluate by itself. Where units travel, that is an error. So that a user learns of it
on one host already, ranks compare the order, as a digest, whenever they agree on something else. Forwards with
gradients are not compared: ranks may have different numbers of batches.

Knows: numbers of units. Does not know: modules, ranks, or who compares.
"""

from __future__ import annotations

from .joining import Joining

SAME_UNITS = (
    "let every rank run the same forwards, as generate(..., synced_gpus=True) of transformers does, or let all ranks "
    "enter 'with optimizer.gathered():', in which each may run its own"
)
_PRIME, _MASK = 16777619, 0xFFFFFFFF  # of FNV-1, with 32 bits: one product for each unit


class UnitOrder:
    """A digest of the units that were used since the last agreement."""

    def __init__(self, joining: Joining) -> None:
        """``joining``: inside `join` ranks may differ, and nothing is noted."""
        self._digest, self._joining = 0, joining

    def note(self, unit: int) -> None:
        """Note that a unit is used."""
        if not self._joining.active:
            self._digest = (self._digest * _PRIME ^ (unit + 1)) & _MASK

    def take(self) -> int:
        """Return the digest, and begin anew."""
        taken, self._digest = self._digest, 0
        return taken
