"""`StopOnSignal`: a signal to one rank is heard by all ranks in the same step."""

from __future__ import annotations

import os
import signal
from typing import Any

from zero import StopOnSignal

from ..support.pool import GlooPool
from .saves import Training


def _stops(group: Any, rank: int) -> tuple[int, str | None]:
    """Train until a signal is heard. Return the number of steps, and what was heard."""
    training = Training(group, 2)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a signal that nobody has heard is sent again
    with StopOnSignal(training.optimizer) as stop:
        for step in range(6):
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            training.step(step)
            if stop.requested:
                return step, stop.why
    return -1, None


def test_all_ranks_hear_of_a_signal_in_the_same_step(gloo: GlooPool) -> None:
    assert gloo.run(_stops, ranks=(0, 1, 2)) == [(2, "rank 1 got SIGTERM")] * 3
