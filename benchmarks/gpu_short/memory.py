"""Sections a and e: how fast an update moves memory, and how much a step takes.

    a   torch's fused AdamW on flat tensors, by the size of a bucket and by how many a call has: it decides how large
        buckets are, and whether one step for several buckets is worth its code
    e   the peak of a step at world size 1, and what the caching allocator reserves for it. Each kind of allocator is a
        process of its own: `python -m benchmarks.gpu_short.memory JOB` prints a row a line

Knows: memory of a device. Does not know: how a system is made.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from ..systems import FSDP2, ON_A_DEVICE, PLAIN, How
from .clock import Host, clock
from .job import ROOT, Row, ShortJob
from .one_rank import TOKENS, WARM, Runner, join_alone, model_of, tokens_of

MIB = 1 << 20
PASSES = 7  # of a fused AdamW over memory: it reads parameter, gradient and two states, and writes all but the gradient
SIZES, IN_A_CALL = (1, 4, 16, 25, 64, 128, 256), (1, 4, 16, 64)  # MiB of a bucket in bf16; buckets of 4 MiB in a call
REPEATS = 5
SYSTEMS = (PLAIN, FSDP2, "zero 0", "zero 2", "zero 3")
ALLOCATORS = {"default": "", "expandable segments": "expandable_segments:True"}
LIMIT = 60.0  # seconds of a process


def updates(job: ShortJob) -> Iterator[Row]:
    """Yield a row for a copy, for each size of a bucket, and for each number of buckets in a call."""
    timer, total = clock(job.device), (8 if job.quick else 1024) * MIB
    source, target = (torch.zeros(total, dtype=torch.uint8, device=job.device) for _ in range(2))
    speed = 2 * total / _timed(timer, lambda: target.copy_(source))[0]
    yield {"what": "copy", "mib": total / MIB, "in_a_call": 1, "bytes_a_second": speed, "host_us": 0.0}
    first = 2 if job.quick else None
    cases = [("bucket", size, 1) for size in SIZES[:first]] + [("buckets in a call", 4, n) for n in IN_A_CALL[:first]]
    for what, size, number in cases:
        yield _update(job, timer, what, size, number, calls=max(1, total // 4 // (size * MIB * number)))


def _update(job: ShortJob, timer: Host, what: str, size: int, in_a_call: int, calls: int) -> Row:
    """Step ``calls`` optimizers of ``in_a_call`` buckets each, one after the other, and return what that took."""
    numel = size * MIB // 2
    optimizers = []
    for _ in range(calls):
        tensors = [torch.randn(numel, device=job.device).bfloat16().requires_grad_() for _ in range(in_a_call)]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        optimizers.append(torch.optim.AdamW(tensors, lr=1e-4, fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    seconds, host = _timed(timer, step)
    moved = PASSES * 2 * numel * in_a_call * calls
    return {
        "what": what,
        "mib": size,
        "in_a_call": in_a_call,
        "bytes_a_second": moved / seconds,
        "host_us": host / calls * 1e6,
    }


def _timed(timer: Host, call: Callable[[], object]) -> tuple[float, float]:
    """Return the device's seconds of a call, and the host's until it has returned: medians."""
    device, host = [], []
    for _ in range(REPEATS + 1):
        timer.finish()
        begin, started = timer.mark(), time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
        end = timer.mark()
        timer.finish()
        device.append(timer.between(begin, end))
    return median(device[1:]), median(host[1:])  # the first one makes the states


def peaks(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each system, by the kind of allocator."""
    for name, setting in ALLOCATORS.items():
        environment = os.environ | ({"PYTORCH_ALLOC_CONF": setting} if setting else {})
        command = [sys.executable, "-m", "benchmarks.gpu_short.memory", job.to_json()]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
        for line in done.stdout.splitlines():
            yield {"allocator": name, **json.loads(line)}
        if done.returncode:
            raise RuntimeError(f"allocator {name!r}: {done.stderr.strip()[-500:]}")
        if job.device == "cpu":
            return  # torch's allocator of the CPU has no such setting


def rows(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each system."""
    timer = clock(job.device)
    join_alone(timer)
    for system in SYSTEMS:
        yield _row(job, timer, system)
        gc.collect()
    dist.destroy_process_group()


def _row(job: ShortJob, timer: Host, system: str) -> Row:
    timer.restart()
    start = timer.held()
    runner = Runner(system, ON_A_DEVICE[system].build(model_of(job), How(None)))
    batch = tokens_of(job, TOKENS[0])
    for number in range(WARM + 1):
        if number == WARM:
            timer.restart()
        runner.step(batch)
    timer.finish()
    reserved, retries = timer.reserved()
    return {
        "system": system,
        "peak": timer.most() - start,
        "kept": timer.held() - start,
        "reserved": reserved,
        "retries": retries,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows(ShortJob.from_json(sys.argv[1])):
        print(json.dumps(row), flush=True)
