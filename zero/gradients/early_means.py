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

from ..core.stage import GATHERS_IN_FLIGHT
from ..core.step_groups import is_launched
from ..runtime.accumulator import GradAccumulator


class EarlyMeans:
    """The means that one rank gathers in a round before its end."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._divisor: float | None = None  # of the round; None: it gathers none
        self._summed: dict[GradAccumulator, int] = {}  # those gathered, with the version of the sum
        self._flying: deque[Work] = deque()

    def begin(self, divisor: float | None) -> None:
        """Begin a round. ``divisor``: None if means are not gathered before its end."""
        self._divisor, self._summed = divisor if self._collective.transport.world_size > 1 else None, {}

    def summed(self, gradients: GradAccumulator, round_: int) -> None:
        """Launch the gather of a bucket that is summed. All ranks call it in the same order."""
        if self._divisor is None or gradients in self._summed or not is_launched(torch.device(gradients.bucket.device)):
            return
        while len(self._flying) >= GATHERS_IN_FLIGHT:
            self._land()
        self._flying.append(gradients.gather_means(self._collective, round_, self._divisor))
        self._summed[gradients] = gradients.sum_version()

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
        self._divisor, self._summed = None, {}

    @property
    def divisor(self) -> float | None:
        """The divisor of the means that were gathered; None if none were, or if a sum has changed since."""
        changed = any(gradients.sum_version() != version for gradients, version in self._summed.items())
        return None if changed or not self._summed else self._divisor

    def __contains__(self, gradients: GradAccumulator) -> bool:
        return gradients in self._summed
