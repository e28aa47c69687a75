"""Random models and random programs: after every command every rank has the plain loop's results, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import settings

from ..support.machine import program as p
from ..support.machine.hosts import Sockets, ThreadsOnHosts
from ..support.machine.random_programs import EDGES, UNITS, Collectives, RandomPrograms
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.rows import ALL

pytestmark = pytest.mark.filterwarnings(
    "ignore:gaps in the memory of:UserWarning", "ignore:.*set aside:UserWarning", "ignore:not restored from"
)
THOROUGH = settings.default.max_examples > 100


@pytest.mark.law("states from steps")
@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_on_threads_give_the_bits_of_the_plain_loop() -> None:
    class OnThreads(RandomPrograms):
        make_backend = ThreadsOnHosts
        collectives = Collectives(
            ("auto", "shared", "one host", "two hosts", "hosts in a row"), ("ring",), UNITS, stacks=True, edges=EDGES
        )
        begins = (0, 1, 2) if THOROUGH else (2,)  # a load may change it

    OnThreads.check(150 if THOROUGH else 7 if ALL else 3, 40 if THOROUGH else 20)


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_in_common_memory_give_the_bits_of_the_plain_loop() -> None:
    class OnSockets(RandomPrograms):
        make_backend = Sockets
        most_ranks = 4
        collectives = Collectives(("auto", "pairwise"), ("ring",), UNITS, edges=EDGES)
        begins = (3,)
        precisions = ("", "", "bf16", "by kind")

    OnSockets.check(50 if THOROUGH else 5 if ALL else 2, 40 if THOROUGH else 20)


LAYERS = (Part("linear"), Part("matrix"))
STEP = (p.Backward(1), p.Step(), p.ZeroGrad())
KEPT = (p.Keep(2), p.Freeze((2,)), p.BackwardOfKept(), p.Backward(3), p.Clip(0.5), *STEP[1:], p.Freeze((2,)))
BEHIND = (p.Backward(1, sync=False), p.Uneven(2, (3, 3, 0)), p.Backward(5), p.Clip(1.0), p.Step())
FOUND: dict[str, tuple[p.Setting, tuple[p.Command, ...]]] = {
    "what is frozen behind a forward gets no gradient from it": (p.Setting(1, 2), (*STEP, *KEPT)),
    "what is frozen on top of another backward": (p.Setting(2, 2), (p.Backward(1), *KEPT, *STEP)),
    "what is frozen at stage 3": (p.Setting(3, 2), (p.Backward(1), *KEPT, *STEP)),
    "what a block left, and a further backward": (p.Setting(2, 3), BEHIND),
}
"""Programs that were found by random ones."""


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_once_failed_gives_the_bits_of_the_plain_loop(name: str) -> None:
    setting, commands = FOUND[name]
    run(p.Config(setting, LAYERS, optimizer="sgd" if commands is BEHIND else "adamw"), *commands)
