"""The programs of both sides: random ones, the same in every run, and a fixed one in many settings.

Knows: how programs are drawn. Does not know: how they are executed or recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import initialize, run_state_machine_as_test

from ..support.machine import program as p
from ..support.machine.oracle import Oracle
from ..support.machine.program import Command, Config, Setting
from ..support.machine.run import Run
from ..support.machine.state_machine import Collectives, RandomPrograms, configs
from ..support.machine.trees import Part
from ..support.narrowed import PRECISIONS

ON_THREADS = Collectives(("auto", "shared", "two hosts"), ("ring",))
ON_PROCESSES = Collectives(("auto", "pairwise", "hierarchical"), ("ring", "native", "all_to_all"))
COMMANDS, MOST_COMMANDS = 14, 26  # the least and the most in a program; it ends with two whole steps


@dataclass(frozen=True)
class Program:
    """A program and how to run it.

    ``processes``: its ranks are processes, which share memory, instead of threads. ``hashed``: hash everything after
    every command.
    """

    config: Config
    commands: tuple[Command, ...]
    processes: bool = False
    hashed: bool = True

    def __str__(self) -> str:
        where = "processes" if self.processes else "threads"
        return f"on {where}: run({self.config}, {', '.join(map(repr, self.commands))})"


class _Draft(Run):
    """Collects the commands of a program without executing them."""

    def __init__(self, config: Config) -> None:
        self.config, self.commands, self.oracle = config, [], Oracle(config)

    def do(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, p.Load):
            self.oracle.setting = command.setting


@dataclass(frozen=True)
class Kind:
    """A kind of random programs, and how many of them to draw."""

    count: int
    stages: tuple[int, ...]
    most_ranks: int = 4
    precisions: tuple[str, ...] = ("",)
    processes: bool = False

    def draw(self, number: int) -> list[Program]:
        """Draw programs; the same ones for the same ``number``."""
        kind, found = self, list[Program]()

        @seed(number)
        class Drawing(RandomPrograms):
            most_ranks = kind.most_ranks
            collectives = ON_PROCESSES if kind.processes else ON_THREADS

            @initialize(data=st.data())
            def start(self, data: st.DataObject) -> None:
                config = data.draw(configs(kind.stages, self.most_ranks, self.collectives, kind.precisions))
                self.run = _Draft(replace(config, delays=False))  # delays change no bit, and take time

            def teardown(self) -> None:
                if self.run is not None:
                    self.finish()
                    if COMMANDS <= len(self.run.commands) <= MOST_COMMANDS and self.run.setting.world_size > 1:
                        found.append(Program(self.run.config, tuple(self.run.commands), kind.processes))

        size = settings(
            max_examples=8 * self.count,
            stateful_step_count=12,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        # Hypothesis also tries constants from source files nearby; these differ between the sides
        with mock.patch.object(providers, "_get_local_constants", providers.Constants):
            run_state_machine_as_test(Drawing, settings=size)
        if len(found) < self.count:
            raise RuntimeError(f"only {len(found)} of {self.count} programs could be drawn")
        return found[: self.count]


KINDS = (
    *(Kind(2, (stage,)) for stage in range(4)),
    *(Kind(2, (stage,), precisions=tuple(PRECISIONS)) for stage in range(4)),
    Kind(1, (0, 1, 2), 3, processes=True),
    Kind(2, (3,), 3, processes=True),
    Kind(1, (3,), 3, ("bf16",), processes=True),
)


def random_programs() -> Iterator[Program]:
    """Yield the 20 random programs."""
    for number, kind in enumerate(KINDS):
        yield from kind.draw(number)


# -- settings ----------------------------------------------------------------------------------------------------------

PARTS = (
    Part("linear", 31),
    Part("twice", of=(Part("linear", 13), Part("matrix"), Part("scalar"))),
    Part("checkpoint", of=(Part("tied"), Part("norm"))),
    Part("sequence", of=(Part("linear", 7, frozen=True), Part("empty"), Part("linear", 5, "float64"))),
    Part("unused", 3),
    Part("turned"),
)
STEP = (p.Backward(1, sync=False), p.Backward(2), p.Clip(1.0), p.Step(False), p.ZeroGrad())
FIXED = (*STEP, p.Evaluate(3), *STEP, p.Consolidate(0), *STEP)
_config = partial(Config, parts=PARTS, width=9, seed=1)
SETTINGS: Sequence[Config] = (
    _config(Setting(0, 2)),
    _config(Setting(1, 3)),
    _config(Setting(2, 4), precision="bf16"),
    _config(Setting(3, 4)),
    _config(Setting(3, 1, 25.0)),
    _config(Setting(2, 2, 25.0, offload=True)),
    _config(Setting(1, 4, 1e-6, sharding_factor=2)),
    _config(Setting(3, 4, sharding_factor=2), precision="fp32, sent in bf16"),
    _config(Setting(3, 4, 0.0001, reshard=2)),
    _config(Setting(3, 2, reshard=False), precision="fp16"),
    _config(Setting(3, 3, offload=True), optimizer="sgd momentum"),
    _config(Setting(2, 4, collective="two hosts", sharding_factor=4), optimizer="adam amsgrad"),
)


def settings_of_a_fixed_program() -> Iterator[Program]:
    """Yield the fixed program in 12 settings."""
    for one in SETTINGS:
        yield Program(one, FIXED, hashed=False)
