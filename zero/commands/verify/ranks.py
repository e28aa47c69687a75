"""The processes of `zero.verify`: the plain loop, twice, and then the same steps on ranks.

Knows: the loops, the place of an error, the time limit of each part. Does not know: how processes are started. A
folder holds the `VerifySpec` and the results. ``loop`` is in the settings of a process:

    loop    processes      what they do
    plain   one            writes step-N.pt: the parameters of the plain loop after each step
    again   another one    compares with these after every step, and appends a line to runs.jsonl
    ranks   W              compare with these after every step, and append a line to runs.jsonl for each run
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import collectives
import zero

from ... import Offload, ZeroOptimizer
from ...core.names import named_parameters
from ...core.parameter_specs import is_copied
from ...core.units import Ignored
from ...precision import Precisions
from ..runner import process_group, record_error, run_rank
from .bit_diff import Difference, Run, first_difference
from .reference import MixedReferenceLoop, ReferenceLoop
from .spec import RESULTS, VerifySpec, as_batches, resolve

LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    *(os.path.dirname(module.__file__ or "") for module in (torch, zero, collectives)),
)
WAITING = (os.path.join(os.path.dirname(torch.__file__), "distributed"), os.path.dirname(collectives.__file__))


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

    def at(self, place: str) -> None:
        self.stop()
        self.place = place
        self._timer = threading.Timer(self.limit, self._expired)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Make errors of the block name the current place. At the end there is no limit any more."""
        try:
            yield
        except LocatedError:
            raise
        except (Exception, SystemExit) as error:
            line = _user_line(traceback.extract_tb(error.__traceback__))
            raise LocatedError(f"{self.place}: {type(error).__name__}: {error}{line}") from error
        finally:
            self.stop()

    def _expired(self) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self._main])
        if any(frame.filename.startswith(WAITING) for frame in stack):
            return
        late = f"{self.place}: not done after {self.limit:g} s{_user_line(stack)}"
        record_error(TimeoutError(f"{late}; where this is no endless loop, pass a longer timeout"))
        os._exit(1)


def _user_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Name the innermost line of the user's own code in a stack, in words."""
    frames = [frame for frame in stack if not frame.filename.startswith((*LIBRARIES, "<"))]
    return f" (at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


class Workload:
    """A `VerifySpec` loaded in this process: a model as built, micro-batches, the number of steps.

    Torch's random generator is seeded with 0 for the construction and with ``seed`` for the training: a model that
    draws from it, and does not seed it for each micro-batch, is found to be non-deterministic. ``several_backwards``:
    `loss_fn` ran a backward itself.
    """

    def __init__(self, folder: Path, watchdog: Watchdog, name: str, seed: int) -> None:
        """Load the specification, and build the model and the batches."""
        self.name, self.spec, self.several_backwards = name, VerifySpec.load(folder), False
        self._watchdog = watchdog
        torch.manual_seed(0)
        self.at("build_model()")
        self.model: nn.Module = resolve(self.spec.build_model)()
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"build_model() must return an nn.Module, not {type(self.model).__name__}")
        if self.spec.device != "cpu":
            self.model.to(self.spec.device)
        self.at("batches")
        given = self.spec.batches
        self._batches = as_batches(resolve(given)()) if isinstance(given, str) else given
        self.steps = self.spec.steps(len(self._batches))
        torch.manual_seed(seed)

    def at(self, place: str) -> None:
        self._watchdog.at(f"{self.name}, {place}")

    def ignored(self) -> Any:
        """Return what the user leaves out of the optimizer, or else None."""
        return resolve(self.spec.ignored)(self.model) if self.spec.ignored else None

    def groups(self) -> Any:
        """Return the param groups of the user, or else the model."""
        return resolve(self.spec.param_groups)(self.model) if self.spec.param_groups else self.model

    def backward(self, step: int, number: int) -> None:
        """Run the forward and backward of micro-batch ``number`` (from 0) of step ``step`` (from 1)."""
        index = (step - 1) * self.spec.micro_batches + number
        self.at(f"step {step}, batches[{index}]")
        given = self.spec.loss_fn
        before = [(parameter.grad, _version(parameter.grad)) for parameter in self.model.parameters()]
        batch = self._batches[index] if self.spec.device == "cpu" else _moved(self._batches[index], self.spec.device)
        loss = (resolve(given) if given else _default_loss)(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = "loss_fn(model, batch)" if given else "without loss_fn the model"
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{what} must return the loss, one element with a graph behind it, not {found}")
        pairs = zip(self.model.parameters(), before, strict=True)
        self.several_backwards |= any(p.grad is not g or _version(p.grad) != version for p, (g, version) in pairs)
        loss.backward()  # type: ignore[no-untyped-call]

    def plain_steps(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Take the steps of the plain loop, and yield the parameters after each; step 0 is the model as built."""
        spec = self.spec
        self.at("the optimizer class")
        optimizer_class, groups = resolve(spec.optimizer_class), self.groups()
        left = Ignored(self.ignored(), self.model)
        every = [parameter for parameter in self.model.parameters() if parameter not in left]
        groups = [{"params": every}] if groups is self.model else groups
        rounding, on_host = spec.stochastic_rounding, spec.offload is not None and spec.offload["step"] is not None
        if spec.precision is None and not on_host:
            loop = ReferenceLoop(groups, optimizer_class, spec.defaults, rounding)
        else:
            precisions = Precisions(spec.precision, self.model, left, rounds=rounding is not None)
            place = "cpu" if on_host else None
            loop = MixedReferenceLoop(every, groups, optimizer_class, spec.defaults, precisions, rounding, place)
        yield 0, _compared_parameters(self.model)
        for step in range(1, self.steps + 1):
            for number in range(spec.micro_batches):
                self.backward(step, number)
                loop.end_micro_batch()
            self.at(f"step {step}, the update")
            loop.update(spec.micro_batches, spec.max_norm)
            yield step, _compared_parameters(self.model)

    def report(
        self, folder: Path, stage: int | None, world_size: int, step: int, found: Mapping[int, Difference]
    ) -> None:
        """Print the result of a run, and append it to the file of results. ``found``: rank -> its difference."""
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        first = next(iter(found.values()), None)
        run = Run(stage, world_size, step, numel, tuple(found), first, self.several_backwards)
        with (folder / RESULTS).open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self.spec.tell(str(run))


def _moved(value: Any, device: str) -> Any:
    """Return a micro-batch with its tensors on the device."""
    if hasattr(value, "to"):  # also a batch of another library
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _default_loss(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _compared_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, complex ones as real numbers. Frozen tensor subclasses are left out: nothing
    writes to them, and no file can hold them."""
    named = {name: parameter for name, parameter in named_parameters(model) if is_copied(parameter)}
    return {
        name: torch.view_as_real(parameter.detach().resolve_conj()) if parameter.is_complex() else parameter
        for name, parameter in named.items()
    }


def plain_loop(folder: Path, watchdog: Watchdog) -> None:
    """Run the plain loop, and write its parameters after each step. Raises ValueError if it would prove nothing."""
    step, finite = 0, list[str]()
    for step, parameters in Workload(folder, watchdog, "the plain loop", seed=1).plain_steps():
        if step == 0:  # trained parameters alone: a frozen mask may hold infinities
            finite = [name for name, p in parameters.items() if p.requires_grad and p.isfinite().all()]
        for name in finite:
            if not parameters[name].isfinite().all():
                raise ValueError(f"{name!r} holds NaN or infinity after step {step}: training that fails shows nothing")
        copies = {name: parameter.detach().cpu().contiguous().clone() for name, parameter in parameters.items()}
        torch.save(copies, _step_file(folder, step))
    if step and first_difference(_plain_parameters(folder, 0), _plain_parameters(folder, step)) is None:
        raise ValueError(f"no parameter has moved after {step} steps: is the learning rate 0, or is all frozen?")


def plain_loop_again(folder: Path, watchdog: Watchdog) -> None:
    """Run the plain loop again, and compare it with the first one. It runs in another process, since for example the
    order of a set differs between processes. A step of another loop comes before it, since counters of the user's code
    continue from one loop to the next, as they do from stage to stage on the ranks."""
    name = "the plain loop, again"
    for step, _ in Workload(folder, watchdog, name, seed=2).plain_steps():
        if step == 1:
            break
    again = Workload(folder, watchdog, name, seed=2)
    for step, parameters in again.plain_steps():
        found = first_difference(_plain_parameters(folder, step), parameters)
        if found is not None:
            break
    again.report(folder, None, 1, step, {0: found} if found else {})


def all_world_sizes(folder: Path, watchdog: Watchdog) -> None:
    """Run every stage on every number of ranks, the largest first, so that a process can end after its last group."""
    spec = VerifySpec.load(folder)
    for size in sorted(spec.world_sizes, reverse=True):
        if int(os.environ["RANK"]) >= size:
            return
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
        watchdog.at(f"{size} ranks, joining their group")
        meeting, timeout = folder / f"world-{size}", timedelta(seconds=2 * spec.timeout)
        group = process_group(meeting, spec.device, world_size=size, timeout=timeout)
        with group, watchdog.locating():
            for stage in spec.stages:
                _on_ranks(folder, watchdog, stage, size)


def _on_ranks(folder: Path, watchdog: Watchdog, stage: int, size: int) -> None:
    """Take the steps of the plain loop with `ZeroOptimizer`, up to the first difference. All ranks must call it."""
    name = f"stage {stage} on {size} rank{'s' if size > 1 else ''}"
    workload = Workload(folder, watchdog, name, seed=3 + int(os.environ["RANK"]))
    spec, step = workload.spec, 0
    workload.at("ZeroOptimizer(...)")
    named = ("dp_replicate", "dp_shard")
    mesh = (
        None if spec.mesh is None else init_device_mesh(spec.device, spec.mesh, mesh_dim_names=named[-len(spec.mesh) :])
    )
    optimizer = ZeroOptimizer(
        workload.groups(),
        resolve(spec.optimizer_class),
        module=workload.model,
        stage=stage,
        mesh=mesh,
        divisor=spec.micro_batches,
        bucket_cap_mb=spec.bucket_cap_mb,
        collective=spec.algorithm,
        mixed_precision=spec.precision,
        offload=None if spec.offload is None else Offload(**spec.offload),
        rounding=spec.stochastic_rounding,
        **spec.unit_arguments(stage),
        ignored=workload.ignored(),
        optimizer_kwargs=spec.defaults,
    )
    found = _differences(folder, workload, optimizer, step)
    while step < workload.steps and not found:
        step += 1
        with optimizer.join() if spec.micro_batches % size else nullcontext():
            for number in range(optimizer.rank, spec.micro_batches, size):
                workload.backward(step, number)
        workload.at(f"step {step}, the update")
        if spec.max_norm is not None:
            optimizer.clip_grad_norm_(spec.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found = _differences(folder, workload, optimizer, step)
    rank = optimizer.rank
    optimizer.close()
    if rank == 0:
        workload.report(folder, stage, size, step, found)


def _differences(folder: Path, workload: Workload, optimizer: ZeroOptimizer, step: int) -> dict[int, Difference]:
    """Compare the parameters with those of the plain loop after a step. Return rank -> its difference, on all ranks."""
    with optimizer.gathered():
        mine = first_difference(_plain_parameters(folder, step), _compared_parameters(workload.model))
    answers = optimizer.exchange(json.dumps(None if mine is None else asdict(mine)).encode())
    found = {rank: Difference.from_json(json.loads(answer)) for rank, answer in enumerate(answers)}
    return {rank: difference for rank, difference in found.items() if difference is not None}


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"


def _plain_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    """Load the parameters of the plain loop after a step."""
    found: dict[str, Tensor] = torch.load(_step_file(folder, step), weights_only=True, mmap=True)
    return found


def work(settings: dict[str, Any]) -> None:
    """Run the loop of the settings in this process. An error names its place."""
    folder = Path(settings["folder"])
    spec = VerifySpec.load(folder)
    sys.path[:] = spec.path
    torch.set_num_threads(spec.threads)
    watchdog = Watchdog(spec.timeout)
    loop = {"plain": plain_loop, "again": plain_loop_again, "ranks": all_world_sizes}[settings["loop"]]
    with watchdog.locating():
        loop(folder, watchdog)


if __name__ == "__main__":
    sys.exit(run_rank(work))
