"""One rank that trains between hosts: it reads its host's interface counters, and prints a JSON line for each setting.

Knows: steps, counters of a network interface. Does not know: its parent process, or the other ranks' results. Started
as `python -m benchmarks.crossing_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zero import ZeroOptimizer

from .models import trainable
from .rank import as_rank, counters

SETTLE = 0.02  # seconds, enough for the last acknowledgements


@dataclass(frozen=True)
class CrossingJob:
    """Train ``model`` with each of ``settings``, which are (stage, sharding_factor), for ``steps`` steps after two."""

    settings: list[tuple[int, int]]
    model: str
    steps: int
    interface: str
    timeout: float = 120.0


@dataclass(frozen=True)
class Crossed:
    """The traffic of one rank in a step under one setting, medians over steps, in bytes.

    ``left``: counted by its host's interface. ``sent``: payload, counted by the library; ``crossed``: the part that
    went to another host. ``formula``: payload of all ranks. ``numel``: elements of the model.
    """

    stage: int
    factor: int
    rank: int
    numel: int
    left: int
    sent: int
    crossed: int
    formula: int


def _train(job: CrossingJob, stage: int, factor: int) -> Crossed:
    model = trainable(job.model)
    built = model.build()
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = ZeroOptimizer(built, torch.optim.AdamW, lr=1e-3, stage=stage, sharding_factor=factor)
    backend: Any = optimizer._transport.backend
    seen = []
    for _ in range(2 + job.steps):
        inputs, targets = model.batch(generator)
        dist.barrier()
        before = (counters(job.interface)[0], optimizer.traffic.payload_sent, getattr(backend, "crossed", 0))
        dist.barrier()  # no rank sends before all have read the counters
        model.loss(built(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        time.sleep(SETTLE)
        after = (counters(job.interface)[0], optimizer.traffic.payload_sent, getattr(backend, "crossed", 0))
        seen.append([new - old for new, old in zip(after, before, strict=True)])
    left, sent, crossed = (int(median(column)) for column in zip(*seen[2:], strict=True))
    formula = optimizer.describe().formula_traffic_bytes(1, 1)
    numel = sum(parameter.numel() for parameter in built.parameters())
    optimizer.close()
    return Crossed(stage, factor, dist.get_rank(), numel, left, sent, crossed, formula)


def main(job: CrossingJob, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        for stage, factor in job.settings:
            print(json.dumps(asdict(_train(job, stage, factor))), flush=True)
            gc.collect()


if __name__ == "__main__":
    main(CrossingJob(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
