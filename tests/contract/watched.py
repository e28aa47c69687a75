"""Ranks of a program on each of which a test is called after each command, and a loop with all moments of a step.

The calls of a test must leave the bits of the plain loop: parameters, norms and states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dials.record import config_with
from ..support.machine import program as p
from ..support.machine.backends import Threads
from ..support.machine.program import Command, Config, Setting
from ..support.machine.ranks import Rank, Saved
from ..support.machine.run import run

At = Callable[[Command | None, Rank], object]  # the command is None behind the construction
LOOP: list[Command] = [
    command
    for step in range(3)
    for command in (
        *(p.Keep(2 * step), p.BackwardOfKept(), p.Keep(2 * step + 1), p.BackwardOfKept()),
        *(p.Clip(0.5), p.Step(), p.ZeroGrad()),
    )
]


class Watched(Threads):
    def __init__(self, at: At) -> None:
        self._at = at

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        super().start(config, setting, saved)
        self._run(lambda rank: self._at(None, rank))

    def do(self, command: Command) -> list[Any]:
        found = super().do(command)
        self._run(lambda rank: self._at(command, rank))
        return found


def train(stage: int, at: At = lambda *_: None, *more: Command) -> None:
    run(config_with({"stage": stage, "world_size": 2}), *LOOP, *more, backend=Watched(at))
