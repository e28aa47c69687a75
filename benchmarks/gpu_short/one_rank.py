"""Sections a, b and e: one rank.

    a   torch's fused AdamW on flat tensors, by the size of a bucket and by how many a call has: it decides how large
        buckets are, and whether one step for several buckets is worth its code
    b   a step at world size 1, under all systems, which live in one process and step in turn
    e   the peak of a step at world size 1, and what the caching allocator reserves for it. Each kind of allocator is a
        process of its own: `python -m benchmarks.gpu_short.one_rank JOB` prints a row a line

In section b:

    turn 1   plain x 10 | plain again x 10 | DDP x 10 | ... | zero 3 x 10
    turn 2   DDP x 10 | ...                                 each turn begins with another system

The plain loop runs twice, as two models: how much one differs from the other is the noise of every other ratio, and
whether their losses are equal says whether the model itself is deterministic.

Knows: steps of a GPT under a system, clocks, memory of a device. Does not know: how a system is made.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gpt import GPT, INIT_STD, Shape, loss_fn
from ..systems import FSDP2, ON_A_DEVICE, PLAIN, How, Training
from .clock import Host, clock
from .job import ROOT, Row, ShortJob

BILLION = Shape(24, 14, 1792, 50304)  # 1.0 billion parameters
TINY = Shape(2, 2, 32, 64)
AGAIN, SMALL_BUCKETS = "plain, again", "zero 2, 25 MiB"
TOKENS = (2048, 8192)
SEQUENCE, QUICK_SEQUENCE = 512, 16
WARM, IN_A_ROW, TURNS = 3, 10, 3
MARGIN = 4 << 30  # bytes that stay free beside what the first system needs
MIB = 1 << 20
PASSES = 7  # of a fused AdamW over memory: it reads parameter, gradient and two states, and writes all but the gradient
SIZES, IN_A_CALL = (1, 4, 16, 25, 64, 128, 256), (1, 4, 16, 64)  # MiB of a bucket in bf16; buckets of 4 MiB in a call
REPEATS = 5
IN_MEMORY = (PLAIN, FSDP2, "zero 0", "zero 2", "zero 3")
ALLOCATORS = {"default": "", "expandable segments": "expandable_segments:True"}
LIMIT = 60.0  # seconds of a process


@dataclass
class Runner:
    """A model under a system."""

    name: str
    training: Training

    def step(self, tokens: Tensor) -> Tensor:
        """Run a step; return the loss."""
        loss = loss_fn(self.training.forward(tokens[:, :-1]), tokens[:, 1:])
        self.training.backward(loss)
        self.training.step()
        self.training.clear()
        return loss.detach()


def systems() -> dict[str, tuple[str, How]]:
    """Return the systems by the names of their rows."""
    default = How(None)
    rows = {PLAIN: (PLAIN, default), AGAIN: (PLAIN, default)}
    rows |= {name: (name, default) for name in ON_A_DEVICE if name != PLAIN}
    return rows | {SMALL_BUCKETS: ("zero 2", How(25.0))}


def model_of(job: ShortJob) -> nn.Module:
    """Build the model in bf16, with the same weights at each call."""
    shape, sequence = (TINY, QUICK_SEQUENCE) if job.quick else (BILLION, SEQUENCE)
    torch.manual_seed(0)
    with torch.device(job.device):
        model = GPT(shape, sequence)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, INIT_STD)
    return model.to(torch.bfloat16)


def tokens_of(job: ShortJob, count: int) -> Tensor:
    """Return sequences of so many tokens, on the device, so that a step copies none."""
    shape, sequence = (TINY, QUICK_SEQUENCE) if job.quick else (BILLION, SEQUENCE)
    generator = torch.Generator().manual_seed(0)
    rows = max(1, count // sequence) if not job.quick else 2
    return torch.randint(shape.vocabulary, (rows, sequence + 1), generator=generator).to(job.device)


def measure(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each turn of a system, by the number of tokens."""
    timer = clock(job.device)
    join_alone(timer)
    try:
        yield from _turns(job, timer)
    finally:
        gc.unfreeze()
        gc.collect()
        dist.destroy_process_group()


def join_alone(timer: Host) -> None:
    """Make the default process group of this process alone."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined] # torch does not list it
    dist.init_process_group(timer.backend, store=store, rank=0, world_size=1)


def _turns(job: ShortJob, timer: Host) -> Iterator[Row]:
    runners, needed = list[Runner](), 0
    for name, (system, how) in systems().items():
        before = timer.held()
        if timer.free() < 2 * needed + MARGIN and not job.quick:
            yield {"no_room": name, "needed": 2 * needed + MARGIN, "free": timer.free()}
            continue
        runner = Runner(name, ON_A_DEVICE[system].build(model_of(job), how))
        for _ in range(WARM):
            runner.step(tokens_of(job, TOKENS[0]))
        runners.append(runner)
        needed = max(needed, timer.held() - before)
    gc.collect()
    gc.freeze()  # so that Python does not search the objects of all systems in the steps of one
    for tokens, turn in itertools.product(TOKENS[:1] if job.quick else TOKENS, range(1 if job.quick else TURNS)):
        batch = tokens_of(job, tokens)
        for runner in (*runners[2 * turn :], *runners[: 2 * turn]):
            yield {"tokens": tokens, "turn": turn, "system": runner.name, **_turn(runner, timer, batch, job.quick)}


def _turn(runner: Runner, timer: Host, batch: Tensor, quick: bool) -> Row:
    """Run steps in a row, after one that does not count, and return what one took."""
    steps = 2 if quick else IN_A_ROW
    runner.step(batch)
    timer.finish()
    begin, started = time.perf_counter(), timer.processor_time()
    for _ in range(steps):
        loss = runner.step(batch)
    processor = timer.processor_time() - started
    timer.finish()
    in_a_row = time.perf_counter() - begin
    return {
        "in_a_row": in_a_row / steps,
        "processor": processor / steps,
        "buckets": runner.training.buckets() if runner.name.startswith("zero") else 0,
        "loss": float(loss),
    }


# -- the update alone --------------------------------------------------------------------------------------------------


def updates(job: ShortJob) -> Iterator[Row]:
    """Yield a row for a copy, for each size of a bucket, and for each number of buckets in a call."""
    timer, total = clock(job.device), (8 if job.quick else 1024) * MIB
    source, target = (torch.zeros(total, dtype=torch.uint8, device=job.device) for _ in range(2))
    speed = 2 * total / timed(timer, lambda: target.copy_(source))[0]
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

    seconds, host = timed(timer, step)
    moved = PASSES * 2 * numel * in_a_call * calls
    return {
        "what": what,
        "mib": size,
        "in_a_call": in_a_call,
        "bytes_a_second": moved / seconds,
        "host_us": host / calls * 1e6,
    }


def timed(timer: Host, call: Callable[[], object]) -> tuple[float, float]:
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


# -- memory ------------------------------------------------------------------------------------------------------------


def peaks(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each system, by the kind of allocator."""
    for name, setting in ALLOCATORS.items():
        environment = os.environ | ({"PYTORCH_ALLOC_CONF": setting} if setting else {})
        command = [sys.executable, "-m", "benchmarks.gpu_short.one_rank", job.to_json()]
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
    for system in IN_MEMORY:
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
