"""The phase of one optimizer's gradients since they were cleared.

Knows: which parameters were used, the divisor, and what may happen next. Does not know: the memory of gradients,
p.grad, other ranks.

    OPEN -------- finalize_grads (clip, unscale, step) ------> DIVIDED --- step ---> STEPPED
      ^  backwards add                                            |                     |
      +----------------- every gradient was cleared <-------------+---------------------+
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from enum import Enum


class Phase(Enum):
    """The phase of gradients, which decides what may happen to them next."""

    OPEN = "backwards add to them"
    DIVIDED = "they are means, perhaps clipped"
    STEPPED = "a step has used them"


class GradPhase:
    """The phase of the gradients of all parameters, each by its index in the layout."""

    def __init__(self, divisor: float) -> None:
        self.phase = Phase.OPEN
        self.used: list[bool] = []  # by this rank; once ranks have agreed, by any
        self.divisor = divisor  # of the next finalize_grads
        self.means_divisor: float | None = None  # of the means that all ranks hold; None: no means, or out of date
        self.stale: set[int] = set()  # gradients that must be cleared before the phase is OPEN again
        self.finalized_by = ""

    @property
    def is_open(self) -> bool:
        """True if backwards may add gradients."""
        return self.phase is Phase.OPEN

    def check_open(self, rank: int, name_of: Callable[[int], str]) -> None:
        """Raise `RuntimeError` if backwards may not add gradients any more."""
        if not self.is_open:
            raise RuntimeError(
                f"rank {rank}: backward() after {self.finalized_by} without zero_grad(): the gradient of "
                f"{name_of(min(self.stale))} was already divided; call optimizer.zero_grad() first"
            )

    def agree_used(self, told: Sequence[bytes]) -> None:
        """Set ``used`` to the parameters that any rank used. ``told``: of every rank, one byte per parameter."""
        merged = functools.reduce(operator.or_, (int.from_bytes(used, "little") for used in told))
        self.used[:] = map(bool, merged.to_bytes(len(self.used), "little"))

    def finalized(self, purpose: str) -> None:
        """Note that the sums have become means, in the call ``purpose``."""
        self.stale = {index for index, used in enumerate(self.used) if used}
        self.phase, self.finalized_by = Phase.DIVIDED if self.stale else Phase.OPEN, purpose

    def stepped(self) -> None:
        """Note that a step has used the means."""
        self.phase, self.finalized_by = Phase.STEPPED if self.stale else Phase.OPEN, "step()"

    def renewed(self, index: int) -> None:
        """Note that this gradient was cleared."""
        self.stale.discard(index)
        if not self.stale:
            self.phase = Phase.OPEN

    def all_renewed(self) -> None:
        """Note that every gradient was cleared."""
        self.stale, self.phase = set(), Phase.OPEN
