"""Random programs on threads: whatever a training loop does, every rank sees what the plain loop sees, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from .machine.backends import Threads
from .machine.state_machine import RandomPrograms


class OnThreads(RandomPrograms):
    make_backend = Threads


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_on_threads_give_the_bits_of_the_plain_loop() -> None:
    thorough = settings.default.max_examples > 100
    size = settings(max_examples=160 if thorough else 30, stateful_step_count=40 if thorough else 15)
    run_state_machine_as_test(OnThreads, settings=size)
    print(f"{OnThreads.followed} commands")
    assert OnThreads.followed >= (5000 if thorough else 300), "too short to say anything"
