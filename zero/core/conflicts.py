"""Options that do not go together: one table, which constructors, `zero.verify` and `zero plan` read.

Knows: the two options, the reason and the remedy of each conflict. Does not know: how options are declared. The table
of zero/contract/limits.md has the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .layout import is_accelerator
from .stage import Placement


@dataclass(frozen=True)
class Conflict:
    """Two options that do not go together. Text in braces stands for values of ``o``, the record that has both.

    ``exists`` returns whether a record has the conflict; by default the caller has found it.
    """

    option: str
    other: str
    why: str
    remedy: str
    exists: Callable[[Any], object] = lambda o: True

    def text(self, **values: Any) -> str:
        """Return the text of an error. ``values``: of the text in braces."""
        return f"{self.option} {self.other}: {self.why}: {self.remedy}".format(**values)


def check(conflicts: Sequence[Conflict], options: Any) -> None:
    """Raise `ValueError` for the first of the conflicts that a record of options has."""
    for conflict in conflicts:
        if conflict.exists(options):
            raise ValueError(conflict.text(o=options))


def _is_whole(options: Any) -> bool:
    return options.row.parameters is Placement.WHOLE


NO_UNITS = "with stage {o.stage}", "no unit is gathered", "leave it out, since it is for stage 3"
OF_MODULE = (
    "without a module",
    "it needs the modules that hold the parameters",
    "pass the module itself, or parameters and module=model",
)
TWICE = "both say which ranks share a copy"

IN_BITS = Conflict(
    "rounding=",
    'with partition="block"',
    "a class with states for blocks of elements keeps them in fewer bits by itself",
    "leave out rounding= or partition=",
    lambda o: o.rounding is not None and o.partition == "block",
)
OF_SHARDING = (
    Conflict(
        "sharding_factor={o.sharding_factor}",
        "with stage {o.stage}",
        "it shards nothing",
        "leave sharding_factor= out",
        lambda o: o.sharding_factor is not None and o.row.states is Placement.WHOLE,
    ),
    Conflict(
        "reshard_after_forward={o.reshard_after_forward!r}",
        *NO_UNITS,
        lambda o: o.reshard_after_forward is not True and _is_whole(o),
    ),
)
"""Of a `ShardingOptions` that ranks have compared: if one of them alone has such a conflict, all say so."""

OF_OPTIONS = (
    Conflict("units=", *NO_UNITS, lambda o: o.units is not None and _is_whole(o)),
    Conflict("prefetch_depth={o.prefetch_depth}", *NO_UNITS, lambda o: o.prefetch_depth != 1 and _is_whole(o)),
    Conflict(
        'Offload(parameters="cpu")',
        "with stage {o.stage}",
        "forwards use whole parameters where they lie: there is no gather before which a shard could be copied",
        "leave parameters= out, since it is for stage 3",
        lambda o: o.offloads_parameters and _is_whole(o),
    ),
)
"""Of a `ShardingOptions`."""

FACTOR_OF_MESH = Conflict(
    "mesh=",
    "with sharding_factor=",
    TWICE,
    "pass mesh= alone, or process_group= and sharding_factor= without mesh=",
    lambda o: o.mesh is not None and o.sharding_factor is not None,
)
OF_CONFIG = (
    Conflict(
        "mesh=",
        "with process_group=",
        TWICE,
        "pass mesh= alone, or process_group= and sharding_factor= without mesh=",
        lambda o: o.mesh is not None and o.process_group is not None,
    ),
    FACTOR_OF_MESH,
    Conflict(
        'bucket_cap_mb="auto"',
        "without a module",
        "it depends on the sizes of units",
        "pass the module itself, or parameters and module=model, or a number of MiB",
        lambda o: o.bucket_cap_mb == "auto" and o.module is None,
    ),
)
"""Of the arguments of a `ZeroOptimizer` that depend on its module and its ranks."""

OF_OFFLOAD = (
    Conflict(
        "Offload(folder)",
        'with parameters="cpu"',
        "a step copies weights and states of a bucket to the GPU, and a copy from a file waits",
        'give states="cpu", too',
        lambda o: o.parameters and not o.on_host,
    ),
    Conflict(
        'Offload(step="cpu")',
        'without parameters="cpu"',
        "weights and gradients are on the GPU, and would be copied to the host for the step",
        'give parameters="cpu", too',
        lambda o: o.step and not o.parameters,
    ),
)
"""Of an `Offload`."""

OF_PLAN = (
    IN_BITS,
    Conflict(
        "Offload",
        "with a class of torchao in zero plan, {o.optimizer!r}",
        "offload moves states that are as large as their parameter; those for blocks of elements stay where they are",
        "leave offload= out",
        lambda o: o.quantized and o.offload,
    ),
    Conflict(
        'Offload(step="cpu")',
        "with Muon in zero plan, {o.optimizer!r}",
        "the plan has no rate for products of matrices on the host",
        "leave step= out",
        lambda o: o.steps_on_host and len(o.classes) > 1,
    ),
    Conflict(
        'Offload("cpu")',
        "with parameters on the CPU in zero plan",
        "the states are there already",
        "leave offload= out",
        lambda o: o.states_on == "host" and not is_accelerator(o.device),
    ),
)
"""Of a `PlanSetting`."""

OF_SECONDS = (
    Conflict(
        "rounding=",
        "in the seconds of a plan",
        "the plan has the bytes, and no time for a step that rounds yet",
        "leave rounding= out",
        lambda o: o.rounding is not None,
    ),
)
"""Of a `PlanSetting` whose step is simulated."""

BLOCKS = Conflict(
    "rounding=",
    "with blocks= of a param group ({name!r})",
    "random bits follow from the number of a parameter, and a block has none of its own",
    "leave out rounding= or blocks=",
)
CUT_BLOCKS = Conflict(
    "blocks={blocks!r} of param group {number}",
    "with partition={partition!r}",
    "each block has one owner, and this partition cuts them",
    'give the group partition="parameter", or leave blocks= out',
)
MODES = Conflict(
    "rounding=",
    "with {name}, a class that has train() and eval()",
    "exchanging weights of 16 bits would lose digits",
    "leave out rounding=",
)
AVERAGE = Conflict(
    'Offload(parameters="cpu")',
    "with a ShardedAverage",
    "the average would be updated on the host, where an average may have other bits than on the GPU",
    "leave parameters= out",
)
IGNORED = Conflict("ignored=", *OF_MODULE)
BY_MODULE = Conflict("mixed_precision= by patterns or by a function", *OF_MODULE)
GATHERS = Conflict("stage {o.stage}", *OF_MODULE)
CLIP_TWICE = Conflict(
    "clip_grad_norm_(over=...)",
    "with also=",
    "in a model in parts, each rank has one optimizer",
    "leave one of them out",
)
REPLICATED = Conflict(
    "clip_grad_norm_(replicated=...)",
    "without over=",
    "it is about parameters that each rank of over= has",
    "pass over=, too",
)
JOINT_CLIP = Conflict(
    "clip_grad_norm_(also=...)",
    "inside join()",
    "a rank without batches follows the calls of one optimizer",
    "clip each by itself, or give all ranks as many batches",
)
CONFLICTS = (
    *(*OF_SHARDING, *OF_OPTIONS, *OF_CONFIG, *OF_OFFLOAD, *OF_PLAN, *OF_SECONDS),
    *(BLOCKS, CUT_BLOCKS, MODES, AVERAGE, IGNORED, BY_MODULE, GATHERS, CLIP_TWICE, REPLICATED, JOINT_CLIP),
)
