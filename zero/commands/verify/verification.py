"""`zero.verify`: a user's own model, at each stage and number of ranks, against the user's own plain loop.

Knows: the public function, and the order: the plain loop, twice, each time in a new process; then all stages on the
ranks. Does not know: what the processes do (`ranks`), or how they get their arguments (`spec`).
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collectives import Algorithm

from ...config import Offload, ShardingOptions
from ...core.rounding import StochasticRounding
from ...core.stage import STAGES, check_prefetch_depth, check_reshard
from ...core.units import Given, Predicate
from ...optimizer import ZeroOptimizer
from ...precision import MixedPrecision, PrecisionOption, checked
from ...step.arguments import check_class, merged
from .bit_diff import Run
from .spec import RESULTS, VerifySpec, as_batches, plain_data, reference, written_precision

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
        return f"{self._verdict}\n{BY_ROUNDS}" if self.plain.several_backwards else self._verdict

    @property
    def _verdict(self) -> str:
        if not self.plain.ok:
            return NOT_DETERMINISTIC if self.plain.step else BUILT_TWICE
        wrong = sum(not run.ok for run in self.runs)
        if wrong:
            return f"{wrong} of {len(self.runs)} runs differ from the plain loop"
        return f"no bit differs from the plain loop in {len(self.runs)} run{'s' if len(self.runs) > 1 else ''}"

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
    units: Predicate | None = None,
    reshard_after_forward: bool | int | Predicate = True,
    prefetch_depth: int = 1,
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    ignored: Callable[[nn.Module], Given] | None = None,
    bucket_cap_mb: float | Literal["auto"] | None = None,
    collective: str | Algorithm = "auto",
    mixed_precision: PrecisionOption = None,
    offload: Offload | None = None,
    rounding: StochasticRounding | None = None,
    threads: int = 1,
    timeout: float = 300.0,
    device: Literal["cpu", "cuda"] | None = None,
    quiet: bool = False,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    **defaults: Any,
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
        optimizer_class: a `torch.optim` class; it gets ``defaults``.
        loss_fn: (model, micro-batch) -> scalar loss. Default: ``model(*batch)`` for a tuple or list, ``model(**batch)``
            for a mapping, else ``model(batch)``.
        stages: the stages to run.
        world_sizes: the numbers of ranks to run them on.
        mesh: the lengths of the dimensions of a `DeviceMesh`, as in (2, 3): two replicas, sharded over three ranks
            each. Stages then run on this mesh, in place of ``world_sizes``.
        micro_batches: the number of micro-batches per step, over all ranks, by which the summed gradient is divided.
            None: the least common multiple of ``world_sizes``.
        max_norm: clip the gradients to this norm, in the plain loop by `zero.clip_grad_norm_`; None: no clipping.
        units, reshard_after_forward, prefetch_depth: arguments of `ZeroOptimizer` at stage 3.
        bucket_cap_mb, collective: arguments of `ZeroOptimizer`.
        param_groups: a function that takes the model and returns its param groups; each may have its own
            ``optimizer_class``. Default: one group of all parameters.
        ignored: a function that takes the model and returns the argument of `ZeroOptimizer`. No loop trains these.
        mixed_precision: argument of `ZeroOptimizer`; the plain loop then has a 16-bit model, or modules, and its own
            fp32 weights.
        offload: argument of `ZeroOptimizer`; with ``parameters="cpu"`` for ``stages=(3,)``.
        rounding: argument of `ZeroOptimizer`; the plain loop then steps by `StochasticRounding.step`.
        threads: intra-op threads per process; their number changes bits.
        timeout: the most seconds for building the model, for a micro-batch, or for an update.
        device: "cpu" (over gloo) or "cuda" (over NCCL); the model and the batches' tensors are moved there. None:
            "cuda" if this host has a GPU for each rank, else "cpu".
        quiet: print nothing.
        optimizer_kwargs: further arguments of ``optimizer_class``, which may have names of arguments of this function.
        defaults: arguments of ``optimizer_class``.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RuntimeError: a process failed, or the plain loop proved nothing (a trained parameter turned NaN or infinite, or
            none changed). The message names the place; the cause has the traceback of the process.
    """
    from ..runner import choose_device

    _check_process()
    shape = None if mesh is None else _shape(mesh, world_sizes)
    sizes = _integers(world_sizes, "world_sizes") if shape is None else (math.prod(shape),)
    stage_numbers = _integers(stages, "stages", least=0)
    place, note = choose_device(device, max(sizes), torch.cuda.device_count())
    rule = checked(mixed_precision)
    whole = rule if isinstance(rule, MixedPrecision) else None  # the throw-away module has none of the user's modules
    ours = {"bucket_cap_mb": bucket_cap_mb, "collective": collective, "mixed_precision": whole}
    arguments = merged(defaults, optimizer_kwargs)
    for stage in stage_numbers:
        ShardingOptions(stage=stage, offload=offload, rounding=rounding)
    _dry_run(optimizer_class, stage_numbers, ours, arguments)
    most_sharded = STAGES[max(stage_numbers)]
    check_prefetch_depth(prefetch_depth, most_sharded)
    for ranks in sizes if shape is None else shape[-1:]:
        check_reshard(reshard_after_forward, ranks, most_sharded)
    spec = VerifySpec(
        build_model=reference(build_model, "build_model"),
        batches=reference(batches, "batches")
        if callable(batches)
        else plain_data(as_batches(batches), "batches", "or give a function that returns them"),
        optimizer_class=reference(optimizer_class, "optimizer_class"),
        loss_fn=None if loss_fn is None else reference(loss_fn, "loss_fn"),
        units=None if units is None else reference(units, "units"),
        reshard_after_forward=reference(reshard_after_forward, "reshard_after_forward")
        if callable(reshard_after_forward)
        else reshard_after_forward,
        prefetch_depth=prefetch_depth,
        param_groups=None if param_groups is None else reference(param_groups, "param_groups"),
        ignored=None if ignored is None else reference(ignored, "ignored"),
        defaults=plain_data(arguments, "the optimizer's arguments", "leave out what is none of these"),
        stages=stage_numbers,
        world_sizes=sizes,
        mesh=shape,
        micro_batches=math.lcm(*sizes) if micro_batches is None else _integers([micro_batches], "micro_batches")[0],
        max_norm=max_norm,
        bucket_cap_mb=bucket_cap_mb,
        collective=collective if isinstance(collective, str) else reference(collective, "collective"),
        mixed_precision=written_precision(rule),
        offload=None if offload is None else {**asdict(offload), "states": os.fspath(offload.states)},
        rounding=None if rounding is None else rounding.seed,
        threads=_integers([threads], "threads")[0],
        timeout=timeout,
        device=place,
        path=[os.path.abspath(entry) for entry in sys.path],
        quiet=quiet,
    )
    listed = {
        "stages": stage_numbers,
        "ranks": sorted(sizes, reverse=True),
        "micro-batches a step": [spec.micro_batches],
    }
    settings = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in listed.items())
    settings += "" if shape is None else f"; mesh: {' x '.join(map(str, shape))}"
    settings += "" if collective == "auto" else f"; collective: {spec.collective}"
    settings += "" if offload is None else f"; {offload.kind}"
    settings += "" if place == "cpu" else "; on GPUs"
    if note is not None:
        spec.tell(note)
    spec.tell(f"{optimizer_class.__name__}, first in the plain loop, twice; {settings}")
    found = _run(spec)
    spec.tell(found.conclusion)
    return found


def _check_process() -> None:
    from ..runner import check_alone, started_by_us

    if started_by_us():
        raise RuntimeError(
            "verify() ran again in one of its own processes, which import the script that called it: put the call "
            'under `if __name__ == "__main__":`'
        )
    check_alone("verify()")


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


def _integers(values: Sequence[int], name: str, least: int = 1) -> tuple[int, ...]:
    """Return the distinct whole numbers, in their order."""
    try:
        found = tuple(dict.fromkeys(operator.index(value) for value in values))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of whole numbers, not {values!r}") from None
    if not found or min(found) < least:
        raise ValueError(f"{name} must hold numbers of at least {least}, not {values!r}")
    return found


def _dry_run(optimizer_class: Any, stages: Sequence[int], ours: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Let the library check its own arguments on a throw-away module, before any process is started."""
    check_class(optimizer_class)
    with torch.random.fork_rng(devices=[]):
        module = nn.Linear(1, 1)
    try:
        for stage in stages:
            ZeroOptimizer(module, optimizer_class, stage=stage, **ours, optimizer_kwargs=arguments).close()
    except TypeError as error:
        raise TypeError(
            f"{error} (what is no argument of verify() goes to {optimizer_class.__name__}: {', '.join(arguments)})"
        ) from error


def _run(spec: VerifySpec) -> Verification:
    """Run the plain loops and, if they agree, the stages. The processes print each run as it ends."""
    with tempfile.TemporaryDirectory(prefix="zero-verify-") as name:
        folder = Path(name)
        spec.save(folder)
        results = folder / RESULTS
        results.touch()
        _start("plain", folder, 1)
        _start("again", folder, 1)
        if all(run.ok for run in _read(results)):
            _start("ranks", folder, max(spec.world_sizes))
        runs = _read(results)
    if all(run.ok for run in runs) and len(runs) != 1 + len(spec.stages) * len(spec.world_sizes):
        raise RuntimeError("the processes ended without an error, but before their runs: is there an os._exit()?")
    return Verification(runs[0], tuple(runs[1:]))


def _start(loop: str, folder: Path, processes: int) -> None:
    from ..runner import RankError, launch_ranks

    try:
        launch_ranks("zero.commands.verify.ranks", {"loop": loop, "folder": str(folder)}, processes)
    except RankError as error:
        cause = RuntimeError(f"in that process:\n{error.trace}") if error.trace else None
        raise RuntimeError(str(error) if loop == "ranks" else error.line) from cause


def _read(results: Path) -> list[Run]:
    return [Run.from_json(json.loads(line)) for line in results.read_text().splitlines()]
