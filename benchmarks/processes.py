"""Starts the ranks of a benchmark as processes, reads their results, and ends them, whatever happens.

Knows: processes and their files. Does not know: what the ranks measure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0  # seconds in which the other ranks must end after rank 0 did
OF_A_TREE = """
import runpy, sys
sys.path[0] = sys.argv[1]
import collectives, zero
sys.path[0] = ""
sys.argv[:3] = sys.argv[2:3]
runpy.run_module(sys.argv[0], run_name="__main__")
"""  # the library of another working tree, measured by the benchmarks of this one


class RankError(Exception):
    """A rank failed; the message is the end of its output."""


@dataclass(frozen=True)
class Ranks:
    """Ranks that run. ``processes``: with pipes for input and output; ``folder``: has a file of errors of each."""

    processes: Sequence[subprocess.Popen[str]]
    folder: Path

    def lines(self) -> list[list[str]]:
        """Wait for all ranks, and return the lines that each has printed. Raises `RankError`."""
        printed = [process.communicate()[0].strip().splitlines() for process in self.processes]
        self.check()
        return printed

    def check(self) -> None:
        """Wait for all ranks. Raise if one failed, with the end of the output of each that did."""
        failed = []
        for rank, process in enumerate(self.processes):
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                failed.append(f"rank {rank} did not end")
                continue
            if code:
                words = (self.folder / f"rank{rank}").read_text().strip().splitlines()
                failed.append(f"rank {rank} ended with code {code}:\n" + "\n".join(words[-15:]))
        if failed:
            raise RankError("\n\n".join(failed))


def run_ranks(module: str, job: str, world_size: int) -> list[list[str]]:
    """Run a module of this package as so many ranks, each given ``job``, and return the lines that each prints."""
    with started(module, job, [()] * world_size) as ranks:
        return ranks.lines()


@contextmanager
def started(
    module: str, job: str, commands: Sequence[Sequence[str]], interface: str = "lo", tree: Path | None = None
) -> Iterator[Ranks]:
    """Start one rank for each of ``commands``. End them, whatever happens.

    A command is put in front of the rank's own (`ip netns exec ...`, or nothing). ``interface``: gloo's network
    interface. ``tree``: a working tree whose library is measured instead of this one's.
    """
    with ExitStack() as stack:
        stack.enter_context(endings_as_exceptions())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-benchmark-")))
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        start = ["-m", f"benchmarks.{module}"] if tree is None else ["-c", OF_A_TREE, str(tree), f"benchmarks.{module}"]
        for rank, command in enumerate(commands):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            arguments = [*command, sys.executable, *start, job, str(folder / "meeting"), str(os.getpid())]
            words = stack.enter_context((folder / f"rank{rank}").open("w"))
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": words}
            processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, text=True, **pipes))
        yield Ranks(processes, folder)


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
