"""The process that runs sections one after the other, and writes the results of each: `... .worker JOB PARENT`.

Knows: which section measures what. Does not know: the limits of sections, which its parent keeps.
"""

from __future__ import annotations

import sys

import torch

from ..rank import end_with
from . import many_ranks, one_rank
from .clock import clock
from .job import Measure, ShortJob, run

MEASURES: dict[str, Measure] = {
    "a": one_rank.updates,
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
