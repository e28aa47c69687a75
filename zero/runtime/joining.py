"""Whether one optimizer is inside `join` on this rank. The parts that act in another way there share one `Joining`.

Knows: how a call is broadcast there. Does not know: the protocol of `join`, or what a call does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
        return nullcontext() if self._broadcast is None else self._broadcast(name, arguments)
