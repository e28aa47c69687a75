"""The arguments of `zero.verify` as one file for its processes, with functions by name, and the results of a run.

Knows: which arguments are valid, how another process finds a function, what a run returns. Does not know: processes,
loops. Nothing is unpickled: the file is read with `weights_only=True`, functions are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...config import MixedPrecision
from ...step.clip import check_norm_arguments
from .bit_diff import Difference

__all__ = ["RESULTS", "Run", "VerifySpec", "as_batches", "plain_data", "reference", "resolve"]

FILE = "spec.pt"
RESULTS = "runs.jsonl"


@dataclass(frozen=True)
class VerifySpec:
    """The arguments of a verification. Functions are names for `resolve`; ``batches`` is a name or the list."""

    build_model: str
    batches: str | list[Any]
    optimizer_class: str
    loss_fn: str | None
    units: str | None
    param_groups: str | None
    defaults: dict[str, Any]
    stages: tuple[int, ...]
    world_sizes: tuple[int, ...]
    micro_batches: int
    max_norm: float | None
    bucket_cap_mb: float
    mixed_precision: dict[str, Any] | None
    elastic: bool
    threads: int
    timeout: float
    path: list[str]

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if self.max_norm is not None:
            check_norm_arguments(self.max_norm, 2.0)
        if isinstance(self.batches, list):
            self.steps(len(self.batches))

    @property
    def precision(self) -> MixedPrecision | None:
        return None if self.mixed_precision is None else MixedPrecision(**self.mixed_precision)

    def steps(self, count: int) -> int:
        """Return the number of steps of ``count`` micro-batches. Raises ValueError if they fill no whole steps."""
        size = self.micro_batches
        if count == 0 or count % size:
            below = count // size * size
            raise ValueError(
                f"batches has {count} micro-batches, and a step takes {size} of them: give "
                f"{f'{below} or {below + size}' if below else size}, or set micro_batches"
            )
        return count // size

    def save(self, folder: Path) -> None:
        torch.save(vars(self), folder / FILE)

    @staticmethod
    def load(folder: Path) -> VerifySpec:
        return VerifySpec(**torch.load(folder / FILE, weights_only=True))


@dataclass(frozen=True)
class Run:
    """One run compared with the plain loop: a stage on ``world_size`` ranks, or the plain loop again (``stage`` None).

    ``difference``: that of the first of ``ranks``, after ``step`` (0: as built), where the run ended; if it is None,
    ``step`` is the last one. ``numel``: elements of all parameters.
    """

    stage: int | None
    world_size: int
    step: int
    numel: int
    ranks: tuple[int, ...]
    difference: Difference | None
    several_backwards: bool = False  # `loss_fn` ran a backward itself, in the plain loop
    sizes: tuple[int, ...] = ()  # of an elastic run: the numbers of ranks, one after the other

    @property
    def ok(self) -> bool:
        """Whether no bit differed."""
        return self.difference is None

    def __str__(self) -> str:
        name = f"stage {self.stage}, {_counted(self.world_size, 'rank')}"
        name = "the plain loop, again" if self.stage is None else name
        if self.sizes:
            kills = _counted(len(self.sizes) - 1, "kill")
            name = f"stage {self.stage}, elastic, {' -> '.join(map(str, self.sizes))} ranks, {kills}"
        if self.difference is None:
            return f"{name}: same bits, {_counted(self.step, 'step')}, {self.numel:,} parameters"
        when = f"after step {self.step}" if self.step else "as built, before any step"
        where = "" if len(self.ranks) == self.world_size else f" on rank {', '.join(map(str, self.ranks))} alone"
        return f"{name}: DIFFERS {when}{where}: {self.difference}"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> Run:
        found = json.loads(data)
        difference = Difference.from_json(json.dumps(found["difference"]).encode())
        lists = {name: tuple(found[name]) for name in ("ranks", "sizes")}
        return Run(**{**found, **lists, "difference": difference})


def as_batches(batches: Any) -> list[Any]:
    """Return the micro-batches as a list. Raises TypeError if they are no finite collection."""
    if not hasattr(batches, "__iter__") or not hasattr(batches, "__len__") or isinstance(batches, (str, Mapping)):
        raise TypeError(
            f"batches must be a sequence of micro-batches, or a function that returns one, not {_kind(batches)}"
        )
    return list(batches)


def plain_data(value: Any, name: str, remedy: str) -> Any:
    """Return ``value``. Raises TypeError if another process cannot read it from a file without unpickling."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise TypeError(
            f"{name} must hold only tensors, numbers, text, lists, tuples and dicts, since it goes to other processes "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from error
    return value


def reference(function: Any, name: str) -> str:
    """Return the name by which another process finds a function or class: "MODULE:NAME" or "/PATH/SCRIPT.py:NAME".

    Raises:
        TypeError: it cannot be found by name.
    """
    if not callable(function):
        raise TypeError(f"{name} must be a function or a class, not {_kind(function)}")
    qualified, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    where = _where(module, name) if module in sys.modules else ""
    try:
        found = _named(sys.modules[module or ""], qualified)
    except (KeyError, AttributeError):
        found = None
    if found is not function:
        what = qualified or repr(function)
        raise TypeError(
            f"{name} is {what}, which other processes cannot import by name: define it with def or class at the top "
            "level of a module (a lambda, a function inside a function or a partial has no such name)"
        )
    return f"{where}:{qualified}"


def _where(module: str | None, name: str) -> str:
    """Return the name of the module, or the path of the script if it is the main module."""
    if module != "__main__":
        return str(module)
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        raise TypeError(
            f"{name} was typed into an interactive session, where other processes cannot import it: save it in a file"
        )
    return str(Path(path).resolve())


def resolve(text: str) -> Any:
    """Import the function or class that `reference` named."""
    where, _, qualified = text.rpartition(":")
    return _named(_script(where) if os.path.isabs(where) else importlib.import_module(where), qualified)


def _named(module: ModuleType, qualified: str) -> Any:
    return reduce(getattr, qualified.split("."), module)


def _script(path: str) -> ModuleType:
    """Import the script as a module, once; the block under `if __name__ == "__main__":` does not run."""
    name = "__zero_verify_script__"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _kind(value: Any) -> str:
    return f"{value!r}" if isinstance(value, (str, int, float, type(None))) else f"of type {type(value).__name__}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
