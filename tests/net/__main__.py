"""`python -m tests.net COMMIT`; see the package.

Exit code 0: nothing differs; 1: a check differs, or a side fails; 2: the comparison could not be tried.

Knows: git, folders, processes. It imports neither package, so that a broken package is reported as such.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.processor import spare_matrix_unit
from .compare import differences

ROOT = Path(__file__).resolve().parent.parent.parent
COMPARED = ("zero", "collectives")
LIMIT = 5400.0  # seconds for everything


class CannotTryError(Exception):
    """There is no reference, or a side failed. The message is one line."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Side:
    """A process that makes the records of one side. ``name``: its name in messages."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def failure(self) -> list[str]:
        """Return the last output of a process that failed."""
        lines = (self.folder / "errors.txt").read_text(errors="replace").strip().splitlines() or ["no message"]
        code = self.process.poll()
        return [f"{self.name} fails with code {code}: {lines[-1]}", *lines[-30:]] if code else []

    def records(self) -> dict[str, Any]:
        return dict(json.loads(line) for line in (self.folder / "records.jsonl").read_text().splitlines())


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each check that differs."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m tests.net COMMIT", file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        commit = (
            _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{arguments[0]}^{{commit}}").decode().strip()
        )
        with tempfile.TemporaryDirectory(prefix="zero-net-") as name:
            old, new = _both(Path(name), commit, begin + LIMIT)
    except (CannotTryError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 2)
    lines = differences(old, new)
    for line in lines:
        print(line)
    checks = len({*old, *new})
    print(f"{checks} checks, {len(lines)} differ, {time.monotonic() - begin:.0f} seconds against {commit[:12]}")
    return 1 if lines else 0


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=60)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"there is no {arguments[-1]!r} in {ROOT}"
        raise CannotTryError(reason, 2)
    return done.stdout


def _both(folder: Path, commit: str, end: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of the commit and of the working tree, made at the same time.

    The commit's packages come from `git archive`, as a worktree would have to be removed again. Those of the working
    tree are copied: edits during the run do not count.
    """
    old, new, tests = folder / "old", folder / "new", folder / "tests"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit, *COMPARED))) as archive:
        archive.extractall(old, filter="data")
    for source, target in (("tests", tests), ("zero", new / "zero"), ("collectives", new / "collectives")):
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    spare_matrix_unit()
    known = _known(old)
    with _side("the commit", old, tests, known) as first, _side("the working tree", new, tests, known) as second:
        _wait((first, second), end)
        return first.records(), second.records()


def _known(folder: Path) -> list[str]:
    """Return the names that a user of the packages of a folder finds."""
    asks = "import zero; print(*zero.__all__, *dir(zero.ZeroOptimizer))"
    done = subprocess.run([sys.executable, "-c", asks], cwd=folder, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise CannotTryError(f"the commit cannot be imported: {done.stderr.splitlines()[-1]}", 2)
    return [name for name in done.stdout.split() if not name.startswith("_")]


@contextmanager
def _side(name: str, folder: Path, tests: Path, known: list[str]) -> Iterator[Side]:
    """Start a process that makes one side's records; end it with all that it started."""
    (folder / "tests").symlink_to(tests)
    foreign = ("PYTEST_", "HYPOTHESIS_", "COV_", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with open(folder / "errors.txt", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.net.side", str(folder / "records.jsonl"), *known],
            cwd=folder,
            env=kept | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TESTS_ROWS": "all"},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield Side(name, folder, process)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # upon SIGTERM a launcher ends its ranks first
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(20)
        process.wait()


def _wait(sides: tuple[Side, Side], end: float) -> None:
    running = True
    while running:
        running = any(side.process.poll() is None for side in sides)
        failures = [line for side in sides for line in side.failure()]
        if failures or (running and time.monotonic() > end):
            raise CannotTryError("\n".join(failures) or f"not done within {LIMIT:.0f} seconds", 1)
        time.sleep(0.2)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
