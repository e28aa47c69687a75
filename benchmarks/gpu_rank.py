"""The one rank that trains on a device: it makes a group of its own, runs the steps, and prints the results as JSON.

    warm steps | wait step wait | wait step wait | ... | wait step step step ... wait
                 each: until the calls return, until       in a row, as a loop runs them
                 the device is done, and `step()` alone

Knows: steps, clocks and memory of a device. Does not know: its parent process, or the results of other runs. Started as
`python -m benchmarks.gpu_rank JOB MEETING PARENT`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.commands.train.model import GPT, INIT_STD, loss_fn

from .gpu_job import DTYPES, GpuJob, OnDevice
from .rank import end_with
from .step_job import CAP_MB
from .step_rank import resident
from .systems import ON_A_DEVICE, How, Training

COPIES = 10


class Host:
    """The clock and the memory of the CPU, whose work is done when a call returns."""

    backend = "gloo"

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the imports have raised

    def finish(self) -> None:
        """Wait until everything is done."""

    def restart(self) -> None:
        """Wait until everything is done, and let the peak begin anew."""
        self.finish()
        Path("/proc/self/clear_refs").write_text("5")

    def mark(self) -> Any:
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks. Call this after `finish`."""
        return float(end - begin)

    def held(self) -> int:
        """Return the bytes in use."""
        return resident("VmRSS")

    def most(self) -> int:
        """Return the peak in bytes."""
        return resident("VmHWM")


class Cuda(Host):
    """The clock and the memory of a GPU."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def restart(self) -> None:
        self.finish()
        torch.cuda.reset_peak_memory_stats()

    def mark(self) -> Any:
        cuda: Any = torch.cuda  # torch does not annotate its events
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def most(self) -> int:
        return torch.cuda.max_memory_allocated()


def clock(device: torch.device) -> Host:
    """Return the clock and the memory of a device."""
    return Cuda(device) if device.type == "cuda" else Host()


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the bytes a second that a device reads and writes when it copies ``nbytes``: the median of some copies."""
    timer = clock(device)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES + 2):  # the first two warm up
        begin = timer.mark()
        target.copy_(source)
        end = timer.mark()
        timer.finish()
        seconds.append(timer.between(begin, end))
    return 2 * nbytes / median(seconds[2:])


def _model(job: GpuJob) -> nn.Module:
    """Build the model, with the same weights under every system."""
    torch.manual_seed(0)
    with torch.device(job.device):
        model = GPT(job.shape, job.sequence)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, INIT_STD)
    return model.to(DTYPES[job.dtype])


def _batches(job: GpuJob) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that gives the next batch. Tokens are already on the device, so that a step copies none."""
    generator = torch.Generator().manual_seed(0)
    shape = (job.batch, job.sequence + 1)
    made = [torch.randint(job.shape.vocabulary, shape, generator=generator).to(job.device) for _ in range(4)]
    numbers = iter(range(1 << 30))

    def following() -> tuple[Tensor, Tensor]:
        tokens = made[next(numbers) % len(made)]
        return tokens[:, :-1], tokens[:, 1:]

    return following


def train(job: GpuJob) -> OnDevice:
    """Run the steps, and return the results."""
    device = torch.device(job.device)
    copied = copy_bandwidth(device, job.copied)
    timer = clock(device)
    start = timer.held()
    training: Training = ON_A_DEVICE[job.system].build(model := _model(job), How(CAP_MB))
    elements = sum(parameter.numel() for parameter in model.parameters())
    following = _batches(job)

    def step() -> tuple[Any, Any, Tensor]:
        inputs, targets = following()
        loss = loss_fn(training.forward(inputs), targets)
        training.backward(loss)
        before = timer.mark()
        training.step()
        after = timer.mark()
        training.clear()
        return before, after, loss.detach()

    for _ in range(job.warm):
        step()
    waited, host, update = [], [], []
    for _ in range(job.steps):
        timer.finish()
        begin = time.perf_counter()
        before, after, _ = step()
        host.append(time.perf_counter() - begin)
        timer.finish()
        waited.append(time.perf_counter() - begin)
        update.append(timer.between(before, after))
    begin = time.perf_counter()
    for _ in range(job.steps):
        *_, loss = step()
    timer.finish()
    in_a_row = (time.perf_counter() - begin) / job.steps
    peak, kept = timer.most() - start, timer.held() - start
    times = (in_a_row, median(waited), median(host), median(update))
    return OnDevice(job, elements, *times, copied, peak, kept, loss.item())


def main(job: GpuJob, meeting: str, parent: int) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    device = torch.device(job.device)
    dist.init_process_group(
        clock(device).backend,
        init_method=f"file://{meeting}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=job.timeout),
    )
    print(json.dumps(asdict(train(job))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(GpuJob.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
