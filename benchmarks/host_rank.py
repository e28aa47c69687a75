"""The one process that times the host's work in steps under several variants, a step of each in turn.

    forward | backward | clip | step          each begins when the device is idle, so that no call waits for it

Knows: steps, clocks. Does not know: its parent process, or how results are used. Started as
`python -m benchmarks.host_rank JOB MEETING PARENT`. It prints a line of JSON for each variant.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from .answered import join_fake_group
from .gpu_rank import clock
from .host_job import PHASES, HostJob, HostTime
from .host_systems import Loop, loop
from .job import quartiles
from .llama import tokens
from .rank import end_with


class _Timer:
    """The processor time of each phase, and the wall time, of the steps of one variant."""

    def __init__(self, job: HostJob, name: str, found: Loop, finish: Callable[[], None]) -> None:
        self._job, self._name, self._loop = job, name, found
        self._finish = finish
        # on a GPU autograd calls the hooks of a backward in a thread of its own
        self._now: Callable[[], float] = time.thread_time if job.device == "cpu" else time.process_time
        self._phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._walls: list[float] = []
        self._norm = 0.0
        self._messages = 0

    def step(self, batch: Tensor, counts: bool) -> None:
        """Run one step."""
        before, begin = self._loop.messages(), time.perf_counter()
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        calls: tuple[Callable[[], object], ...] = (
            lambda: losses.append(self._loop.forward(batch)),
            lambda: torch.autograd.backward(losses[0]),
            lambda: norms.append(self._loop.clip()),
            self._loop.step,
        )
        for phase, call in zip(PHASES, calls, strict=True):
            self._finish()
            started = self._now()
            call()
            if counts:
                self._phases[phase].append(self._now() - started)
        self._finish()
        if counts:
            self._walls.append(time.perf_counter() - begin)
        self._messages = self._loop.messages() - before
        self._norm = _number(norms[0])
        losses.clear()
        self._loop.clear()

    def result(self) -> HostTime:
        totals = [sum(step) for step in zip(*self._phases.values(), strict=True)]
        job = self._job
        return HostTime(
            self._name,
            job.ranks,
            job.device,
            job.shape.layers,
            job.shape.width,
            job.tokens,
            **{phase: median(seconds) for phase, seconds in self._phases.items()},
            total=median(totals),
            low=quartiles(totals)[0],
            high=quartiles(totals)[1],
            wall=median(self._walls),
            norm=self._norm,
            buckets=self._loop.buckets(),
            messages=self._messages,
        )


def _number(norm: Tensor) -> float:
    """Return the value of a norm, which FSDP2 returns as a DTensor."""
    whole: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
    return float(norm if whole is None else whole())


def measure(job: HostJob) -> list[HostTime]:
    """Time all variants in turn. No variant is always behind the same other one."""
    finish = clock(torch.device(job.device)).finish
    loops = {variant.name: loop(job, variant) for variant in job.variants}
    timers = [_Timer(job, name, found, finish) for name, found in loops.items()]
    batch = tokens(job.shape, job.tokens, torch.device(job.device))
    for number in range(-job.warm, job.steps):
        first = number % len(timers)
        for timer in (*timers[first:], *timers[:first]):
            timer.step(batch, number >= 0)
    results = [timer.result() for timer in timers]
    for found in loops.values():
        found.close()
    return results


def main(job: HostJob, parent: int) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    join_fake_group(job.ranks)
    for result in measure(job):
        print(json.dumps(asdict(result)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(HostJob.from_json(sys.argv[1]), int(sys.argv[3]))
