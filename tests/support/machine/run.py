"""Executes a program on both sides, command by command: every rank must have the plain loop's results, bit for bit."""

from __future__ import annotations

from typing import Any

from ..plain import assert_same_value
from . import program as p
from .backends import Backend, Threads
from .classes import merged, name_of
from .oracle import Oracle
from .program import Command, Config


class Run:
    """The oracle and the ranks of one program, and the commands executed so far."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self.config, self.backend = config, backend
        self.commands: list[Command] = []
        self.oracle = Oracle(config)
        backend.start(config, config.setting)

    @property
    def setting(self) -> p.Setting:
        return self.oracle.setting

    def do(self, command: Command) -> None:
        """Execute a command on both sides and compare. After a step with ``look``, compare all states, too."""
        self.commands.append(command)
        self._follow(command)
        if isinstance(command, p.Step) and command.look:
            self._follow(p.Consolidate(0))

    def _follow(self, command: Command) -> None:
        expected = self.oracle.do(command)
        if isinstance(command, p.Load):
            self.backend.start(self.config, command.setting, self.backend.save())
            return
        for rank, seen in enumerate(self.backend.do(command)):
            if not isinstance(command, p.Consolidate) or command.to == rank:
                if isinstance(command, p.Consolidate):
                    seen = self._as_one(seen)
                    self._leave_out_masters_that_are_not_kept(expected, seen)
                assert_same_value(seen, expected, f"rank {rank} after {command}", any_nan=bool(self.config.precision))

    def _as_one(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of a rank as one, which is one of each class where there are several."""
        classes = self.oracle.classes.classes
        if len(set(classes)) == 1:
            seen = {name_of(classes[0]): seen}
        return merged(seen, classes)

    def _leave_out_masters_that_are_not_kept(self, expected: dict[str, Any], seen: dict[str, Any]) -> None:
        """Remove the master weights that a rank need not keep: those never updated equal the model's own values."""
        for index in set(expected.get("masters", {})) - set(seen.get("masters", {})):
            master = expected["masters"].pop(index)
            narrow = self.oracle.listed[index].detach()
            assert_same_value(narrow.to(master.dtype), master, f"missing master {index}", any_nan=True)
        if not expected.get("masters"):
            expected.pop("masters", None)

    def close(self) -> None:
        """End the program: compare all states, and the parameters of the plain models."""
        self.do(p.Consolidate(0))
        expected = p.values(self.oracle.parameters)
        for rank, seen in enumerate(self.backend.close()):
            assert_same_value(seen, expected, f"rank {rank} at the end", any_nan=bool(self.config.precision))

    def __str__(self) -> str:
        """Return source text that runs this program again."""
        commands = "".join(f"\n    {command}," for command in self.commands)
        return f"run(\n    {self.config},{commands}\n)"


def run(config: Config, *commands: Command, backend: Backend | None = None) -> None:
    """Execute a program from its beginning to its end."""
    both = Run(config, Threads() if backend is None else backend)
    for command in commands:
        both.do(command)
    both.close()
