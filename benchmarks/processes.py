"""Starts the ranks of a benchmark as processes, reads their results, and ends them, whatever happens.

Knows: processes and their files. Does not know: what the ranks measure.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from .calls_rank import Called, CallsJob
from .checkpoint_job import CheckpointJob, SaveSample, merged
from .crossing_rank import Crossed, CrossingJob
from .interleaved_rank import InterleavedJob
from .job import Job, Measured, Waited, read
from .step_job import Asked, StepJob, Trained

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0  # seconds in which the other ranks must end after rank 0 did


class RankError(Exception):
    """A rank failed; the message is the end of its output."""


def run_ranks(job: Job, commands: Sequence[Sequence[str]], interface: str = "lo") -> Iterator[Measured | Waited]:
    """Start one rank for each of ``commands``, and yield records as they are measured.

    A command is put in front of the rank's own (`ip netns exec ...`, or nothing). ``interface``: gloo's network
    interface.
    """
    with _started("benchmarks.rank", job.to_json(), commands, interface, first_alone=True) as (processes, folder):
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            yield read(json.loads(line))
        _complain(processes, folder)


def crossing_ranks(job: CrossingJob, commands: Sequence[Sequence[str]]) -> list[Crossed]:
    """Start one rank for each of ``commands``, as `run_ranks` does, and return the results of all, by setting."""
    with _started("benchmarks.crossing_rank", json.dumps(asdict(job)), commands, job.interface) as (processes, folder):
        said = [process.communicate()[0].strip().splitlines() for process in processes]
        _complain(processes, folder)
    found = [[Crossed(**json.loads(line)) for line in lines] for lines in said]
    return [crossed for of_a_setting in zip(*found, strict=True) for crossed in of_a_setting]


def calling_ranks(job: CallsJob, world_size: int) -> list[Called]:
    """Start ranks that count calls, and return what rank 0 counted under each system."""
    commands = [()] * world_size
    with _started("benchmarks.calls_rank", json.dumps(asdict(job)), commands, "lo", first_alone=True) as found:
        processes, folder = found
        lines = processes[0].communicate()[0].strip().splitlines()
        _complain(processes, folder)
    return [Called(**json.loads(line)) for line in lines]


def interleaved_ranks(job: InterleavedJob, world_size: int) -> list[dict[str, list[float]]]:
    """Start ranks that train under several systems at once, and return each rank's seconds, by system."""
    commands = [()] * world_size
    with _started("benchmarks.interleaved_rank", json.dumps(asdict(job)), commands, "lo") as (processes, folder):
        said = [process.communicate()[0].strip().splitlines() for process in processes]
        _complain(processes, folder)
    return [json.loads(lines[-1]) for lines in said]


@contextmanager
def forked_ranks() -> Iterator[Callable[[StepJob, int], list[Trained]]]:
    """Yield a function that trains on a number of ranks and returns the result of each."""
    with _forked() as ask:
        yield lambda job, world_size: [
            Trained(**json.loads(lines[-1])) for lines in ask(StepJob.__name__, job.to_json(), world_size)
        ]


@contextmanager
def checkpointing_ranks() -> Iterator[Callable[[CheckpointJob, int], list[SaveSample]]]:
    """Yield a function that saves and loads on a number of ranks, and returns the samples of all ranks as one."""

    def samples(lines: Sequence[str]) -> list[SaveSample]:
        return [SaveSample(**json.loads(line)) for line in lines if line.startswith("{")]

    with _forked() as ask:
        yield lambda job, world_size: merged(
            [samples(lines) for lines in ask(CheckpointJob.__name__, json.dumps(asdict(job)), world_size)]
        )


@contextmanager
def _forked() -> Iterator[Callable[[str, str, int], list[list[str]]]]:
    """Yield a function that runs a job, given by the name of its class and as JSON, on a number of ranks, and returns
    the lines that each rank has printed.

    The ranks are fresh processes, forked from one that has only imported torch: an import takes longer than most of
    these jobs.
    """
    with _started("benchmarks.fork_server", "", [()], "lo") as (processes, folder):
        numbers = itertools.count()

        def ask(kind: str, job: str, world_size: int) -> list[list[str]]:
            server = processes[0]
            assert server.stdin is not None
            assert server.stdout is not None
            asked = Asked(kind, job, world_size, str(folder / f"meeting{next(numbers)}"))
            with suppress(BrokenPipeError):  # the error below quotes the server's output
                print(asked.to_json(), file=server.stdin, flush=True)
            if server.stdout.readline() != "done\n":
                _complain(processes, folder)
            return [asked.said(rank).read_text().strip().splitlines() for rank in range(world_size)]

        yield ask


@contextmanager
def _started(
    module: str, job: str, commands: Sequence[Sequence[str]], interface: str, *, first_alone: bool = False
) -> Iterator[tuple[list[subprocess.Popen[str]], Path]]:
    """Start the ranks; yield them and the folder of their standard errors. End them, whatever happens.

    ``first_alone``: only rank 0 has an output.
    """
    with ExitStack() as stack:
        stack.enter_context(endings_as_exceptions())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-benchmark-")))
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        for rank, command in enumerate(commands):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            arguments = [*command, sys.executable, "-m", module, job, str(folder / "meeting"), str(os.getpid())]
            words = stack.enter_context((folder / f"rank{rank}").open("w"))
            output = subprocess.DEVNULL if first_alone and rank else subprocess.PIPE
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": words}
            processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, text=True, **pipes))
        yield processes, folder


def _complain(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Raise if a rank failed, with the end of the output of each that did."""
    failed = []
    for rank, process in enumerate(processes):
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            failed.append(f"rank {rank} did not end")
            continue
        if code:
            words = (folder / f"rank{rank}").read_text().strip().splitlines()
            failed.append(f"rank {rank} ended with code {code}:\n" + "\n".join(words[-15:]))
    if failed:
        raise RankError("\n\n".join(failed))


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def endings_as_exceptions() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise, so that `finally` blocks run."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
