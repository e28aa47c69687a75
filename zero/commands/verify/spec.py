"""The arguments of `zero.verify` as one file for its processes, with functions by name.

Knows: which arguments are valid, how another process finds a function. Does not know: processes, loops. Nothing is
unpickled: the file is read with `weights_only=True`, functions are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from collectives import Algorithm

from ...core.rounding import StochasticRounding
from ...core.stage import STAGES, Placement
from ...precision import MixedPrecision, Patterns, Rule, checked
from ...step.clip import check_norm_arguments

FILE = "spec.pt"
RESULTS = "runs.jsonl"


@dataclass(frozen=True)
class VerifySpec:
    """The arguments of a verification. Functions are names for `resolve`; ``batches`` is a name or the list,
    ``reshard_after_forward`` a name or the value, ``collective`` the name of an algorithm or of its class,
    ``mixed_precision`` as `written_precision` has it, ``offload`` the arguments of `zero.Offload`, and
    ``rounding`` the seed of a `zero.StochasticRounding`."""

    build_model: str
    batches: str | list[Any]
    optimizer_class: str
    loss_fn: str | None
    units: str | None
    reshard_after_forward: str | int
    prefetch_depth: int
    param_groups: str | None
    ignored: str | None
    defaults: dict[str, Any]
    stages: tuple[int, ...]
    world_sizes: tuple[int, ...]
    mesh: tuple[int, ...] | None
    micro_batches: int
    max_norm: float | None
    bucket_cap_mb: float | Literal["auto"] | None
    collective: str
    mixed_precision: str | dict[str, Any] | list[tuple[str, dict[str, Any]]] | None
    offload: dict[str, Any] | None
    rounding: int | None
    threads: int
    timeout: float
    device: str
    path: list[str]
    quiet: bool

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if self.max_norm is not None:
            check_norm_arguments(self.max_norm, 2.0)
        if isinstance(self.batches, list):
            self.steps(len(self.batches))

    @property
    def precision(self) -> Rule:
        """What `zero.precision.checked` returned for the user's ``mixed_precision``."""
        written = self.mixed_precision
        if isinstance(written, str):
            return checked(resolve(written))
        if isinstance(written, list):
            return Patterns(tuple((pattern, MixedPrecision(**dtypes)) for pattern, dtypes in written))
        return None if written is None else MixedPrecision(**written)

    @property
    def stochastic_rounding(self) -> StochasticRounding | None:
        return None if self.rounding is None else StochasticRounding(self.rounding)

    def unit_arguments(self, stage: int) -> dict[str, Any]:
        """Return the arguments of `ZeroOptimizer` that say how units are chosen and gathered at a stage."""
        if STAGES[stage].parameters is Placement.WHOLE:
            return {}
        reshard = self.reshard_after_forward
        return {
            "units": resolve(self.units) if self.units else None,
            "reshard_after_forward": resolve(reshard) if isinstance(reshard, str) else reshard,
            "prefetch_depth": self.prefetch_depth,
        }

    @property
    def algorithm(self) -> str | Algorithm:
        found: str | Algorithm = resolve(self.collective) if ":" in self.collective else self.collective
        return found

    def steps(self, count: int) -> int:
        """Return the number of steps of ``count`` micro-batches. Raises ValueError if they fill no whole steps."""
        if count == 0 or count % self.micro_batches:
            raise ValueError(
                f"batches has {count} micro-batches, and a step takes {self.micro_batches} of them: give a multiple of "
                "that, or set micro_batches"
            )
        return count // self.micro_batches

    def tell(self, text: str) -> None:
        """Print a line, unless the user wants none."""
        if not self.quiet:
            print(text, flush=True)

    def save(self, folder: Path) -> None:
        torch.save(vars(self), folder / FILE)

    @staticmethod
    def load(folder: Path) -> VerifySpec:
        return VerifySpec(**torch.load(folder / FILE, weights_only=True))


def written_precision(rule: Rule) -> Any:
    """Return a checked ``mixed_precision`` as plain data. Raises `TypeError` for a function that cannot be imported."""
    if isinstance(rule, Patterns):
        return [(pattern, asdict(precision)) for pattern, precision in rule.pairs]
    if isinstance(rule, MixedPrecision):
        return asdict(rule)
    return None if rule is None else reference(rule, "mixed_precision")


def as_batches(batches: Any) -> list[Any]:
    """Return the micro-batches as a list. Raises TypeError if they are no finite collection."""
    if not hasattr(batches, "__iter__") or not hasattr(batches, "__len__") or isinstance(batches, (str, Mapping)):
        kind = type(batches).__name__
        raise TypeError(f"batches must be a sequence of micro-batches, or a function that returns one, not {kind}")
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
        raise TypeError(f"{name} must be a function or a class, not {function!r}")
    qualified, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    try:
        where, found = _where(module), _named(sys.modules[module], qualified)
    except (KeyError, AttributeError):
        where, found = "", None
    if not where or found is not function:
        raise TypeError(
            f"{name} is {qualified or repr(function)}, which other processes cannot import by name: define it with def "
            "or class at the top level of a module or a script (a lambda, a function inside a function, a partial or "
            "what was typed into an interactive session has no such name)"
        )
    return f"{where}:{qualified}"


def _where(module: str) -> str:
    """Return the name of the module, or the path of the script if it is the main module; "" if that has no file."""
    main = sys.modules["__main__"]
    if module != "__main__":
        return module
    if main.__spec__ is not None:
        return main.__spec__.name
    path = getattr(main, "__file__", None)
    return "" if path is None or not Path(path).is_file() else str(Path(path).resolve())


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
