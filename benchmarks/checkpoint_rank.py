"""One rank that saves and loads checkpoints in every way, in turn. It prints its samples, a JSON line each.

    save     in a round, each way saves once: the seconds until the call returns, until the checkpoint is complete, and
             the processor's; beside it the disk alone (rank 0) and a copy of the rank's part of the parameters
    train    in a round, each way trains for ten steps, with a save before the first or without, and waits for it
    load     in a round, each way loads once, with its files dropped from the page cache, and once with them there
    peak     a process of its own for each way: the resident bytes that a save or a load adds to the peak
    many     a small model is saved after every step: what the process and the folder hold

Knows: clocks, the memory of this process. Does not know: its parent process, or the other ranks' results. Forked by
`fork_server`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoint_disk as disk
from .checkpoint_job import (
    CACHED,
    COLD,
    COPY,
    DISK,
    EVERY,
    MANY,
    PEAK_OF_LOAD,
    PEAK_OF_SAVE,
    SAVE,
    SAVES,
    TRAIN,
    WARM,
    WITHOUT,
    CheckpointJob,
    SaveSample,
)
from .checkpoint_systems import SavedTraining, remove, system_of
from .models import Trainable, trainable
from .rank import as_rank
from .step_rank import resident

BYTES = 12  # of a parameter in fp32 and its two states of Adam
MARKS = 10  # how often is counted over many saves


class _Trainings:
    """The trainings of some ways; ways of one system share theirs."""

    def __init__(self, job: CheckpointJob, **of_manager: Any) -> None:
        self.model: Trainable = trainable(job.model)
        self.numel = sum(parameter.numel() for parameter in self.model.build().parameters())
        systems = dict.fromkeys(system_of(way) for way in job.ways if way not in (DISK, CACHED, COPY))
        self.by_system = {system: system(self.model, Path(job.folder), **of_manager) for system in systems}
        for training in self.by_system.values():
            for _ in range(2):
                training.step()

    def __getitem__(self, way: str) -> SavedTraining:
        return self.by_system[system_of(way)]


def _in_turn(ways: Sequence[str], number: int) -> Sequence[str]:
    first = number % len(ways)  # no way is always behind the same other one
    return (*ways[first:], *ways[:first])


def _save(job: CheckpointJob) -> Iterator[SaveSample]:
    trainings = _Trainings(job)
    nbytes = BYTES * trainings.numel
    own = torch.ones(trainings.numel // dist.get_world_size())
    copy = torch.empty_like(own)
    for number in range(-1, job.rounds):
        for way in _in_turn(job.ways, number):
            gc.collect()
            dist.barrier()
            if way in (DISK, CACHED):
                seconds = disk.write(Path(job.folder), nbytes, direct=way == DISK) if dist.get_rank() == 0 else 0.0
                values = {"call": seconds, "done": seconds}
            elif way == COPY:
                begin = time.perf_counter()
                copy.copy_(own)
                seconds = time.perf_counter() - begin
                values = {"call": seconds, "done": seconds}
            else:
                values = _one_save(trainings[way], way)
            if number >= 0:
                yield _sample(job, way, number, values | {"nbytes": nbytes / dist.get_world_size()})
    for training in trainings.by_system.values():
        training.keep()


def _one_save(training: SavedTraining, way: str) -> dict[str, float]:
    training.step()
    dist.barrier()
    cpu, begin = time.process_time(), time.perf_counter()
    wait = training.save(way)
    call = time.perf_counter() - begin
    wait()
    done = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    dist.barrier()
    files = sum(path.stat().st_size for path in disk.files_of(training.written()))
    dist.barrier()
    remove(training.written())
    return {"call": call, "done": done, "cpu": cpu, "files": files}


def _train(job: CheckpointJob) -> Iterator[SaveSample]:
    trainings = _Trainings(job)
    without = {WITHOUT[way]: way for way in job.ways}
    ways = [*job.ways, *without]
    for number in range(-1, job.rounds):
        for way in _in_turn(ways, number):
            training = trainings[without.get(way, way)]
            dist.barrier()
            steps, whole = _ten_steps(training, way if way in SAVES else None)
            dist.barrier()
            if way in SAVES:
                remove(training.written())
            if number >= 0:
                yield _sample(job, way, number, {"seconds": whole, "worst": max(steps)})


def _ten_steps(training: SavedTraining, way: str | None) -> tuple[list[float], float]:
    """Return the seconds of each step, a save before the first included, and of all, with the wait for the save."""
    seconds = []
    begin = last = time.perf_counter()
    wait: Callable[[], object] = (lambda: None) if way is None else training.save(way)
    for _ in range(EVERY):
        training.step()
        seconds.append(time.perf_counter() - last)
        last = time.perf_counter()
    wait()
    return seconds, time.perf_counter() - begin


def _load(job: CheckpointJob) -> Iterator[SaveSample]:
    trainings = _Trainings(job)
    whole = Path(job.folder) / "kept-zero"
    for number in range(job.rounds):
        for what in (COLD, WARM):
            for way in _in_turn(job.ways, number):
                files = disk.files_of(whole if way == DISK else trainings[way].kept())
                if dist.get_rank() == 0:
                    disk.drop(files) if what == COLD else disk.read(files)
                dist.barrier()
                begin = time.perf_counter()
                if way == DISK:
                    disk.read(files if dist.get_rank() == 0 else ())
                else:
                    trainings[way].load()
                yield _sample(job, way, number, {"seconds": time.perf_counter() - begin}, what)


def _peak(job: CheckpointJob) -> Iterator[SaveSample]:
    (way,) = job.ways
    trainings = _Trainings(job)
    training = trainings[way]
    gc.collect()
    if job.what == PEAK_OF_LOAD:
        before = _peak_of(lambda: None)
        added = _peak_of(training.load) - before
    else:
        before = max(_peak_of(lambda: _ten_steps(training, None)) for _ in range(2))
        added = 0
        for _ in range(2):
            added = max(added, _peak_of(lambda: _ten_steps(training, way)) - before)
            remove(training.written())
    own = 4 * trainings.numel // dist.get_world_size()
    yield _sample(job, way, 0, {"added": added, "parameters": own})


def _peak_of(action: Callable[[], object]) -> int:
    """Return the most resident bytes of this process during a call."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident("VmHWM")


def _many(job: CheckpointJob) -> Iterator[SaveSample]:
    (way,) = job.ways
    training = _Trainings(job, max_to_keep=2)[way]
    for number in range(1, job.rounds + 1):
        training.step()
        wait = training.save(way)
        if number % (job.rounds // MARKS) == 0:
            wait()
            dist.barrier()
            gc.collect()
            counted: dict[str, float] = {
                "saves": number,
                "resident": resident("VmRSS"),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "shared": sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines()),
                "entries": len(os.listdir(training.written().parent)),
            }
            yield _sample(job, way, number, counted)


def _sample(job: CheckpointJob, way: str, number: int, values: dict[str, float], what: str = "") -> SaveSample:
    return SaveSample(what or job.what, job.model, dist.get_world_size(), way, number, values)


KINDS: dict[str, Callable[[CheckpointJob], Iterator[SaveSample]]] = {
    SAVE: _save,
    TRAIN: _train,
    COLD: _load,
    PEAK_OF_SAVE: _peak,
    PEAK_OF_LOAD: _peak,
    MANY: _many,
}


def main(job: CheckpointJob, meeting: str, parent: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"  # where DCP's processes find each other
    with as_rank(meeting, job.timeout, parent):
        for sample in KINDS[job.what](job):
            print(json.dumps(asdict(sample)), flush=True)
