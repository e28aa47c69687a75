"""The one process that runs steps on a device under one variant, with and without torch's profiler.

    warm steps | step step step ... wait | profiler: step step wait | memory history: step wait

Knows: steps, the profiler, the format of its traces. Does not know: its parent process, or the results of other runs.
Started as `python -m benchmarks.trace_rank JOB MEETING PARENT`. It prints a line of JSON.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .answered import join_fake_group
from .gpu_rank import clock
from .host_job import HostJob, Traced
from .host_systems import loop
from .llama import tokens
from .rank import end_with

PROFILED = 2  # steps
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
HISTORY = 200_000  # allocations and frees


def busy(events: Iterable[dict[str, Any]]) -> tuple[int, float]:
    """Return how many events of a trace ran on the device, and the seconds in which at least one did."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") in ON_DEVICE)
    seconds, until = 0.0, float("-inf")
    for begin, end in spans:
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return len(spans), seconds / 1e6


def run(job: HostJob) -> Traced:
    """Run the steps of the job's only variant, and write its trace and its memory snapshot."""
    (variant,) = job.variants
    device = torch.device(job.device)
    timer = clock(device)
    start = timer.held()
    found = loop(job, variant)
    batch = tokens(job.shape, job.tokens, device)

    def step() -> None:
        loss = found.forward(batch)
        torch.autograd.backward(loss)
        found.clip()
        found.step()
        found.clear()

    for _ in range(job.warm):
        step()
    timer.restart()
    begin = time.perf_counter()
    for _ in range(job.steps):
        step()
    timer.finish()
    in_a_row = (time.perf_counter() - begin) / job.steps
    peak = timer.most() - start
    stem = Path(job.traces) / re.sub(r"\W+", "-", f"{variant.name}-{job.tokens}")
    kernels, seconds, trace = _profiled(step, timer.finish, device, stem)
    files = [trace, *_snapshot(step, device, stem)]
    found.close()
    shape = job.shape
    return Traced(
        variant.name,
        job.ranks,
        job.device,
        shape.layers,
        shape.width,
        job.tokens,
        in_a_row,
        kernels / PROFILED,
        seconds / PROFILED,
        peak,
        " ".join(files),
    )


def _profiled(
    step: Callable[[], None], finish: Callable[[], None], device: torch.device, stem: Path
) -> tuple[int, float, str]:
    """Return the number of kernels of some steps, the seconds in which one ran, and the name of the trace's file."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    finish()
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            step()
        finish()
    path = stem.with_suffix(".trace.json.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as trace:
        return (*busy(json.load(trace)["traceEvents"]), path.name)


def _snapshot(step: Callable[[], None], device: torch.device, stem: Path) -> list[str]:
    """Write every allocation of a step, for https://pytorch.org/memory_viz. Return the name of the file."""
    if device.type != "cuda":
        return []
    memory: Any = torch.cuda.memory  # torch documents these two names, and annotates neither
    memory._record_memory_history(max_entries=HISTORY, stacks="python")
    step()
    torch.cuda.synchronize(device)
    path = stem.with_suffix(".snapshot.pickle")
    memory._dump_snapshot(str(path))
    memory._record_memory_history(enabled=None)
    return [path.name]


def main(job: HostJob, parent: int) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    join_fake_group(job.ranks)
    print(json.dumps(asdict(run(job))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(HostJob.from_json(sys.argv[1]), int(sys.argv[3]))
