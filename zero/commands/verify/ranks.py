"""The processes of `zero.verify`: the plain loop, twice, and then the same steps on ranks.

Knows: the loops, the place of an error, the time limit of each part. Does not know: how processes are started, or how
results are printed. A folder holds the `VerifySpec` and the results. ``loop`` is in the settings of a process:

    loop    processes      what they do
    plain   one            writes step-N.pt: the parameters of the plain loop after each step
    again   another one    compares with these after every step, and appends a line to runs.jsonl
    ranks   W              compare with these after every step, and append a line to runs.jsonl for each run
    elastic W              likewise, from the newest checkpoint on, until one of them kills itself, or to the end
"""

from __future__ import annotations

import faulthandler
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import collectives
import zero

from ... import CheckpointManager, ZeroOptimizer
from ...core.names import named_parameters
from ...core.parameter_specs import is_copied
from ..runner import World, process_group, record_error, run_rank
from .bit_diff import Difference, first_difference
from .reference import MixedReferenceLoop, ReferenceLoop
from .segment import Segment
from .spec import RESULTS, Run, VerifySpec, as_batches, resolve


def _folder_of(file: str | None, *parts: str) -> str:
    return os.path.join(os.path.dirname(file or ""), *parts, "")


LIBRARIES = (
    *(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")),
    *(_folder_of(file) for file in (torch.__file__, zero.__file__, collectives.__file__)),
)
WAITING = (_folder_of(torch.__file__, "distributed"), _folder_of(collectives.__file__))


class LocatedError(Exception):
    """An error with the place where it was raised."""


class Watchdog:
    """Adds the current place to errors, and ends the process if it stays at one place for too long.

    A rank that waits for others is not the one that hangs. The process group has a limit of its own for such waits.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.place = limit, "the start"
        self._main = threading.get_ident()
        self._timer = threading.Timer(limit, self._expired)
        self._last_resort = open(os.devnull, "w")  # noqa: SIM115  faulthandler holds it

    def at(self, place: str) -> None:
        self.stop()
        self.place = place
        self._timer = threading.Timer(self.limit, self._expired)
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(3 * self.limit, exit=True, file=self._last_resort)  # where no thread can run

    def stop(self) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def locate(self, error: BaseException) -> LocatedError:
        """Return an error that names the current place, with ``error`` as its cause."""
        line = _user_line(traceback.extract_tb(error.__traceback__))
        located = LocatedError(f"{self.place}: {type(error).__name__}: {error}{line}")
        located.__cause__ = error
        return located

    def _expired(self) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self._main])
        if any(frame.filename.startswith(WAITING) for frame in stack):
            return
        record_error(
            TimeoutError(
                f"{self.place}: not done after {self.limit:g} s{_user_line(stack)}; where this is no endless loop, "
                "pass a longer timeout"
            )
        )
        os._exit(1)


def _user_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Name the innermost line of the user's own code in a stack, in words."""
    frames = [frame for frame in stack if not frame.filename.startswith((*LIBRARIES, "<"))]
    return f" (at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


@dataclass
class Workload:
    """A `VerifySpec` loaded in this process: a model as built, micro-batches, the number of steps.
    ``several_backwards``: `loss_fn` ran a backward itself."""

    name: str
    spec: VerifySpec
    model: nn.Module
    batches: list[Any]
    steps: int
    several_backwards: bool = False

    def backward(self, watchdog: Watchdog, step: int, number: int) -> None:
        """Run the forward and backward of micro-batch ``number`` (from 0) of step ``step`` (from 1)."""
        index = (step - 1) * self.spec.micro_batches + number
        watchdog.at(f"{self.name}, step {step}, batches[{index}]")
        given = self.spec.loss_fn
        before = [(parameter.grad, _version(parameter.grad)) for parameter in self.model.parameters()]
        loss = (resolve(given) if given else _default_loss)(self.model, self.batches[index])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = "loss_fn(model, batch)" if given else "without loss_fn the model"
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{what} must return the loss, one element with a graph behind it, not {found}")
        pairs = zip(self.model.parameters(), before, strict=True)
        self.several_backwards |= any(p.grad is not g or _version(p.grad) != version for p, (g, version) in pairs)
        loss.backward()  # type: ignore[no-untyped-call]

    def run(self, stage: int | None, world_size: int, step: int, found: Mapping[int, Difference]) -> Run:
        """Return the result. ``found``: rank -> its difference."""
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        first = next(iter(found.values()), None)
        return Run(stage, world_size, step, numel, tuple(found), first, self.several_backwards)


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _default_loss(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _prepare(folder: Path, watchdog: Watchdog, name: str, seed: int) -> Workload:
    """Load the specification, and build the model and the batches. Torch's random generator is seeded with 0 for the
    construction and with ``seed`` for the training: a model that draws from it, and does not seed it for each
    micro-batch, is found to be non-deterministic."""
    spec = VerifySpec.load(folder)
    torch.manual_seed(0)
    watchdog.at(f"{name}, build_model()")
    model = resolve(spec.build_model)()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_model() must return an nn.Module, not {type(model).__name__}")
    watchdog.at(f"{name}, batches")
    given = spec.batches
    batches = as_batches(resolve(given)()) if isinstance(given, str) else given
    torch.manual_seed(seed)
    return Workload(name, spec, model, batches, spec.steps(len(batches)))


def reference_loop(folder: Path, watchdog: Watchdog) -> None:
    """Run the plain loop, and write its parameters after each step. Raises ValueError if it would prove nothing."""
    step, finite = 0, list[str]()
    for step, parameters in _reference_steps(_prepare(folder, watchdog, "the plain loop", seed=1), watchdog):
        if step == 0:  # trained parameters alone: a frozen mask may hold infinities
            finite = [name for name, p in parameters.items() if p.requires_grad and p.isfinite().all()]
        for name in finite:
            if not parameters[name].isfinite().all():
                raise ValueError(f"{name!r} holds NaN or infinity after step {step}: training that fails shows nothing")
        copies = {name: parameter.detach().cpu().contiguous().clone() for name, parameter in parameters.items()}
        torch.save(copies, _step_file(folder, step))
    if step and first_difference(_reference_parameters(folder, 0), _reference_parameters(folder, step)) is None:
        raise ValueError(f"no parameter has moved after {step} steps: is the learning rate 0, or is all frozen?")


def reference_loop_again(folder: Path, watchdog: Watchdog) -> None:
    """Run the plain loop again, and compare it with the first one. It runs in another process, since for example the
    order of a set differs between processes. A step of another loop comes before it, since counters of the user's code
    continue from one loop to the next, as they do from stage to stage on the ranks."""
    for step, _ in _reference_steps(_prepare(folder, watchdog, "the plain loop, again", seed=2), watchdog):
        if step == 1:
            break
    again = _prepare(folder, watchdog, "the plain loop, again", seed=2)
    for step, parameters in _reference_steps(again, watchdog):
        found = first_difference(_reference_parameters(folder, step), parameters)
        if found is not None:
            break
    _append_run(folder, again.run(None, 1, step, {0: found} if found else {}))


def _reference_steps(workload: Workload, watchdog: Watchdog) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Take the steps of the plain loop, and yield the parameters after each; step 0 is the model as built."""
    spec, model = workload.spec, workload.model
    watchdog.at(f"{workload.name}, the optimizer class")
    optimizer_class, precision = resolve(spec.optimizer_class), spec.precision
    groups = resolve(spec.param_groups)(model) if spec.param_groups else [{"params": list(model.parameters())}]
    if precision is None:
        loop = ReferenceLoop(groups, optimizer_class, spec.defaults)
    else:
        loop = MixedReferenceLoop(model, groups, optimizer_class, spec.defaults, precision)
    yield 0, _compared_parameters(model)
    for step in range(1, workload.steps + 1):
        for number in range(spec.micro_batches):
            workload.backward(watchdog, step, number)
            loop.end_micro_batch()
        watchdog.at(f"{workload.name}, step {step}, the update")
        loop.update(spec.micro_batches, spec.max_norm)
        yield step, _compared_parameters(model)


def _compared_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, complex ones as real numbers. Frozen tensor subclasses are left out: nothing
    writes to them, and no file can hold them."""
    named = {name: parameter for name, parameter in named_parameters(model) if is_copied(parameter)}
    return {
        name: torch.view_as_real(parameter.detach().resolve_conj()) if parameter.is_complex() else parameter
        for name, parameter in named.items()
    }


def all_world_sizes(folder: Path, watchdog: Watchdog) -> None:
    """Run every stage on every number of ranks, the largest first, so that a process can end after its last group."""
    spec = VerifySpec.load(folder)
    for size in sorted(spec.world_sizes, reverse=True):
        if int(os.environ["RANK"]) >= size:
            return
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
        watchdog.at(f"{size} ranks, joining their group")
        with process_group(World(size, folder / f"world-{size}", 2 * spec.timeout)):
            try:
                for stage in spec.stages:
                    run = _on_ranks(folder, watchdog, stage, size)
                    if os.environ["RANK"] == "0":
                        _append_run(folder, run)
            except Exception as error:
                raise watchdog.locate(error) from error  # recorded before the group is destroyed, which may raise


def elastic_segment(folder: Path, watchdog: Watchdog, segment: Segment) -> None:
    """Go on with an elastic run at another number of ranks."""
    spec, size = VerifySpec.load(folder), segment.sizes[-1]
    watchdog.at(f"{size} ranks, joining their group")
    meeting = folder / f"elastic-{segment.stage}-{len(segment.sizes)}"
    with process_group(World(size, meeting, 2 * spec.timeout)):
        try:
            run = _on_ranks(folder, watchdog, segment.stage, size, segment)
            if os.environ["RANK"] == "0":
                _append_run(folder, replace(run, sizes=segment.sizes))
        except Exception as error:
            raise watchdog.locate(error) from error


def _on_ranks(folder: Path, watchdog: Watchdog, stage: int, size: int, segment: Segment | None = None) -> Run:
    """Take the steps of the plain loop with `ZeroOptimizer`, up to the first difference. All ranks must call it and
    return the same result. With a ``segment`` they go on from the newest checkpoint, and save one after each step."""
    name = f"stage {stage}{'' if segment is None else ', elastic,'} on {size} rank{'s' if size > 1 else ''}"
    workload = _prepare(folder, watchdog, name, seed=3 + int(os.environ["RANK"]))
    watchdog.at(f"{name}, ZeroOptimizer(...)")
    spec = workload.spec
    optimizer = ZeroOptimizer(
        resolve(spec.param_groups)(workload.model) if spec.param_groups else workload.model,
        resolve(spec.optimizer_class),
        module=workload.model,
        stage=stage,
        divisor=spec.micro_batches,
        bucket_cap_mb=spec.bucket_cap_mb,
        mixed_precision=spec.precision,
        units=resolve(spec.units) if spec.units else None,
        **spec.defaults,
    )
    with (
        nullcontext()
        if segment is None
        else CheckpointManager(folder / f"saved-{stage}", optimizer, max_to_keep=2) as manager
    ):
        restored = None if manager is None else manager.restore(rng=False)  # the seeds are those of batches
        begin = 0 if restored is None else restored.step
        for step in range(begin, workload.steps + 1):
            if step > begin:
                with optimizer.join() if spec.micro_batches % size else nullcontext():
                    for number in range(optimizer.rank, spec.micro_batches, size):
                        workload.backward(watchdog, step, number)
                if segment is not None:
                    segment.die(folder, optimizer.rank, step, "update")
                watchdog.at(f"{name}, step {step}, the update")
                if spec.max_norm is not None:
                    optimizer.clip_grad_norm_(spec.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                if manager is not None and segment is not None:
                    manager.save(step)
                    segment.die(folder, optimizer.rank, step, "save")
            found = _differences(folder, workload, optimizer, step)
            if found:
                break
    optimizer.close()
    return workload.run(stage, size, step, found)


def _differences(folder: Path, workload: Workload, optimizer: ZeroOptimizer, step: int) -> dict[int, Difference]:
    """Compare the parameters with those of the plain loop after a step. Return rank -> its difference, on all ranks."""
    with optimizer.gathered():
        mine = first_difference(_reference_parameters(folder, step), _compared_parameters(workload.model))
    answers = [Difference.from_json(data) for data in optimizer.exchange(b"" if mine is None else mine.to_json())]
    return {rank: difference for rank, difference in enumerate(answers) if difference is not None}


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"


def _reference_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    """Load the parameters of the plain loop after a step."""
    found: dict[str, Tensor] = torch.load(_step_file(folder, step), weights_only=True, mmap=True)
    return found


def _append_run(folder: Path, run: Run) -> None:
    with (folder / RESULTS).open("ab") as file:
        file.write(run.to_json() + b"\n")


def work(settings: dict[str, Any]) -> None:
    """Run the loop of the settings in this process. An error names its place."""
    folder = Path(settings["folder"])
    spec = VerifySpec.load(folder)
    sys.path[:] = spec.path
    torch.set_num_threads(spec.threads)
    watchdog = Watchdog(spec.timeout)
    try:
        if settings["loop"] == "elastic":
            elastic_segment(folder, watchdog, Segment.from_json(settings["segment"]))
        else:
            {"plain": reference_loop, "again": reference_loop_again, "ranks": all_world_sizes}[settings["loop"]](
                folder, watchdog
            )
    except LocatedError:
        raise
    except (Exception, SystemExit) as error:
        raise watchdog.locate(error) from error
    finally:
        watchdog.stop()


if __name__ == "__main__":
    sys.exit(run_rank(work))
