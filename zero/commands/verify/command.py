"""`zero verify MODULE:FUNCTION`: calls `zero.verify` with the arguments that a function of the user returns.

Knows: its flags, fields of a frozen dataclass; how to find the function, and which arguments flags replace. Does not
know: which values are valid, or what is verified.
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ...config import Offload
from ...core.rounding import StochasticRounding
from ...job import resolve
from ..runner import checking_input
from .verification import check_process, verify


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The settings of `zero verify`: a function, and arguments of `zero.verify` that replace those that it returns."""

    GROUPS: ClassVar = {
        "What is run": (
            *("stages", "world_sizes", "mesh", "collective", "bucket_cap_mb", "offload", "rounding"),
            *("micro_batches", "max_norm"),
        ),
        "Where": ("device", "threads", "timeout"),
    }
    EXAMPLES: ClassVar = (
        "zero verify my_model:arguments",
        "# with my_model.py in this folder:",
        "#   def arguments():",
        "#       return dict(build_model=build, loss_fn=loss, batches=batches, lr=1e-3)",
        "zero verify my_model:arguments --stages 3 --world-sizes 2,4 --collective pairwise",
        "# list all arguments of zero.verify",
        "python -c 'import zero; help(zero.verify)'",
    )

    function: Annotated[
        str,
        "function that takes nothing and returns a dict of zero.verify's arguments; flags override them; the current "
        "directory is importable",
        "MODULE:FUNCTION",
    ]
    stages: Annotated[tuple[int, ...] | None, "stages to run, as in 0,3; default: all"] = None
    world_sizes: Annotated[tuple[int, ...] | None, "numbers of ranks, as in 2,4; default: 1,2,3"] = None
    mesh: Annotated[tuple[int, ...] | None, "replicas and ranks that share each, as in 2,3, instead of world sizes"] = (
        None
    )
    collective: Annotated[str | None, "algorithm that moves the buckets; default: auto"] = None
    bucket_cap_mb: Annotated[float | Literal["auto"] | None, "size of a bucket in MiB, or auto"] = None
    offload: Annotated[Offload | None, "as of zero train; cpu,parameters=cpu: with --stages 3"] = None
    rounding: Annotated[StochasticRounding | None, "seed of stochastic rounding, of a model in bf16"] = None
    micro_batches: Annotated[int | None, "micro-batches per step, over all ranks"] = None
    max_norm: Annotated[float | None, "largest global gradient norm; default: no clipping"] = None
    device: Annotated[Literal["cpu", "cuda"] | None, "default: cuda if the host has a GPU for each rank, else cpu"] = (
        None
    )
    threads: Annotated[int | None, "compute threads per rank (the number changes bits); default: 1"] = None
    timeout: Annotated[float | None, "most seconds for a micro-batch or an update; default: 300"] = None


def run(config: VerifyConfig) -> int:
    """Verify, and return the exit code."""
    sys.path.insert(0, os.getcwd())
    given = {name: value for name, value in vars(config).items() if value is not None and name != "function"}
    with checking_input():
        check_process("zero verify")
        arguments = _arguments(config.function)
        if "build_model" not in arguments:
            near = difflib.get_close_matches("build_model", arguments, 1)
            meant = f" (did you mean that by {near[0]!r}?)" if near else ""
            raise ValueError(
                f"{config.function}() returned no 'build_model', the function that builds the model{meant}"
            )
    with checking_input(ValueError, TypeError):
        return 0 if verify(**{**arguments, **given}).ok else 1


def _arguments(text: str) -> dict[str, Any]:
    """Import and call the function. Return the arguments of `verify`."""
    if not all(text.partition(":")):
        raise ValueError(f"{text!r} must be MODULE:FUNCTION, as in `zero verify my_model:arguments`")
    try:
        arguments = resolve(text)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text}() failed in {os.getcwd()}: {type(error).__name__}: {error}") from error
    if not isinstance(arguments, dict):
        raise TypeError(f"{text}() must return a dict of zero.verify's arguments, not {type(arguments).__name__}")
    return arguments
