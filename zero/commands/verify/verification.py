"""`zero.verify`: a user's own model, at each stage and number of ranks, against the user's own plain loop.

Knows: the public function, and the order: the plain loop, twice, each time in a new process; then all stages on the
ranks. Does not know: what the processes do (`ranks`), or how they get their job (`zero.job`).
"""

from __future__ import annotations

import copy
import math
import operator
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...config import ShardingOptions
from ...core.conflicts import FACTOR_OF_MESH, IN_BITS, check
from ...core.stage import STAGES
from ...core.units import Given
from ...job import Job, integers, load, save
from ...optimizer import ZeroOptimizer
from ...precision import MixedPrecision
from ...step.arguments import merged
from ..console import counted
from ..runner import RankError, launch_ranks, started_by_us
from .bit_diff import Run

NOT_DETERMINISTIC = (
    "The model itself is not deterministic, so there is nothing to compare the stages with. If it draws random numbers "
    "(dropout), seed them for each micro-batch: torch.manual_seed(...) in loss_fn, from the batch."
)
BY_ROUNDS = (
    "loss_fn runs a backward itself. Several backwards of a micro-batch are added up by rounds: the first one of each "
    "rank, then the second of each. The plain loop adds one micro-batch after the other, which on several ranks is "
    "another sum. Return the sum of the losses instead, for one backward."
)
BUILT_TWICE = (
    "build_model() returns different parameters each time, so there is nothing to compare the stages with. Seed its "
    "random generators; torch's own one is seeded before each call."
)
WORLD_SIZES = (1, 2, 3)  # if the caller names none
COMPARISON, RUNS = "comparison.pt", "run-*.pt"  # files of a verification
OPTIONS = frozenset(option.name for option in fields(ShardingOptions)) - {"stage"}


@dataclass(frozen=True, kw_only=True)
class Comparison(Job):
    """A job, and the stages and numbers of ranks at which it is compared with the plain loop.

    As text it is the first line that `verify` prints. ``mesh``: of all ``world_sizes``, which then are one.
    """

    stages: tuple[int, ...]
    world_sizes: tuple[int, ...]
    mesh: tuple[int, ...] | None
    quiet: bool

    def __str__(self) -> str:
        collective, offload = self.options.collective, self.options.offload
        parts = [
            f"{self.optimizer_class.__name__}, first in the plain loop, twice",
            f"stages: {', '.join(map(str, self.stages))}",
            f"ranks: {', '.join(map(str, sorted(self.world_sizes, reverse=True)))}",
            f"micro-batches a step: {self.micro_batches}",
            "" if self.mesh is None else f"mesh: {' x '.join(map(str, self.mesh))}",
            "" if collective == "auto" else f"collective: {getattr(collective, '__qualname__', collective)}",
            "" if offload is None else offload.kind,
            "" if self.device == "cpu" else "on GPUs",
        ]
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: the plain loop compared with itself, and a run for each stage and number of ranks.

    ``print`` shows the table.

    Attributes:
        plain: the plain loop, compared with itself.
        runs: the runs in order, none if the two plain loops differ. A run has ``stage``, ``world_size``, ``ok``, and
            ``difference``: the first element that differs, or None.
    """

    plain: Run
    runs: tuple[Run, ...]

    @property
    def ok(self) -> bool:
        """Whether every run has the bits of the plain loop."""
        return self.plain.ok and all(run.ok for run in self.runs)

    @property
    def conclusion(self) -> str:
        """The last line of the table, and a second line if the loss runs several backwards per micro-batch."""
        if not self.plain.ok:
            verdict = NOT_DETERMINISTIC if self.plain.step else BUILT_TWICE
        elif wrong := sum(not run.ok for run in self.runs):
            verdict = f"{wrong} of {len(self.runs)} runs differ from the plain loop"
        else:
            verdict = f"no bit differs from the plain loop in {counted(len(self.runs), 'run')}"
        return f"{verdict}\n{BY_ROUNDS}" if self.plain.several_backwards else verdict

    def __str__(self) -> str:
        return "\n".join(map(str, (self.plain, *self.runs, self.conclusion)))


def verify(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any] | Callable[[], Sequence[Any]],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    stages: Sequence[int] = tuple(STAGES),
    world_sizes: Sequence[int] = WORLD_SIZES,
    mesh: Sequence[int] | None = None,
    micro_batches: int | None = None,
    max_norm: float | None = None,
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    ignored: Callable[[nn.Module], Given] | None = None,
    threads: int = 1,
    timeout: float = 300.0,
    device: Literal["cpu", "cuda"] | None = None,
    quiet: bool = False,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Verification:
    """Train a model by the plain loop and by `ZeroOptimizer`, and find where the first bit of a parameter differs.

    The plain loop runs twice, each time in a new process, to check that the model itself is deterministic. Then each
    stage runs on each number of ranks (local processes), and is compared after every step. A line is printed for each
    run as it ends. Torch's random generator is seeded before ``build_model()``, and differently in every process after
    it: ``loss_fn`` must seed dropout itself, from the batch. Temporary files take the size of the parameters once per
    step.

    The processes import the functions and classes. These must be at the top level of a module, or of the script, which
    then calls ``verify`` under ``if __name__ == "__main__":``.

    Args:
        build_model: returns the model, the same at each call.
        batches: micro-batches in the order of the plain loop, made of tensors, numbers, text and collections of these;
            or a function that returns any micro-batches. Their number is a multiple of ``micro_batches``, which each
            step takes.
        optimizer_class: a `torch.optim` class.
        loss_fn: (model, micro-batch) -> scalar loss. Default: ``model(*batch)`` for a tuple or list, ``model(**batch)``
            for a mapping, else ``model(batch)``.
        stages: the stages to run.
        world_sizes: the numbers of ranks to run them on.
        mesh: the lengths of the dimensions of a `DeviceMesh`, as in (2, 3): two replicas, sharded over three ranks
            each. Stages then run on this mesh, in place of ``world_sizes``.
        micro_batches: the number of micro-batches per step, over all ranks, by which the summed gradient is divided.
            None: the least common multiple of ``world_sizes``.
        max_norm: clip the gradients to this norm, in the plain loop by `zero.clip_grad_norm_`; None: no clipping.
        param_groups: a function that takes the model and returns its param groups; each may have its own
            ``optimizer_class``. Default: one group of all parameters.
        ignored: a function that takes the model and returns the argument of `ZeroOptimizer`. No loop trains these.
        threads: intra-op threads per process; their number changes bits.
        timeout: the most seconds for building the model, for a micro-batch, or for an update.
        device: "cpu" (over gloo) or "cuda" (over NCCL); the model and the batches' tensors are moved there. None:
            "cuda" if this host has a GPU for each rank, else "cpu".
        quiet: print nothing.
        optimizer_kwargs: further arguments of ``optimizer_class``, which may have names of other arguments.
        arguments: options of `ZeroOptimizer`, which describes them: ``units``, ``reshard_after_forward`` and
            ``prefetch_depth`` (at stage 3 alone), ``sharding_factor`` (not at stage 0), ``bucket_cap_mb``,
            ``collective``, ``offload``, ``partition``; with ``mixed_precision`` the plain loop has a 16-bit model, or
            modules, and its own fp32 weights, and with ``rounding`` it steps by `StochasticRounding.step`. Every other
            keyword goes to ``optimizer_class``; where that has one of these names, use ``optimizer_kwargs``.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RuntimeError: a process failed, or the plain loop proved nothing (a trained parameter turned NaN or infinite, or
            none changed). The message names the place; the cause has the traceback of the process.
    """
    from ...examples.train import choose_device  # a script, which imports `zero`

    check_process("verify()")
    shape = None if mesh is None else _shape(mesh, world_sizes)
    sizes = integers(world_sizes, "world_sizes") if shape is None else (math.prod(shape),)
    stage_numbers = integers(stages, "stages", least=0)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {device!r}")
    try:
        place, note = choose_device(device, max(sizes), torch.cuda.device_count())
    except SystemExit as error:
        raise ValueError(str(error)) from None
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    given = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    options = ShardingOptions(stage=max(stage_numbers), **given)
    check([IN_BITS], options)
    if not (options.units is None or callable(options.units)):
        raise TypeError(f"units must be a function of a module that returns a bool, not {options.units!r}")
    if shape is not None and options.sharding_factor is not None:
        raise ValueError(FACTOR_OF_MESH.text())
    for ranks in sizes if shape is None else shape[-1:]:
        options.reshard_group_size(ranks)
    for stage in stage_numbers:
        options.at_stage(stage)
    asked = Comparison(
        options=options,
        build_model=build_model,
        batches=batches,
        optimizer_class=optimizer_class,
        optimizer_kwargs=merged(arguments, optimizer_kwargs),
        param_groups=param_groups,
        ignored=ignored,
        loss_fn=loss_fn,
        micro_batches=math.lcm(*sizes) if micro_batches is None else micro_batches,
        max_norm=max_norm,
        threads=threads,
        device=place,
        stages=stage_numbers,
        world_sizes=sizes,
        mesh=shape,
        quiet=quiet,
    )
    _try_class(asked)
    with tempfile.TemporaryDirectory(prefix="zero-verify-") as name:
        save(asked, Path(name, COMPARISON))
        for line in (note, str(asked)):
            if line and not quiet:
                print(line, flush=True)
        plain, *runs = _run(Path(name), asked, timeout)
    result = Verification(plain, tuple(runs))
    if not quiet:
        print(result.conclusion, flush=True)
    return result


def check_process(caller: str) -> None:
    """Raise RuntimeError in a process that `verify`, or torchrun as one of several ranks, has started."""
    if started_by_us():
        raise RuntimeError(
            "verify() ran again in one of its own processes, which import the script that called it: put the call "
            'under `if __name__ == "__main__":`'
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(f"{caller} starts its own ranks: call it in one process, without torchrun")


def _shape(mesh: Sequence[int], world_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of the dimensions of a mesh."""
    try:
        shape = tuple(operator.index(length) for length in mesh)
    except TypeError:
        raise TypeError(f"mesh must be one or two whole numbers, not {mesh!r}") from None
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(f"mesh must be (shard,) or (replicate, shard), of numbers of at least 1, not {mesh!r}")
    if tuple(world_sizes) not in (WORLD_SIZES, (math.prod(shape),)):
        raise ValueError(f"mesh {shape} is of {math.prod(shape)} ranks: leave world_sizes={world_sizes!r} out")
    return shape


def _try_class(job: Job) -> None:
    """Let the library check the class on a throw-away module, before any process is started."""
    rule = job.options.mixed_precision
    try:
        ZeroOptimizer(
            nn.ParameterList([torch.zeros(1, 1), torch.zeros(1)]),
            job.optimizer_class,
            mixed_precision=rule if isinstance(rule, MixedPrecision) else None,  # it has none of the user's modules
            optimizer_kwargs=copy.deepcopy(job.optimizer_kwargs),
        ).close()
    except TypeError as error:
        name, words = job.optimizer_class.__name__, ", ".join(job.optimizer_kwargs)
        raise TypeError(f"{error} (what is no argument of verify() goes to {name}: {words})") from error


def _run(folder: Path, asked: Comparison, timeout: float) -> list[Run]:
    """Run the plain loops and, if they agree, the stages. The processes print each run as it ends."""
    runs: list[Run] = []
    for loop, processes in (("plain", 1), ("again", 1), ("ranks", max(asked.world_sizes))):
        try:
            settings = {"loop": loop, "folder": str(folder), "timeout": timeout}
            launch_ranks("zero.commands.verify.ranks", settings, processes)
        except RankError as error:
            cause = RuntimeError(f"in that process:\n{error.trace}") if error.trace else None
            raise RuntimeError(str(error) if loop == "ranks" else error.line) from cause
        runs = [load(file) for file in sorted(folder.glob(RUNS))]
        if not all(run.ok for run in runs):
            return runs
    if len(runs) != 1 + len(asked.stages) * len(asked.world_sizes):
        raise RuntimeError("the processes ended without an error, but before their runs: is there an os._exit()?")
    return runs
