"""Executes a program on both sides, command by command: every rank must have the plain loop's results, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from collectives import Transport

from ..plain import assert_same_value
from . import program as p
from .backends import Backend, Threads
from .oracle import Oracle
from .program import Command, Config
from .ranks import Rank, Saved


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
        """Execute a command on both sides and compare, and what `followed` adds."""
        self.commands.append(command)
        needs_folder = isinstance(command, (p.RollBack, p.Load)) and command.folder
        with tempfile.TemporaryDirectory() if needs_folder else nullcontext() as folder:
            self._follow(replace(command, folder=folder) if folder is not None else command)
        for more in followed([command])[1:]:
            self._follow(more)

    def _follow(self, command: Command) -> None:
        expected = self.oracle.do(command)
        if isinstance(command, p.Load):
            self.backend.start(self.config, command.setting, self.backend.save(command))
            return
        results = self.backend.do(command)
        if isinstance(command, p.Measure):
            results = [sum(results)]
        for rank, seen in enumerate(results):
            if isinstance(command, (p.Consolidate, p.FullState)) and command.to != rank:
                continue
            if isinstance(command, p.Consolidate):
                seen = self._by_class(seen, expected)
            theirs = expected[rank] if isinstance(expected, p.ByRank) else expected
            assert_same_value(seen, theirs, f"rank {rank} after {command}", any_nan=bool(self.config.precision))

    def _by_class(self, seen: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of a rank by class.

        Remove from ``expected`` the master weights that a rank need not keep: those never updated equal the model's.
        """
        seen = seen if len(expected) > 1 else dict.fromkeys(expected, seen)
        assert seen.keys() == expected.keys()
        found = {}
        for name, of_class in seen.items():
            assert all(group.get("optimizer_class", name) == name for group in of_class["param_groups"])
            groups = [{k: v for k, v in group.items() if k != "optimizer_class"} for group in of_class["param_groups"]]
            found[name] = {**of_class, "param_groups": groups, "masters": of_class.get("masters", {})}
            masters = expected[name]["masters"]
            for index in set(masters) - set(found[name]["masters"]):
                master, narrow = masters.pop(index), self.oracle.narrow[name][index].detach()
                assert_same_value(narrow.to(master.dtype), master, f"missing master {index}", any_nan=True)
        return found

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


def followed(commands: Sequence[Command]) -> list[Command]:
    """Return commands with the looks at all states after each step with ``look``."""
    found = list[Command]()
    for command in commands:
        found += [command, p.Consolidate(0)] if isinstance(command, p.Step) and command.look else [command]
    return found


def play(config: Config, commands: Sequence[Command], group: Any) -> list[Any]:
    """Run a whole program on a rank of a transport, a process group or a mesh; return what `Played` shows."""
    if isinstance(group, DeviceMesh):
        rank = group.mesh.flatten().tolist().index(dist.get_rank())
    else:
        rank = group.rank if isinstance(group, Transport) else dist.get_rank(group)
    player = Rank(config, config.setting, group, rank)
    return [*map(player.do, (*followed(commands), p.Consolidate(0))), player.close()]


class Played(Backend):
    """Ranks that have run a whole program without loads, by `play`."""

    def __init__(self, results: Sequence[Sequence[Any]]) -> None:
        self._results = [iter(of_rank) for of_rank in results]

    def start(self, config: Config, setting: p.Setting, saved: Saved | None = None) -> None:
        """Assert that each rank has run it."""
        assert len(self._results) == setting.world_size

    def do(self, command: Command) -> list[Any]:
        return self.close()

    def close(self) -> list[Any]:
        return [next(of_rank) for of_rank in self._results]  # what a rank lacks is an error


def run(config: Config, *commands: Command, backend: Backend | None = None) -> None:
    """Execute a program from its beginning to its end."""
    both = Run(config, Threads() if backend is None else backend)
    for command in commands:
        both.do(command)
    both.close()
