"""One rank that trains one model under several systems at once, a step of each in turn. It prints a JSON line: the
seconds of its steps, by system.

Knows: steps, clocks. Does not know: its parent process, or the other ranks' results. Started as
`python -m benchmarks.interleaved_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .models import trainable
from .rank import as_rank
from .step_job import CAP_MB
from .systems import SYSTEMS, How


@dataclass(frozen=True)
class InterleavedJob:
    """Train ``model`` under each of ``systems``: ``warm`` steps, then ``steps`` by the clock. ``narrow``: in bf16."""

    systems: list[str]
    model: str
    warm: int
    steps: int
    narrow: bool = False
    timeout: float = 300.0


def _train(job: InterleavedJob) -> dict[str, list[float]]:
    model, how = trainable(job.model), How(CAP_MB, job.narrow)
    trainings = {system: SYSTEMS[system].build(model.build(), how) for system in job.systems}
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {system: [] for system in job.systems}
    for step in range(-job.warm, job.steps):
        inputs, targets = model.batch(generator)
        first = step % len(job.systems)  # no system is always behind the same other one
        for system in (*job.systems[first:], *job.systems[:first]):
            training = trainings[system]
            dist.barrier()
            begin = time.perf_counter()
            training.backward(model.loss(training.forward(inputs), targets))
            training.step()
            training.clear()
            if step >= 0:
                seconds[system].append(time.perf_counter() - begin)
    return seconds


def main(job: InterleavedJob, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        print(json.dumps(_train(job)), flush=True)


if __name__ == "__main__":
    main(InterleavedJob(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
