"""One rank that counts the Python calls of a training step. Rank 0 prints a JSON line for each system.

Knows: steps, and the thread's clock. Does not know: its parent process, or the other ranks' results. Started as
`python -m benchmarks.calls_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist

from .call_counter import CallCounter
from .models import trainable
from .rank import as_rank
from .step_job import CAP_MB
from .systems import SYSTEMS, How

MAX_NORM = 1.0


@dataclass(frozen=True)
class CallsJob:
    """Train ``model`` under each of ``systems``: ``warm`` steps, then ``steps`` by the clock and one that is counted.

    ``clip``: clip by the norm in every step. ``narrow``: train in bf16.
    """

    systems: list[str]
    model: str
    warm: int
    steps: int
    clip: bool = True
    narrow: bool = False
    timeout: float = 300.0


@dataclass(frozen=True)
class Called:
    """The calls of rank 0 in a step under one system.

    ``calls``: (event, kind, module:function, how often). ``cpu``: seconds of processor time of the thread that trains,
    the median of steps that are not counted. ``parameters``, ``buckets``: how many there are (buckets: 0 if the system
    does not report them).
    """

    system: str
    parameters: int
    buckets: int
    cpu: float
    calls: list[tuple[str, str, str, int]]


def _packages(system: str) -> tuple[str, ...]:
    return ("zero", "collectives") if system.startswith("zero ") else ("torch.distributed", "torch.nn.parallel")


def _train(job: CallsJob, system: str) -> Called:
    model = trainable(job.model)
    built = model.build()
    training = SYSTEMS[system].build(built, How(CAP_MB, job.narrow))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step(around: Callable[[], AbstractContextManager[None]]) -> float:
        inputs, targets = model.batch(generator)
        dist.barrier()
        begin = time.thread_time()
        with around():
            training.backward(model.loss(training.forward(inputs), targets))
            if job.clip:
                training.clip(MAX_NORM)
            training.step()
            training.clear()
        return time.thread_time() - begin

    for _ in range(job.warm):
        step(nullcontext)
    cpu = median(step(nullcontext) for _ in range(job.steps))
    counter = CallCounter(_packages(system), ["zero.commands"])  # where the GPT is defined
    step(counter.counting)
    calls = [(*key, count) for key, count in counter.calls.most_common()]
    return Called(system, len(list(built.parameters())), training.buckets(), cpu, calls)


def main(job: CallsJob, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        for system in job.systems:
            called = _train(job, system)
            if dist.get_rank() == 0:
                print(json.dumps(asdict(called)), flush=True)
            gc.collect()


if __name__ == "__main__":
    main(CallsJob(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
