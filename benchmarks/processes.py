"""Starts the ranks of a benchmark as processes, reads what they find, and ends them, whatever happens.

Knows: processes and their files. Does not know: what the ranks measure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from .job import Job, Measured, Waited, read

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0  # seconds in which the other ranks end after rank 0 did


class RankError(Exception):
    """A rank ended badly; the message is the end of what it wrote."""


def run_ranks(job: Job, commands: Sequence[Sequence[str]], interface: str = "lo") -> Iterator[Measured | Waited]:
    """Start one rank for each of ``commands``, which are put in front of its own (`ip netns exec ...`, or nothing), and
    yield records as they come. ``interface``: what gloo talks over."""
    with ExitStack() as stack:
        stack.enter_context(endings_as_exceptions())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-benchmark-")))
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        for rank, command in enumerate(commands):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            arguments = [
                *command,
                sys.executable,
                "-m",
                "benchmarks.rank",
                job.to_json(),
                str(folder / "meeting"),
                str(os.getpid()),
            ]
            words = stack.enter_context((folder / f"rank{rank}").open("w"))
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=output, stderr=words, text=True)
            )
        first = processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            yield read(json.loads(line))
        _complain(processes, folder)


def _complain(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Raise where a rank failed, with the last words of each that did."""
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
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def endings_as_exceptions() -> Iterator[None]:
    """A signal to end raises, so that `finally` is reached."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
