"""Whether one optimizer is inside `join` on this rank, and the order of units used outside of its training.

Knows: how a call is broadcast inside `join`, numbers of units. Does not know: the protocol of `join`, modules, ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .profiler_ranges import NOTHING

Broadcast = Callable[[str, dict[str, Any]], AbstractContextManager[None]]


class Joining:
    """Whether an optimizer is inside `join`."""

    def __init__(self) -> None:
        self._broadcast: Broadcast | None = None  # inside `join`
        self._gathers_are_broadcast = False

    @property
    def active(self) -> bool:
        """True inside `join`."""
        return self._broadcast is not None

    @property
    def gathers_are_broadcast(self) -> bool:
        """True inside `join` if ranks without batches take part in each gather of a unit. A backward's round is entered
        when the backward ends then: all gathers come before it."""
        return self._gathers_are_broadcast

    def begin(self, broadcast: Broadcast, *, gathers_are_broadcast: bool) -> None:
        """Note that `join` begins. ``broadcast``: returns the context around a call, from its name and arguments."""
        self._broadcast, self._gathers_are_broadcast = broadcast, gathers_are_broadcast

    def end(self) -> None:
        """Note that `join` is over."""
        self._broadcast, self._gathers_are_broadcast = None, False

    def broadcast(self, name: str, **arguments: Any) -> AbstractContextManager[None]:
        """Return the context around a call that all ranks make. Inside `join` ranks without batches make it, too."""
        return NOTHING if self._broadcast is None else self._broadcast(name, arguments)


SAME_UNITS = (
    "let every rank run the same forwards, as generate(..., synced_gpus=True) of transformers does, or let all ranks "
    "enter 'with optimizer.gathered():', in which each may run its own; at stage 2 ranks may train different parts of "
    "the model"
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
