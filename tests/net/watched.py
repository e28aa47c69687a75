"""Ranks that record their results after every command of a program.

Knows: only the public names of `zero` and `collectives`. Does not know: the comparison.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..support.machine import program as p
from ..support.machine.backends import Backend, Processes, Threads
from ..support.machine.program import Command
from ..support.machine.ranks import Rank
from ..support.plain import bits
from ..support.pool import GlooPool
from .compare import ERROR
from .programs import Program


class Watched(Rank):
    """A rank that hashes every parameter, gradient and optimizer state after every command.

    This gathers them, at every stage.
    """

    record = "hashed"
    refusal = ""  # the text of the last error

    def do(self, command: Command) -> Any:
        found = super().do(command)
        try:
            seen = self.seen()
        except RuntimeError as error:  # on every rank: a program has taken everything to the host's memory
            seen = {"not seen": str(error)}
        return {"what it returns": sha256(found), "refused": self.refusal, **seen}

    def refuse(self, command: p.Wrong) -> None:
        self.refusal = self.error_of(command)

    def seen(self) -> dict[str, str]:
        """Return the record after a command; its keys name the parameter or state for a reader."""
        named = dict(self.model.named_parameters())
        with self.optimizer.gathered():
            found = {f"parameter {name}": sha256(parameter) for name, parameter in named.items()}
        found |= {f"gradient {name}": self._gradient(q) for name, q in named.items() if id(q) in self.listed}
        self.optimizer.consolidate_state_dict(None)
        states = self.optimizer.state_dict()
        for of_class, each in [("", states)] if "state" in states else states.items():
            found |= {f"{of_class} {key}".strip(): digest for key, digest in _hashed_states(each).items()}
        return found

    def _gradient(self, parameter: torch.nn.Parameter) -> str:
        try:
            return sha256(self.optimizer.full_grad(parameter))
        except RuntimeError:  # on every rank: a part of the gradient is still in a `no_sync` block
            return "not reduced"


def _hashed_states(found: dict[str, Any]) -> dict[str, str]:
    """Return the record of a state dict of one class."""
    states = {f"state {index}.{n}": sha256(v) for index, state in found["state"].items() for n, v in state.items()}
    masters = {f"master {index}": sha256(value) for index, value in found.get("masters", {}).items()}
    return states | masters | {"param groups": sha256(found["param_groups"])}


class Undisturbed(Watched):
    """A rank that records only what needs no message: the results of calls, traffic, and `describe()`."""

    record = "undisturbed"

    def seen(self) -> dict[str, str]:
        traffic = {f"traffic {name}": str(count) for name, count in asdict(self.optimizer.traffic).items()}
        lines = enumerate(str(self.optimizer.describe()).splitlines(), 1)
        return traffic | {f"describe line {number}": line for number, line in lines}


def record(program: Program, pool: GlooPool) -> dict[str, Any]:
    """Execute a program twice, once undisturbed, and return the records of all ranks."""
    found: dict[str, Any] = {}
    try:
        for rank_class in (Watched, Undisturbed):
            backend: Any = Processes(pool) if program.processes else Threads()
            backend.rank = rank_class
            of_all = found.setdefault(rank_class.record, {})
            for label, seen in _follow(program, backend):
                of_all[label] = {f"rank {rank}": of_rank for rank, of_rank in enumerate(seen)}
    except Exception as error:
        found[ERROR] = f"{type(error).__name__}: {error}"
    return found


def _follow(program: Program, backend: Backend) -> Iterator[tuple[str, list[Any]]]:
    """Yield the results of all ranks after each command."""
    backend.start(program.config, program.config.setting)
    yield "at the start", backend.do(p.Describe())
    for number, command in enumerate(program.commands, 1):
        label = f"after command {number}, {command}"
        with tempfile.TemporaryDirectory() as folder:
            if isinstance(command, (p.Load, p.RollBack)) and command.folder:
                command = replace(command, folder=folder)
            if isinstance(command, p.Load):
                backend.start(program.config, command.setting, backend.save(command))
                yield label, backend.do(p.Describe())
            else:
                yield label, backend.do(command)
    yield "at the end", backend.do(p.Read())
    yield "after close()", [{"parameters": sha256(values)} for values in backend.close()]


def sha256(value: Any) -> str:
    """Hash a value that may hold tensors, by their bits."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        found.update(bits(_with_one_nan(value)).numpy().tobytes())
    elif isinstance(value, Mapping):
        _add(found, [[str(key), value[key]] for key in sorted(value, key=str)])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        found.update(f"{len(value)} of ".encode())
        for inside in value:
            _add(found, inside)
    else:
        found.update(f"{value!r} ".encode())


def _with_one_nan(value: Tensor) -> Tensor:
    """Make all NaNs equal.

    The bits of a NaN that is cast to 16 bits depend on its place in a tensor, in torch itself.
    """
    return torch.where(value.isnan(), float("nan"), value) if value.is_floating_point() else value
