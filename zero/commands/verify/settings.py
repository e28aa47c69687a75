"""The flags of `zero verify`.

Knows: the name, type and help text of every flag, as fields of a frozen dataclass. Does not know: the parser, which
values are valid, or what a flag does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ...config import Offload
from ...core.rounding import StochasticRounding

__all__ = ["VerifyConfig"]


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The settings of `zero verify`: a function, and arguments of `zero.verify` that replace those that it returns."""

    GROUPS: ClassVar = {
        "What is run": (
            "stages",
            "world_sizes",
            "mesh",
            "collective",
            "bucket_cap_mb",
            "offload",
            "rounding",
            "micro_batches",
            "max_norm",
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
