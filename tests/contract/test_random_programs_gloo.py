"""Random programs on gloo processes, whose waits are real."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ..support.machine.backends import Processes
from ..support.machine.state_machine import Collectives, RandomPrograms
from ..support.pool import SIZE, GlooPool

pytestmark = pytest.mark.contract


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
@pytest.mark.full
def test_random_programs_on_processes_give_the_bits_of_the_plain_loop(gloo: GlooPool) -> None:
    class OnProcesses(RandomPrograms):
        make_backend = staticmethod(lambda: Processes(gloo))
        most_ranks = SIZE
        collectives = Collectives(("auto", "pairwise", "hierarchical"), ("ring", "native", "all_to_all"))
        precisions = ("", "", "bf16", "fp16")

    thorough = settings.default.max_examples > 100
    once = settings(
        max_examples=40 if thorough else 8,
        stateful_step_count=30 if thorough else 10,
        phases=[Phase.explicit, Phase.generate],  # a failure costs a new pool: shrink the program on threads
    )
    run_state_machine_as_test(OnProcesses, settings=once)
    print(f"{OnProcesses.followed} commands, {OnProcesses.trained} steps with a gradient")
    assert OnProcesses.followed >= (300 if thorough else 40), "too short to say anything"
    assert OnProcesses.trained >= (80 if thorough else 12), "too little was trained to say anything"
