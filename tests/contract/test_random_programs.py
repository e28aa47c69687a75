"""Random programs on threads, with and without shared memory: every rank has the plain loop's results, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from ..support.machine import program, trees
from ..support.machine.backends import Threads
from ..support.machine.hosts import Sockets, ThreadsOnHosts
from ..support.machine.program import (
    Backward,
    BackwardOfKept,
    Clip,
    Config,
    Freeze,
    Keep,
    Load,
    Setting,
    Step,
    Uneven,
    ZeroGrad,
)
from ..support.machine.run import Run, run
from ..support.machine.state_machine import STAGES, Collectives, RandomPrograms
from ..support.machine.trees import Part
from ..support.narrowed import PRECISIONS

THOROUGH = settings.default.max_examples > 100
FEW = 8 if settings.default.max_examples > 10 else 4  # examples of a run that is not thorough


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.by_default("2")
def test_random_programs_on_threads_give_the_bits_of_the_plain_loop(stage: int) -> None:
    """``stage``: the first stage of a program; a load may change it."""

    class OnThreads(RandomPrograms):
        make_backend = ThreadsOnHosts
        collectives = Collectives(("auto", "shared", "one host", "two hosts"), ("ring",))
        begins = (stage,)

    size = settings(max_examples=50 if THOROUGH else FEW, stateful_step_count=40 if THOROUGH else 12)
    run_state_machine_as_test(OnThreads, settings=size)
    print(f"{OnThreads.followed} commands, {OnThreads.trained} steps with a gradient")
    assert OnThreads.followed >= (1300 if THOROUGH else 15 * FEW), "too short to say anything"
    assert OnThreads.trained >= (100 if THOROUGH else 2 * FEW - 1), "too little was trained to say anything"


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.full
def test_random_programs_in_mixed_precision_give_the_bits_of_the_plain_loop(precision: str) -> None:
    class Mixed(RandomPrograms):
        make_backend = ThreadsOnHosts
        collectives = Collectives(("auto", "shared", "one host", "two hosts"), ())
        precisions = (precision,)

    size = settings(max_examples=30 if THOROUGH else 6, stateful_step_count=40 if THOROUGH else 12)
    run_state_machine_as_test(Mixed, settings=size)
    print(f"{Mixed.followed} commands, {Mixed.trained} steps with a gradient")
    assert Mixed.followed >= (700 if THOROUGH else 60), "too short to say anything"
    assert Mixed.trained >= (60 if THOROUGH else 8), "too little was trained to say anything"


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_in_common_memory_give_the_bits_of_the_plain_loop() -> None:
    """Programs begin at stage 3, where gathers in shared memory move no bytes."""

    class OnSockets(RandomPrograms):
        make_backend = Sockets
        most_ranks = 4
        collectives = Collectives(("auto", "pairwise"), ("ring",))
        begins = (3,)
        precisions = ("", "", "bf16")

    size = settings(max_examples=50 if THOROUGH else FEW, stateful_step_count=40 if THOROUGH else 12)
    run_state_machine_as_test(OnSockets, settings=size)
    print(f"{OnSockets.followed} commands, {OnSockets.trained} steps with a gradient")
    assert OnSockets.followed >= (1300 if THOROUGH else 12 * FEW), "too short to say anything"
    assert OnSockets.trained >= (100 if THOROUGH else 3 * FEW // 2), "too little was trained to say anything"


def test_ranks_that_are_threads_compute_with_as_many_intra_op_threads_as_the_plain_loop() -> None:
    """With another number of threads some math libraries round some of these elements differently."""
    linear = (Part("linear", size=1), Part("linear", size=1), Part("linear", size=31, dtype="float64"))
    for stage in (0, 3):
        config = Config(Setting(stage, 1), linear, width=9)
        run(config, Backward(100), Clip(1.0), Step(), ZeroGrad(), Backward(101), Step())


def test_a_program_prints_as_the_source_text_that_makes_it() -> None:
    config = Config(Setting(3, 2, 25.0, "ring"), (Part("twice", of=(Part("tied"),)),), integer=True, delays=True)
    followed = Run(config, Threads())
    for command in (Backward(1, "retained", sync=False), Clip(float("inf"), float("inf")), Step(), ZeroGrad("none")):
        followed.do(command)
    given: list[object] = []
    eval(str(followed), {**vars(trees), **vars(program), "run": lambda *parts: given.extend(parts)})
    assert given == [config, *followed.commands]
    followed.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [(), (Backward(1),)], ids=["first", "on top of another"])
def test_what_is_frozen_between_a_forward_and_its_backward_gets_no_gradient_from_it(
    before: tuple[Backward, ...], stage: int
) -> None:
    config = Config(Setting(stage, 2), (Part("linear"), Part("matrix")))
    rest = (Clip(0.5), Step(), ZeroGrad(), Freeze((2,)), Backward(4), Step())
    run(config, *before, Keep(2), Freeze((2,)), BackwardOfKept(), Backward(3), *rest)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_block_left_on_a_rank_that_falls_behind_goes_with_the_first_round_of_the_others(stage: int) -> None:
    config = Config(Setting(stage, 3), (Part("linear"), Part("matrix")), optimizer="sgd")
    for rest in ((), (Backward(5),)):
        run(config, Backward(1, sync=False), Uneven(2, (3, 3, 0)), *rest, Clip(1.0), Step())


@pytest.mark.parametrize("optimizer", ["asgd", "nadam"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.by_default("float64-asgd")
def test_what_a_class_keeps_beside_its_elementwise_states_has_its_dtype_after_a_load(
    dtype: str, optimizer: str
) -> None:
    config = Config(Setting(1, 2), (Part("linear", dtype=dtype), Part("scalar", dtype=dtype)), optimizer=optimizer)
    step = (Backward(1), Step(), ZeroGrad())
    run(config, *step, Load(Setting(3, 3)), *step, Load(Setting(0, 1)), *step)
