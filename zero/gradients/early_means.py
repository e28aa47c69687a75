"""Means that ranks gather while a backward still runs: of each bucket as soon as it is summed.

For stages at which `p.grad` is the mean after each round, on accelerators, where a gather runs beside the backward. The
divisor is that of the round's beginning. At its end the ranks compare what they have gathered, and with another divisor
gather again.

Knows: the buckets of a round whose means were gathered. Does not know: p.grad, what ranks agree on.
"""

from __future__ import annotations

from collections import deque

import torch

from collectives import Collective, Work

from ..core.bits import is_launched
from ..core.stage import GATHERS_IN_FLIGHT
from ..runtime.accumulator import GradAccumulator


class EarlyMeans:
    """The means that one rank gathers in a round before its end."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._divisor: float | None = None  # of the round; None: it gathers none
        self._gathered: set[GradAccumulator] = set()
        self._are_right = True
        self._flying: deque[Work] = deque()

    def begin(self, divisor: float | None) -> None:
        """Begin a round. ``divisor``: None if means are not gathered before its end."""
        self._divisor = divisor if self._collective.transport.world_size > 1 else None
        self._gathered, self._are_right = set(), True

    def summed(self, gradients: GradAccumulator, round_: int) -> None:
        """Launch the gather of a bucket that is summed. All ranks call it in the same order."""
        if (
            self._divisor is None
            or gradients in self._gathered
            or not is_launched(torch.device(gradients.bucket.device))
        ):
            return
        while len(self._flying) >= GATHERS_IN_FLIGHT:
            self._land()
        self._flying.append(gradients.gather_means(self._collective, round_, self._divisor))
        self._gathered.add(gradients)

    def finish(self) -> None:
        """Wait for the gathers."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        self._flying[0].wait()
        self._flying.popleft()

    def abandon(self) -> None:
        """Forget the round, after a failure that makes waiting useless."""
        self._flying.clear()
        self._divisor, self._gathered = None, set()

    def distrust(self) -> None:
        """Note that a sum is about to be changed, perhaps inside a backward. Gathers write where a contribution lies,
        so this waits for those under way."""
        self.finish()
        self._are_right = False

    @property
    def divisor(self) -> float | None:
        """The divisor of the means that were gathered; None if none were, or if a sum may have changed since."""
        return self._divisor if self._gathered and self._are_right else None

    def __contains__(self, gradients: GradAccumulator) -> bool:
        return gradients in self._gathered
