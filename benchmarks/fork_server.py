"""Forks ranks from one process that has imported all they need: fresh processes, without the seconds of an import.

Knows: forks and their exit statuses. Does not know: what the ranks measure. Started as `python -m
benchmarks.fork_server "" FOLDER PARENT`. Each line of its input is an `Asked`. It answers "done" when all ranks have
succeeded. If a rank fails, the server ends; its standard error has the rank's traceback.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch._dynamo  # noqa: F401  # every first call of an optimizer imports it

import zero  # noqa: F401

from . import checkpoint_rank, step_rank
from .checkpoint_job import CheckpointJob
from .rank import end_with
from .step_job import Asked, StepJob

RANKS: dict[str, Callable[[str, str, int], None]] = {
    StepJob.__name__: lambda job, meeting, parent: step_rank.main(StepJob.from_json(job), meeting, parent),
    CheckpointJob.__name__: lambda job, meeting, parent: checkpoint_rank.main(
        CheckpointJob(**json.loads(job)), meeting, parent
    ),
}


def _fork(asked: Asked, rank: int, server: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(asked.said(rank), os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.world_size))
        RANKS[asked.kind](asked.job, asked.meeting, server)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the server's exit handlers


def _run(asked: Asked) -> None:
    """Run all ranks. If one fails, kill the others and exit."""
    server = os.getpid()
    children = {_fork(asked, rank, server) for rank in range(asked.world_size)}
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def main(parent: int) -> None:
    end_with(parent)
    gc.freeze()  # a collection in a rank would copy every page that it visits
    for line in sys.stdin:
        _run(Asked(**json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[3]))
