"""Random models and random programs: after every command every rank has the plain loop's results, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import settings

from ..support.machine.hosts import Sockets, ThreadsOnHosts
from ..support.machine.program import (
    Backward,
    BackwardOfKept,
    Clip,
    Command,
    Config,
    Freeze,
    Keep,
    Load,
    Setting,
    Step,
    Uneven,
    ZeroGrad,
)
from ..support.machine.random_programs import EDGES, UNITS, Collectives, RandomPrograms
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.rows import without

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

    OnThreads.check(150 if THOROUGH else 7, 40 if THOROUGH else 20)


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_in_common_memory_give_the_bits_of_the_plain_loop() -> None:
    """Programs begin at stage 3, where gathers in shared memory move no bytes."""

    class OnSockets(RandomPrograms):
        make_backend = Sockets
        most_ranks = 4
        collectives = Collectives(("auto", "pairwise"), ("ring",), UNITS, edges=EDGES)
        begins = (3,)
        precisions = ("", "", "bf16", "by kind")

    OnSockets.check(50 if THOROUGH else 5, 40 if THOROUGH else 20)


LAYERS = (Part("linear"), Part("matrix"))
STEP = (Backward(1), Step(), ZeroGrad())
KEPT = (Keep(2), Freeze((2,)), BackwardOfKept(), Backward(3), Clip(0.5), Step(), ZeroGrad(), Freeze((2,)))
BEHIND = (Backward(1, sync=False), Uneven(2, (3, 3, 0)))
LOADS = (*STEP, Load(Setting(3, 3)), *STEP, Load(Setting(0, 1)), *STEP)
LINEAR = (Part("linear", size=1), Part("linear", size=1), Part("linear", size=31, dtype="float64"))
IN_BF16 = (Part("linear", dtype="bfloat16"), Part("scalar", dtype="bfloat16"))
FOUND: dict[str, tuple[Config, tuple[Command, ...]]] = {
    "what is frozen behind a forward gets no gradient from it, 0": (Config(Setting(0, 2), LAYERS), (*KEPT, *STEP)),
    "what is frozen behind a forward gets no gradient from it, 1": (Config(Setting(1, 2), LAYERS), (*STEP, *KEPT)),
    "what is frozen on top of another backward": (Config(Setting(2, 2), LAYERS), (Backward(1), *KEPT, *STEP)),
    "what is frozen at stage 3": (Config(Setting(3, 2), LAYERS), (Backward(1), *KEPT, *STEP)),
    "what a block left goes with the first round of the others": (
        Config(Setting(1, 3), LAYERS, optimizer="sgd"),
        (*BEHIND, Clip(1.0), Step()),
    ),
    "what a block left, and a further backward": (
        Config(Setting(2, 3), LAYERS, optimizer="sgd"),
        (*BEHIND, Backward(5), Clip(1.0), Step()),
    ),
    "what a class keeps beside its states has its dtype after a load": (
        Config(Setting(1, 2), (Part("linear", dtype="float64"),), optimizer="asgd"),
        LOADS,
    ),
    "what a class keeps beside its states in bf16": (Config(Setting(1, 2), IN_BF16, optimizer="nadam"), LOADS),
    "as many intra-op threads as the plain loop": (
        Config(Setting(0, 1), LINEAR, width=9),
        (Backward(100), Clip(1.0), Step(), ZeroGrad(), Backward(101), Step()),
    ),
}
"""Programs that were found by random ones."""


@pytest.mark.parametrize(
    "name",
    without(
        FOUND,
        "what is frozen behind a forward gets no gradient from it, 0",
        "what a block left goes with the first round of the others",
        "what a class keeps beside its states has its dtype after a load",
        "what a class keeps beside its states in bf16",
        "as many intra-op threads as the plain loop",
    ),
)
def test_a_program_that_once_failed_gives_the_bits_of_the_plain_loop(name: str) -> None:
    config, commands = FOUND[name]
    run(config, *commands)
