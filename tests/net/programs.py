"""The programs of both sides, the same in every run: those of the dials.

Knows: how programs are chosen. Does not know: how they are executed or recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ..dials import DIALS
from ..dials.loops import steps
from ..dials.record import config_of, config_with
from ..laws.space import allowed, program_of
from ..support.machine import program as p
from ..support.machine.program import Command, Config, Load
from ..support.pairs import pair_rows
from ..support.pool import SIZE

ROWS = pair_rows({dial.name: [*dial.values][: 2 * dial.first] for dial in DIALS}, allowed)
HOW = ({}, {"full": True}, {"folder": p.FOLDER})
OF_A_SETTING = ("stage", "ranks", "bucket_cap_mb", "collective", "sharding_factor", "offload", "units", "reshard")


@dataclass(frozen=True)
class Program:
    """A program. ``processes``: its ranks are processes, which share memory, instead of threads."""

    config: Config
    commands: tuple[Command, ...]
    processes: bool = False

    def __str__(self) -> str:
        where = "processes" if self.processes else "threads"
        return f"on {where}: run({self.config}, {', '.join(map(repr, self.commands))})"


def chosen(known: Collection[str]) -> Iterator[Program]:
    """Yield all programs. ``known``: the public names that both sides have."""
    for program in (*of_pairs(), *of_moments()):
        commands = (each for each in program.commands if p.LATER.get(type(each), "step") in known)
        yield replace(program, commands=tuple(commands), config=replace(program.config, delays=False))


def of_pairs() -> Iterator[Program]:
    """Yield programs that hold each pair of values of two dials, each with a load into the setting of another."""
    for number, row in enumerate(ROWS):
        config, commands = program_of(row)
        for other in (*ROWS[number + 1 :], row):
            later = {**row, **{name: other[name] for name in OF_A_SETTING}}
            if allowed(later):
                break
        load = Load(config_of(later, DIALS).setting, **HOW[number % len(HOW)])
        is_few = max(int(row["ranks"]), int(later["ranks"])) <= SIZE
        yield Program(config, (*commands, load, *steps(2, 70)), is_few and number % 8 == 0)


def of_moments() -> Iterator[Program]:
    """Yield programs with calls at wrong moments, of those that need no device to be wrong. Those that need memory in
    common run on processes."""
    for moment in (moment for dial in DIALS for moment in dial.moments if not moment.unseen):
        wrong = [p.Wrong(*call) for call in moment.calls.items()]
        for stage in moment.stages:
            config = config_with({"stage": stage, "world_size": 2, **moment.changes})
            commands = (*moment.before, *wrong, *moment.after, *steps(2))
            yield Program(config, commands, processes=bool(moment.changes.get("host")))
