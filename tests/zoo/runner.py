"""Runs the tests on a copy of the repository, with or without a mutant, in a process of its own.

Knows: folders, processes and the judge's records. Does not know: why a failure counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .judge import How, Record
from .mutant import Mutant, PatchError, copy_tree

PRELOADED = Path(__file__).with_name("preloaded.py")
TEST_LIMIT = 60  # seconds for a named test; on an idle machine each takes a few
SESSION_LIMIT = 1200  # seconds for a run of tests, should a time limit of a test not end it
# tests that read the source: they fail on a patch whether or not a number is wrong
SOURCE_READERS = ("test_zoo.py", "test_structure.py", "test_contract.py", "test_tiers.py", "test_torch_internals.py")


@dataclass(frozen=True)
class Outcome:
    """The result of a mutant.

    ``test``: the test that caught it; ``error``: its error; ``problem``: why the mutant does not count as caught.
    """

    mutant: Mutant
    test: str = ""
    how: str = ""
    seconds: float = 0.0
    problem: str = ""
    error: str = ""


@dataclass(frozen=True)
class _Session:
    """A pytest run. ``code``: its exit status; ``failures``: its failed tests, in order; ``text``: its output."""

    code: int
    failures: tuple[Record, ...]
    text: str

    @property
    def kill(self) -> Record | None:
        return next((record for record in self.failures if record.how != How.OTHER.value), None)


class Runner:
    """Runs one mutant at a time, in forks of a preloaded process that is started at first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """End the process and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def unpatched(self, tests: Sequence[str]) -> str:
        """Run tests on an unpatched copy.

        Return their failures, or an empty string. A table is valid only if they pass.
        """
        with tempfile.TemporaryDirectory(prefix="zoo-") as name:
            copy_tree(Path(name), None)
            session = self._pytest(Path(name), [f"tests/{test}" for test in tests], limit=TEST_LIMIT)
        return "" if session.code == 0 else _tail(session)

    def run(self, mutant: Mutant) -> Outcome:
        """Run the tests that a mutant names and, if they pass, all tests, until the first failure that is a kill."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"zoo-{mutant.name}-") as name:
            folder = Path(name)
            try:
                copy_tree(folder, mutant)
            except PatchError as error:
                return Outcome(mutant, problem=str(error))
            session = self._pytest(folder, [f"tests/{test}" for test in mutant.tests], limit=TEST_LIMIT)
            if session.code == 0:
                ignored = [f"--ignore=tests/{file}" for file in SOURCE_READERS]
                session = self._pytest(folder, ["tests", *ignored], limit=None)
        seconds = time.monotonic() - begin
        kill = session.kill
        if kill is not None:
            return Outcome(mutant, kill.test.removeprefix("tests/"), kill.how, seconds, error=kill.error)
        if session.code == 0:
            return Outcome(mutant, seconds=seconds, problem="it survives: all tests pass")
        return Outcome(mutant, seconds=seconds, problem=f"not caught properly: {_tail(session)}")

    def _pytest(self, folder: Path, arguments: Sequence[str], limit: float | None) -> _Session:
        record, out = folder / "record.jsonl", folder / "out.txt"
        record.unlink(missing_ok=True)
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.zoo.judge", "--tb=short"]
        options += [] if limit is None else [f"--timeout={limit}", "-m", ""]  # of every tier
        code = self._ask(
            {
                "folder": str(folder),
                "arguments": [*options, *arguments],
                "environment": {"ZOO_RECORD": str(record), "PYTHONPATH": str(folder)},
                "out": str(out),
                "limit": SESSION_LIMIT,
            }
        )
        lines = record.read_text().splitlines() if record.exists() else []
        return _Session(code, tuple(Record(**json.loads(line)) for line in lines), out.read_text(errors="replace"))

    def _ask(self, request: dict[str, Any]) -> int:
        if self._process is None:
            foreign = ("PYTEST_", "HYPOTHESIS_", "COV_", "PYTHONPATH")
            kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
            self._process = subprocess.Popen(
                [sys.executable, str(PRELOADED)],
                env={**kept, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError(f"the process that runs the tests ended with status {self._process.wait()}")
        return int(answer)


def _tail(session: _Session) -> str:
    failures = [f"{record.test}: {record.error}" for record in session.failures]
    return "\n".join(failures) or session.text[-2000:]
