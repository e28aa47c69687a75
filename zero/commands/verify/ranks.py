"""The processes of `zero.verify`: the plain loop, twice, and then the same steps on ranks.

Knows: the comparison, the place of an error, the time limit of each part. Does not know: how processes are started, the
steps of a loop (`zero.job`). A folder holds the `Comparison` and the results. ``loop`` is in the settings of a process:

    loop    processes      what they do
    plain   one            writes step-N.pt: the parameters of the plain loop after each step
    again   another one    compares with these after every step, and writes a `Run`
    ranks   W              compare with these after every step, and write a `Run` for each stage and number of ranks
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import collectives
import zero

from ...core.parameter_specs import is_copied, named_parameters
from ...job import LoadedJob, load, save
from ..console import counted
from ..runner import process_group, record_error, run_rank
from .bit_diff import Difference, Run, first_difference
from .verification import COMPARISON, RUNS, Comparison

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


def _compared_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, complex ones as real numbers. Frozen tensor subclasses are left out: nothing
    writes to them, and no file can hold them."""
    return {
        name: torch.view_as_real(parameter.detach().resolve_conj()) if parameter.is_complex() else parameter
        for name, parameter in named_parameters(model)
        if is_copied(parameter)
    }


class Verifier:
    """The loops of a verification over the `Comparison` in its folder."""

    def __init__(self, folder: Path, watchdog: Watchdog) -> None:
        self._folder, self._watchdog = folder, watchdog
        watchdog.at("the imports")
        self._asked: Comparison = load(folder / COMPARISON)
        torch.set_num_threads(self._asked.threads)

    def plain(self) -> None:
        """Run the plain loop, and write its parameters after each step. Raises ValueError if it would prove nothing."""
        training = self._loaded("the plain loop", seed=1)
        for step in training.plain_steps():
            parameters = _compared_parameters(training.model)
            if step == 0:  # trained parameters alone: a frozen mask may hold infinities
                finite = [name for name, p in parameters.items() if p.requires_grad and p.isfinite().all()]
            for name in finite:
                if not parameters[name].isfinite().all():
                    raise ValueError(
                        f"{name!r} holds NaN or infinity after step {step}: training that fails shows nothing"
                    )
            copies = {name: parameter.detach().cpu().contiguous().clone() for name, parameter in parameters.items()}
            torch.save(copies, self._folder / f"step-{step}.pt")
        if step and first_difference(self._plain(0), copies) is None:
            raise ValueError(f"no parameter has moved after {step} steps: is the learning rate 0, or is all frozen?")

    def again(self) -> None:
        """Run the plain loop again, and compare it with the first one. It runs in another process, since for example
        the order of a set differs between processes. A step of another loop comes before it, since counters of the
        user's code continue from one loop to the next, as they do from stage to stage on the ranks."""
        name = "the plain loop, again"
        next(itertools.islice(self._loaded(name, seed=2).plain_steps(), 1, None))
        again = self._loaded(name, seed=2)
        for step in again.plain_steps():
            difference = first_difference(self._plain(step), _compared_parameters(again.model))
            if difference is not None:
                break
        self._report(again, None, 1, step, {0: difference} if difference else {})

    def ranks(self) -> None:
        """Run every stage on every number of ranks, the largest first, so that a process can end after its last
        group."""
        rank, limit = int(os.environ["RANK"]), timedelta(seconds=2 * self._watchdog.limit)
        for size in sorted(self._asked.world_sizes, reverse=True):
            if rank >= size:
                return
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
            self._watchdog.at(f"{size} ranks, joining their group")
            store = dist.FileStore(str(self._folder / f"world-{size}"), size)  # type: ignore[attr-defined]
            group = process_group(self._asked.device, store=store, rank=rank, world_size=size, timeout=limit)
            with group, self._watchdog.locating():
                for stage in self._asked.stages:
                    self._on_ranks(stage, size)

    def _on_ranks(self, stage: int, size: int) -> None:
        """Take the steps at a stage, up to the first difference from the plain loop. All ranks must call it."""
        name, shape = f"stage {stage} on {counted(size, 'rank')}", self._asked.mesh
        training = self._loaded(name, 3 + int(os.environ["RANK"]), stage)
        training.at("init_device_mesh(...)")
        mesh = None if shape is None else init_device_mesh(self._asked.device, shape)
        for step, optimizer in training.sharded_steps(mesh=mesh):
            with optimizer.gathered():
                mine = first_difference(self._plain(step), _compared_parameters(training.model))
            save(mine, written := io.BytesIO())
            answers = enumerate(map(load, map(io.BytesIO, optimizer.exchange(written.getvalue()))))
            differences = {rank: difference for rank, difference in answers if difference is not None}
            if differences:
                break
        optimizer.close()
        if optimizer.rank == 0:
            self._report(training, stage, size, step, differences)

    def _loaded(self, name: str, seed: int, stage: int | None = None) -> LoadedJob:
        """Load the job anew: the user's code may change its micro-batches, and a class its arguments."""
        job: Comparison = load(self._folder / COMPARISON)
        if stage is not None:
            job = replace(job, options=job.options.at_stage(stage))
        return LoadedJob(job, seed, lambda place: self._watchdog.at(f"{name}, {place}"))

    def _report(
        self, loaded: LoadedJob, stage: int | None, size: int, step: int, differences: Mapping[int, Difference]
    ) -> None:
        """Print the result of a run, and write it. ``differences``: by rank."""
        numel = sum(parameter.numel() for parameter in loaded.model.parameters())
        first = next(iter(differences.values()), None)
        run = Run(stage, size, step, numel, tuple(differences), first, loaded.several_backwards)
        save(run, self._folder / f"run-{len(list(self._folder.glob(RUNS))):06}.pt")
        if not self._asked.quiet:
            print(run, flush=True)

    def _plain(self, step: int) -> dict[str, Tensor]:
        """Load the parameters of the plain loop after a step."""
        parameters: dict[str, Tensor] = torch.load(self._folder / f"step-{step}.pt", weights_only=True, mmap=True)
        return parameters


def work(settings: dict[str, Any]) -> None:
    """Run the loop of the settings in this process. An error names its place."""
    watchdog = Watchdog(settings["timeout"])
    with watchdog.locating():
        getattr(Verifier(Path(settings["folder"]), watchdog), settings["loop"])()


if __name__ == "__main__":
    sys.exit(run_rank(work))
