"""The ranks of a program: threads over Loopback, or gloo processes. `hosts` has further kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from collectives import Loopback, Transport

from ..carried import jitter
from ..pool import MADE, GlooPool
from .program import Command, Config, Load, Setting
from .ranks import Rank, Saved

LIMIT = 30.0  # seconds; the machine may be busy
_PROCESS: dict[str, Rank] = {}  # in a process of the pool: the rank of the current program


class Backend(Protocol):
    """Ranks side by side. Every call is executed on all ranks, and returns their results in rank order."""

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        """Build new ranks."""

    def do(self, command: Command) -> list[Any]:
        """Execute a command."""

    def save(self, command: Load) -> Saved:
        """Save on all ranks; return rank 0's result."""

    def close(self) -> list[Any]:
        """Make the models plain again; return their parameters."""


class Threads:
    """Ranks as threads, whose messages may be delayed."""

    rank: ClassVar[type[Rank]] = Rank

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        interfere = jitter(config.seed) if config.delays else None
        self._group: Loopback[Any] = Loopback(setting.world_size, timeout=LIMIT, interfere=interfere)
        self._ranks = self._group.run(
            lambda group: self.rank(config, setting, self._place(setting, group), group.rank, copy_of(saved))
        )

    def _place(self, setting: Setting, group: Transport) -> Transport:
        return group

    def do(self, command: Command) -> list[Any]:
        return self._run(lambda rank: rank.do(command))

    def save(self, command: Load) -> Saved:
        return self._run(lambda rank: rank.save(command))[0]

    def close(self) -> list[Any]:
        return self._run(Rank.close)

    def _run(self, action: Callable[[Rank], Any]) -> list[Any]:
        return self._group.run(lambda group: action(self._ranks[group.rank]))


class Processes:
    """Ranks as processes of a pool."""

    rank: ClassVar[type[Rank]] = Rank

    def __init__(self, pool: GlooPool, members: Sequence[int] | None = None) -> None:
        """``members``: those of the pool. None: the first ones."""
        self._pool, self._chosen = pool, members

    def start(self, config: Config, setting: Setting, saved: Saved | None = None) -> None:
        self._members = self._chosen or range(setting.world_size)
        self._run("__init__", self.rank, config, setting, saved)

    def do(self, command: Command) -> list[Any]:
        return self._run("do", command)

    def save(self, command: Load) -> Saved:
        return self._run("save", command)[0]

    def close(self) -> list[Any]:
        return self._run("close")

    def _run(self, method: str, *arguments: Any) -> list[Any]:
        try:
            found: list[Any] = self._pool.run(_call, method, *arguments, ranks=self._members)
        except Exception:
            self._pool.stop()  # after a failure the other ranks may still be in the middle of the program
            raise
        return found


def copy_of(saved: Saved | None) -> Saved | None:
    return None if saved is None else (saved[0], dict(saved[1]))


def _call(group: Any, rank: int, method: str, *arguments: Any) -> Any:
    if method == "__init__":
        cls, config, setting, saved = arguments
        _PROCESS["rank"] = cls(config, setting, _mesh_of(setting, group, rank) if setting.mesh else group, rank, saved)
        return None
    return getattr(_PROCESS["rank"], method)(*arguments)


def _mesh_of(setting: Setting, group: Any, rank: int) -> DeviceMesh:
    """Return the mesh of a group of the pool, made of its other groups. The sharding factor is its last dimension."""
    if (factor := setting.sharding_factor) is None:
        return DeviceMesh.from_group(group, "cpu")
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, factor)
    groups = [MADE[tuple(along.tolist())] for along in (ranks[:, rank % factor], ranks[rank // factor])]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))
