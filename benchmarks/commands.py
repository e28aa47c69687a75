"""Runs commands one after another, each with a time limit and a log, whatever becomes of them.

Knows: processes, logs. Does not know: what the commands do.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .processes import ROOT, endings_as_exceptions

LAST_LINES = 25
PATIENCE = 10.0  # seconds in which a command must end after it was asked to
PYTHON, FOLDER = "python", "FOLDER"  # in a command as it is shown, for this interpreter and for the folder of results


@dataclass(frozen=True)
class Command:
    """A command: the words behind ``python -m``, in which `FOLDER` is that of the results. ``limit``: seconds.

    ``needs_cuda``: it makes no sense on the CPU.
    """

    name: str
    words: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_cuda: bool = False

    def line(self) -> str:
        """Return the command as it is typed."""
        before = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*before, PYTHON, "-m", shlex.join(self.words)])


@dataclass(frozen=True)
class Ran:
    """What became of a command. ``outcome``: its exit code in words, "time limit" or why it was not run. ``last``: the
    last lines of its log."""

    name: str
    command: str
    outcome: str
    seconds: float
    log: str
    last: str

    @property
    def failed(self) -> bool:
        return self.outcome != "0" and not self.outcome.startswith("not run")


def run(command: Command, folder: Path, limit: float) -> Ran:
    """Run a command, at most ``limit`` seconds. Its output, both streams, goes to a log in ``folder``."""
    log = folder / f"{command.name}.log"
    words = [str(folder) if word == FOLDER else word for word in command.words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
    begin = time.monotonic()
    with log.open("w") as output, endings_as_exceptions():
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = str(process.wait(limit))
        except subprocess.TimeoutExpired:
            outcome = f"time limit of {limit:.0f} s"
        finally:
            _end(process)
    lines = log.read_text(errors="replace").rstrip().splitlines()
    last = "\n".join(lines[-LAST_LINES:])
    return Ran(command.name, command.line(), outcome, time.monotonic() - begin, log.name, last)


def left_out(command: Command, why: str) -> Ran:
    """Return the result of a command that is not run."""
    return Ran(command.name, command.line(), f"not run: {why}", 0.0, "", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
