"""The programs of both sides: random ones, the same in every run, and a fixed one in many settings.

Knows: how programs are drawn. Does not know: how they are executed or recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture import providers

from ..support.machine import program as p
from ..support.machine.program import Command, Config, Setting
from ..support.machine.random_programs import Collectives, programs
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
        found = list[Program]()
        collectives = ON_PROCESSES if self.processes else ON_THREADS

        @seed(number)
        @settings(
            max_examples=8 * self.count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(self.stages, self.most_ranks, collectives, self.precisions, 12))
        def keep(program: tuple[Config, list[Command]]) -> None:
            config, commands = program
            commands = [replace(each, full=False) if isinstance(each, p.Load) else each for each in commands]
            commands = [each for each in commands if not isinstance(each, p.LATER)]
            if COMMANDS <= len(commands) <= MOST_COMMANDS and config.setting.world_size > 1:
                config = replace(config, delays=False)  # delays change no bit, and take time
                found.append(Program(config, tuple(commands), self.processes))

        # Hypothesis also tries constants from source files nearby; these differ between the sides
        with mock.patch.object(providers, "_get_local_constants", providers.Constants):
            keep()
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
    """Yield the fixed program in every setting."""
    for one in SETTINGS:
        yield Program(one, FIXED, hashed=False)
