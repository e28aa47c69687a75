"""The process that runs sections one after the other, and writes the results of each: `... .worker JOB PARENT`.

Knows: which section measures what. Does not know: the limits of sections, which its parent keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from ..rank import end_with
from . import kernels, many_ranks, one_rank
from .clock import clock
from .job import Measure, Row, ShortJob, run


def parts_of_a_step(job: ShortJob) -> Iterator[Row]:
    """Yield the rows of section a."""
    yield from kernels.measure(job)
    yield from one_rank.updates(job)


MEASURES: dict[str, Measure] = {
    "a": parts_of_a_step,
    "b": one_rank.measure,
    "c": many_ranks.one_of_many,
    "d": many_ranks.shared_gpu,
    "e": one_rank.peaks,
}


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    torch.set_num_threads(1)
    job = ShortJob.from_json(sys.argv[1])
    run(job, MEASURES, clock(job.device).name())
