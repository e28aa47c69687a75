"""One rank that measures collectives, and the records of its job and of its results.

    round        barrier, algorithm a, barrier, algorithm b, ...; the next round begins with b
    its time     that of the slowest rank

Rank 0 prints the records, one line of JSON each.

Knows: rounds, clocks, counters of a network interface. Does not know: its parent process, or how records are used.
Started as `python -m benchmarks.collective_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import array
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch.distributed as dist

from collectives import Collective, Kind, Tag, Transport, build
from collectives.backends.gloo import connect

from .collective_cases import Case, Operation, Shape, cases, check
from .rank import as_rank
from .tables import quartiles

ITEMSIZE = 4
MOST_IN_A_ROW, ROW_BYTES = 20, 4 << 20  # small sizes are timed in a row: one run takes no longer than a barrier


@dataclass(frozen=True)
class Job:
    """The measurements of a run.

    ``sizes``: bytes of a whole buffer. ``seconds``: the time for a size, in ``least`` to ``most`` rounds.
    ``interface``: the network interface whose counters are read around every run, or "".
    """

    algorithms: Sequence[str]
    sizes: Sequence[int]
    seconds: float
    least: int
    most: int
    roofline: bool = False
    interface: str = ""
    timeout: float = 120.0


@dataclass(frozen=True)
class Measured:
    """One algorithm at one size.

    Seconds of the slowest rank: ``median`` and quartiles (``low``, ``high``) over ``rounds`` rounds. ``left``: bytes of
    one run that left the host of each rank, by the interface's counters, medians over rounds.
    """

    operation: str
    world_size: int
    nbytes: int
    algorithm: str
    rounds: int
    median: float
    low: float
    high: float
    left: list[int] = field(default_factory=list)

    @property
    def busbw(self) -> float:
        """Bytes of the whole buffer a second, times (W - 1) / W: what a rank must receive a second, as nccl-tests
        define it."""
        return self.nbytes / self.median * (self.world_size - 1) / self.world_size


@dataclass(frozen=True)
class _Run:
    """One run on this rank. ``left``: bytes that left by the interface."""

    seconds: float
    left: int


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

    def of_all(self, values: Sequence[float]) -> list[list[float]]:
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
        once = max(sum(seconds) for seconds in self.of_all(first))
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
        case.before()
        self.barrier()
        left = bytes_left(self.job.interface)
        if self.job.interface:
            self.barrier()  # no rank sends before all have read the counters
        begin = time.perf_counter()
        for _ in range(row):
            case.run()
        seconds = (time.perf_counter() - begin) / row
        if self.job.interface:
            self.barrier()
            time.sleep(0.005)  # for the last acknowledgements
        return _Run(seconds, bytes_left(self.job.interface) - left)

    def _slowest(self, operation: Operation, nbytes: int, name: str, runs: Sequence[_Run]) -> Measured:
        seconds = [max(column) for column in zip(*self.of_all([run.seconds for run in runs]), strict=True)]
        left = [int(count) for (count,) in self.of_all([median(run.left for run in runs)])]
        times = (len(seconds), median(seconds), *quartiles(seconds))
        return Measured(operation.value, self.world_size, nbytes, name, *times, left if self.job.interface else [])


def bytes_left(interface: str) -> int:
    """Return the bytes that left by a network interface since it exists; 0 without an interface."""
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text()) if interface else 0


def main(arguments: Sequence[str]) -> None:
    job, meeting, parent = Job(**json.loads(arguments[0])), arguments[1], int(arguments[2])
    with as_rank(meeting, job.timeout, parent):
        ranks = Ranks(job)
        for operation in Operation:
            for nbytes in job.sizes:
                for record in ranks.measure(operation, nbytes):
                    if dist.get_rank() == 0:
                        print(json.dumps(asdict(record)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
