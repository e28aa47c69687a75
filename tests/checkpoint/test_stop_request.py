"""A signal to one rank is heard by all ranks in the same step, and handled as before after the block."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from zero import StopOnSignal

from ..support.parts import parts_of
from ..support.pool import GlooPool
from .saved import Training


def _stops(group: Any, rank: int) -> tuple[int, str | None]:
    training = Training(group, 2)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a signal that nobody has heard is sent again
    with StopOnSignal(training.optimizer) as stop:
        for step in range(6):
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            training.step(step)
            if stop.requested:
                break
    assert not parts_of(training.optimizer).update.watchers
    return step, stop.why


def test_all_ranks_hear_of_a_signal_in_the_same_step(gloo: GlooPool) -> None:
    assert gloo.run(_stops, ranks=(0, 1, 2)) == [(2, "rank 1 got SIGTERM")] * 3


@pytest.fixture
def caught() -> Iterator[list[int]]:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_inside_the_block_a_signal_does_not_end_the_process_and_after_it_what_was_there_handles_it(
    caught: list[int],
) -> None:
    training = Training(None, 0)
    optimizer = training.optimizer
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
        training.step(0)
        assert stop.requested
    assert caught == []
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.requested
    assert caught == [signal.SIGTERM], "no step came after it, so the process gets it at the end of the block"

    def lose_the_others() -> None:
        with StopOnSignal(optimizer):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError("what a rank reports that has lost the others, although its agent has sent SIGTERM")

    with pytest.raises(KeyError):
        lose_the_others()
    assert caught == [signal.SIGTERM]


def test_what_no_process_can_handle_is_an_error_that_names_it() -> None:
    optimizer = Training(None, 0).optimizer
    with pytest.raises(ValueError, match="signals has SIGKILL, which no process can handle: leave it out"):
        StopOnSignal(optimizer, [signal.SIGTERM, signal.SIGKILL])
    with ThreadPoolExecutor(1) as pool:
        assert "main thread" in str(pool.submit(StopOnSignal(optimizer).__enter__).exception())
