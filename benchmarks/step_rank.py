"""One rank that trains: it joins its group, runs the steps, and prints its result as one line of JSON.

Knows: steps, clocks, memory of this process. Does not know: its parent process, or the other ranks' results. Forked by
`fork_server`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import gc
import importlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from zero.commands.memory_stats import live_storages, proportional_set_size

from .models import trainable
from .rank import as_rank
from .step_job import StepJob, Trained
from .systems import SYSTEMS, How, Training

BUS_ROUNDS = 7


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def resident(field: str) -> int:
    """Return the bytes of this process as the kernel counts them: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _held(training: Training, before: dict[int, int]) -> tuple[int, int, int]:
    """Return the bytes of parameters, of states, and of all other storages that did not exist ``before``."""
    gc.collect()
    parameters, states = _bytes(training.parameters()), _bytes(training.states())
    known = training.common() | before.keys()
    rest = sum(size for address, size in live_storages().items() if address not in known) - parameters - states
    return parameters, states, rest


def _bus(nbytes: int) -> float:
    """Return the seconds in which all ranks at once copy ``nbytes`` between two warm buffers.

    All ranks must call this.
    """
    if not nbytes:
        return 0.0
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(BUS_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def train(job: StepJob, rank: int) -> Trained:
    """Run the steps. All ranks must call this."""
    model = trainable(job.model)
    generator = torch.Generator().manual_seed(rank)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the imports have raised
    if SYSTEMS[job.system].needs:
        importlib.import_module(SYSTEMS[job.system].needs)
    start, before = resident("VmRSS"), live_storages()
    training = SYSTEMS[job.system].build(model.build(), How(job.bucket_cap_mb, job.narrow, job.muon))
    seconds: list[float] = []
    updates: list[float] = []
    received = 0
    loss = torch.zeros(())
    for step in range(-job.warm, job.steps):
        inputs, targets = model.batch(generator)
        if step == 0:
            received = training.received()
            dist.barrier()
        begin = time.perf_counter()
        loss = model.loss(training.forward(inputs), targets)
        training.backward(loss)
        used = time.process_time()
        training.step()
        used = time.process_time() - used
        training.clear()
        if step >= 0:
            updates.append(used)
            seconds.append(time.perf_counter() - begin)
    peak, received = resident("VmHWM") - start, training.received() - received
    inputs, targets = model.batch(generator)
    training.backward(model.loss(training.forward(inputs), targets))
    parameters, states, gradients = _held(training, before)
    proportional = proportional_set_size() or 0
    dist.barrier()
    value = loss.item() if training.learns else None
    held = (parameters, gradients, states, peak, proportional)
    bus = _bus(received // job.steps)
    return Trained(job.system, job.model, rank, seconds, value, *held, training.buckets(), bus, median(updates))


def main(job: StepJob, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        print(json.dumps(asdict(train(job, dist.get_rank()))), flush=True)
