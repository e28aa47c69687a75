"""One rank of a measurement of header rounds, over gloo and over the sockets between ranks of a host.

Knows: rounds, clocks. Does not know: its parent process, or how results are used. Started as
`python -m benchmarks.header_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set. It prints a line of JSON for each
carrier.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

import torch.distributed as dist

from collectives import Kind, Tag, Transport, build
from collectives.backends.gloo import connect

from .host_job import HeaderJob, HeaderTime
from .job import quartiles
from .rank import as_rank


def measure(job: HeaderJob) -> Iterator[HeaderTime]:
    """Time both carriers, one after the other."""
    group = connect()
    carriers = {"gloo": group.fork(), "the host's sockets": build(group.fork(), "shared").collective.transport}
    for carrier, transport in carriers.items():
        seconds = [_round(transport, job.rounds) for _ in range(2 * job.blocks)][job.blocks :]
        yield HeaderTime(carrier, dist.get_world_size(), median(seconds), *quartiles(seconds))


_numbers = itertools.count()


def _round(transport: Transport, rounds: int) -> float:
    """Return the seconds of one of some rounds in a row."""
    begin = time.perf_counter()
    for _ in range(rounds):
        transport.announce(Tag(Kind.ALL_GATHER, "a round of headers", index=next(_numbers))).wait()
    return (time.perf_counter() - begin) / rounds


def main(job: HeaderJob, meeting: str, parent: int) -> None:
    with as_rank(meeting, job.timeout, parent):
        for result in measure(job):
            print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main(HeaderJob(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
