"""One rank of a benchmark: it joins its group and measures; rank 0 prints the records, one line of JSON each.

    round        barrier, algorithm a, barrier, algorithm b, ...; the next round begins with b
    its time     that of the slowest rank

Knows: rounds, clocks, counters of a network interface. Does not know: its parent process, or how records are used.
Started as `python -m benchmarks.rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from collectives import Collective, Kind, Tag, Transport, build
from collectives.backends.gloo import connect

from .cases import Case, Operation, Shape, cases, check
from .job import Job, Measured, Waited, quartiles

ITEMSIZE = 4
WAITED_BYTES = 1 << 16
MOST_IN_A_ROW, ROW_BYTES = 20, 4 << 20  # small sizes are timed in a row: one run takes no longer than a barrier


@dataclass(frozen=True)
class _Run:
    """One run on this rank: bytes that left and came by the interface, and bytes that the library counted."""

    seconds: float
    left: int
    came: int
    crossed: int


class Ranks:
    """This rank's part of the measurements."""

    def __init__(self, job: Job) -> None:
        self.job = job
        group = connect()
        self.rank, self.world_size = group.rank, group.world_size
        made = [build(group.fork(), name).collective for name in job.algorithms]
        self.algorithms: list[Collective] = list({algorithm.name: algorithm for algorithm in made}.values())
        # The faster the messages of the barrier, the closer in time the ranks begin.
        near = [algorithm.transport for algorithm in self.algorithms if algorithm.name == "shared"]
        self._transport: Transport = (near[0] if near else group).fork()
        self._count = itertools.count()

    def barrier(self) -> None:
        self._transport.announce(self._tag()).wait()

    def everybodys(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, in rank order."""
        data = self._transport.exchange(array.array("d", values).tobytes(), self._tag())
        return [array.array("d", part).tolist() for part in data]

    def _tag(self) -> Tag:
        return Tag(Kind.EXCHANGE, "the benchmark", index=next(self._count))

    def measure(self, operation: Operation, nbytes: int) -> list[Measured]:
        """Measure every algorithm at one size. All ranks must call this."""
        shape = Shape(self.rank, self.world_size, nbytes // ITEMSIZE)
        made = cases(operation, shape, self.algorithms, self.job.roofline)
        for case in made:
            check(operation, shape, case)
        rows = [self._row(case, nbytes) for case in made]
        first = [row * self._once(case, 1).seconds for case, row in zip(made, rows, strict=True)]
        once = max(sum(seconds) for seconds in self.everybodys(first))
        rounds = min(max(int(self.job.seconds / once), self.job.least), self.job.most)
        gc.collect()
        gc.disable()
        runs: list[list[_Run]] = [[] for _ in made]
        for number in range(rounds):
            for i in range(len(made)):
                which = (number + i) % len(made)
                runs[which].append(self._once(made[which], rows[which]))
        gc.enable()
        return [
            self._slowest(operation, nbytes, case.name, case_runs) for case, case_runs in zip(made, runs, strict=True)
        ]

    def _row(self, case: Case, nbytes: int) -> int:
        """Return the number of runs of a case in a row in a round."""
        if self.job.interface:
            return 1
        return MOST_IN_A_ROW if case.stays else max(1, min(MOST_IN_A_ROW, ROW_BYTES // nbytes))

    def _once(self, case: Case, row: int) -> _Run:
        """Run one round of a case: ``row`` runs in a row, whose mean is returned."""
        crossed = _crossed(case)
        case.before()
        self.barrier()
        left, came = counters(self.job.interface)
        if self.job.interface:
            self.barrier()  # no rank sends before all have read the counters
        begin = time.perf_counter()
        for _ in range(row):
            case.run()
        seconds = (time.perf_counter() - begin) / row
        if self.job.interface:
            self.barrier()
            time.sleep(0.005)  # for the last acknowledgements
            after = counters(self.job.interface)
            left, came = after[0] - left, after[1] - came
        return _Run(seconds, left, came, _crossed(case) - crossed)

    def _slowest(self, operation: Operation, nbytes: int, name: str, runs: Sequence[_Run]) -> Measured:
        seconds = [max(column) for column in zip(*self.everybodys([run.seconds for run in runs]), strict=True)]
        times = (len(seconds), median(seconds), *quartiles(seconds))
        if not self.job.interface:
            return Measured(operation.value, self.world_size, nbytes, name, *times)
        counted = self.everybodys(
            [median(getattr(run, field) for run in runs) for field in ("left", "came", "crossed")]
        )
        left, came, crossed = ([int(value) for value in column] for column in zip(*counted, strict=True))
        return Measured(operation.value, self.world_size, nbytes, name, *times, left, came, crossed)

    def wait_for_a_late_rank(self) -> list[Waited]:
        """Measure the CPU time of the other ranks while rank 0 is late. All ranks must call this."""
        shape = Shape(self.rank, self.world_size, WAITED_BYTES // ITEMSIZE)
        waited = []
        for case in cases(Operation.REDUCE_SCATTER, shape, self.algorithms, roofline=False):
            case.given.zero_()
            self.barrier()
            begin = time.process_time()
            if self.rank == 0:
                time.sleep(self.job.late)
            case.run()
            burnt = time.process_time() - begin
            most = max(row[0] for row in self.everybodys([burnt])[1:])
            waited.append(Waited(self.world_size, case.name, self.job.late, most))
        return waited


def _crossed(case: Case) -> int:
    """Return the library's count of bytes sent to other hosts; 0 if it does not count them."""
    return getattr(case.transport.backend, "crossed", 0) if case.transport is not None else 0


def counters(interface: str) -> tuple[int, int]:
    """Return the bytes that left and came by a network interface since it exists; 0 without an interface."""
    if not interface:
        return 0, 0
    folder = Path("/sys/class/net", interface, "statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        sys.exit(1)


@contextmanager
def as_rank(meeting: str, timeout: float, parent: int) -> Iterator[None]:
    """Be a rank with one thread inside the block: RANK and WORLD_SIZE are set, and ``meeting`` is the file at which the
    ranks find each other. ``timeout``: seconds; ``parent``: the process with which this one ends."""
    end_with(parent)
    torch.set_num_threads(1)  # there may be as many ranks as cores, or more
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def main(job: Job, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        ranks, first = Ranks(job), dist.get_rank() == 0
        for operation in Operation:
            for nbytes in job.sizes:
                for record in ranks.measure(operation, nbytes):
                    if first:
                        print(json.dumps(asdict(record)), flush=True)
        if job.late:
            for waited in ranks.wait_for_a_late_rank():
                if first:
                    print(json.dumps(asdict(waited)), flush=True)


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
