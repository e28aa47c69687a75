"""One rank that saves and loads checkpoints in every way, in turn; the records of its job and of its samples.

    save     in a round, each way saves once: the seconds until the call returns, until the checkpoint is complete, and
             the processor's; beside it the disk alone (rank 0) and a copy of the rank's part of the parameters
    train    in a round, each way trains for ten steps, with a save before the first or without, and waits for it
    load     in a round, each way loads once, with its files dropped from the page cache, and once with them there

It prints its samples, a JSON line each.

Knows: clocks, files. Does not know: its parent process, or the other ranks' results. Started as `python -m
benchmarks.checkpoint_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .checkpoint_systems import DCP, DCP_PROCESS, DCP_THREAD, TORCH, ZERO, ZERO_ASYNC, SavedTraining, remove, system_of
from .models import trainable
from .rank import as_rank

DISK, CACHED, COPY = "disk", "disk, cached", "memcpy"
SAVES = (ZERO, ZERO_ASYNC, DCP, DCP_THREAD, DCP_PROCESS)
LOADS = (DISK, ZERO, DCP, TORCH)
NO_SAVE, NO_SAVE_FSDP2 = "zero, no save", "FSDP2, no save"
WITHOUT = dict(zip(SAVES, (NO_SAVE, NO_SAVE, NO_SAVE_FSDP2, NO_SAVE_FSDP2, NO_SAVE_FSDP2), strict=True))
SAVE, TRAIN, COLD, WARM = "save", "train", "load, cold", "load, warm"
EVERY = 10  # steps between two saves
BYTES = 12  # of a parameter in fp32 and its two states of Adam
PIECE = 4 << 20  # bytes of one write or read of the disk alone
SUMMED = ("cpu", "nbytes")


@dataclass(frozen=True)
class CheckpointJob:
    """Measure ``what`` on ``model``, with files below ``folder``, in ``rounds``; in each, every one of ``ways``."""

    what: str
    model: str
    folder: str
    rounds: int
    ways: Sequence[str]
    timeout: float = 900.0


@dataclass(frozen=True)
class SaveSample:
    """What was measured of one way in one round: numbers by name. Those in `SUMMED` are of all ranks together."""

    what: str
    model: str
    ranks: int
    way: str
    round: int
    values: dict[str, float]


def merged(of_ranks: Sequence[Sequence[SaveSample]]) -> list[SaveSample]:
    """Return the samples of all ranks as one: a sum, or the largest number of any rank."""
    found = []
    for samples in zip(*of_ranks, strict=True):
        first = samples[0]
        values = {
            name: sum(s.values[name] for s in samples) if name in SUMMED else max(s.values[name] for s in samples)
            for name in first.values
        }
        found.append(SaveSample(first.what, first.model, first.ranks, first.way, first.round, values))
    return found


class _Trainings:
    """The trainings of some ways; ways of one system share theirs."""

    def __init__(self, job: CheckpointJob) -> None:
        model = trainable(job.model)
        self.numel = sum(parameter.numel() for parameter in model.build().parameters())
        systems = dict.fromkeys(system_of(way) for way in job.ways if way not in (DISK, CACHED, COPY))
        self.by_system = {system: system(model, Path(job.folder)) for system in systems}
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
                seconds = _write(Path(job.folder), nbytes, direct=way == DISK) if dist.get_rank() == 0 else 0.0
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
    files = sum(path.stat().st_size for path in _files_of(training.written()))
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
                files = _files_of(whole if way == DISK else trainings[way].kept())
                if dist.get_rank() == 0:
                    _drop(files) if what == COLD else _read(files)
                dist.barrier()
                begin = time.perf_counter()
                if way == DISK:
                    _read(files if dist.get_rank() == 0 else ())
                else:
                    trainings[way].load()
                yield _sample(job, way, number, {"seconds": time.perf_counter() - begin}, what)


def _sample(job: CheckpointJob, way: str, number: int, values: dict[str, float], what: str = "") -> SaveSample:
    return SaveSample(what or job.what, job.model, dist.get_world_size(), way, number, values)


# -- the disk alone ----------------------------------------------------------------------------------------------------


def _write(folder: Path, nbytes: int, *, direct: bool) -> float:
    """Return the seconds in which ``nbytes`` are written into a new file that has its room, and are on the disk.

    ``direct``: past the page cache, in whole pages.
    """
    path = folder / "written"
    buffer = mmap.mmap(-1, PIECE)  # page-aligned, as O_DIRECT needs it
    buffer.write(os.urandom(PIECE))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0))
    try:
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(file, 0, room)
        os.fsync(file)
        data = memoryview(buffer)
        begin = time.perf_counter()
        for place in range(0, room, PIECE):
            os.pwrite(file, data[: min(PIECE, room - place)], place)
        os.fdatasync(file)
        return time.perf_counter() - begin
    finally:
        os.close(file)
        path.unlink()


def _files_of(path: Path) -> list[Path]:
    """Return a file, or all files below a folder."""
    return [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())


def _read(paths: Iterable[Path]) -> None:
    """Read files into one buffer."""
    buffer = memoryview(bytearray(PIECE))
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        place = 0
        while count := os.preadv(file, [buffer], place):
            place += count
        os.close(file)


def _drop(paths: Iterable[Path]) -> None:
    """Drop the pages of files from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


KINDS: dict[str, Callable[[CheckpointJob], Iterator[SaveSample]]] = {SAVE: _save, TRAIN: _train, COLD: _load}


def main(arguments: Sequence[str]) -> None:
    job, meeting, parent = CheckpointJob(**json.loads(arguments[0])), arguments[1], int(arguments[2])
    os.environ["MASTER_ADDR"] = "localhost"  # where DCP's processes find each other
    with as_rank(meeting, job.timeout, parent):
        for sample in KINDS[job.what](job):
            print(json.dumps(asdict(sample)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
