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
COMPARED = ("zero", "collectives", "pyproject.toml")
LIMIT = 3600.0  # seconds for everything, which takes 350 seconds of CPU time


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

    def failure(self) -> str:
        """Return the last output of a process that failed, or an empty string."""
        code = self.process.poll()
        if not code:
            return ""
        lines = (self.folder / "errors.txt").read_text(errors="replace").strip().splitlines()
        return f"{self.name} fails with code {code}: {lines[-1] if lines else 'no message'}\n" + "\n".join(lines[-30:])

    def records(self) -> dict[str, Any]:
        return dict(json.loads(line) for line in (self.folder / "records.jsonl").read_text().splitlines())


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each check that differs."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m tests.net COMMIT", file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        commit = _commit(arguments[0])
        with tempfile.TemporaryDirectory(prefix="zero-net-") as name:
            old, new = _both(Path(name), commit, begin + LIMIT)
    except CannotTryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    lines = differences(old, new)
    for line in lines:
        print(line)
    checks = len({*old, *new})
    print(f"{checks} checks, {len(lines)} differ, {time.monotonic() - begin:.0f} seconds against {commit[:12]}")
    return 1 if lines else 0


def _commit(name: str) -> str:
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode:
        reason = found.stderr.decode(errors="replace").strip() or f"there is no commit {name!r} in {ROOT}"
        raise CannotTryError(reason, 2)
    return found.stdout.decode().strip()


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotTryError(f"git: {error}", 2) from None


def _both(folder: Path, commit: str, end: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of the commit and of the working tree, made at the same time."""
    tests = folder / "tests"
    _copy("tests", folder)
    folders = _old(folder / "old", commit), _new(folder / "new")
    spare_matrix_unit()
    with _side("the commit", folders[0], tests) as old, _side("the working tree", folders[1], tests) as new:
        _wait((old, new), end)
        return old.records(), new.records()


def _old(folder: Path, commit: str) -> Path:
    """Extract the commit's packages. They come from `git archive`, as a worktree would have to be removed again."""
    found = _git("archive", "--format=tar", commit, *COMPARED)
    if found.returncode:
        raise CannotTryError(f"commit {commit[:12]}: {found.stderr.decode(errors='replace').strip()}", 2)
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _new(folder: Path) -> Path:
    """Copy the packages as they are now: edits during the run do not count."""
    folder.mkdir()
    for name in COMPARED:
        _copy(name, folder)
    return folder


def _copy(name: str, folder: Path) -> None:
    source = ROOT / name
    try:
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    except OSError as error:
        raise CannotTryError(f"the working tree: {error}", 2) from None


@contextmanager
def _side(name: str, folder: Path, tests: Path) -> Iterator[Side]:
    """Start a process that makes one side's records; end it with all that it started."""
    (folder / "tests").symlink_to(tests)
    foreign = ("PYTEST_", "HYPOTHESIS_", "COV_", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with open(folder / "errors.txt", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.net.side", str(folder / "records.jsonl")],
            cwd=folder,
            env=kept | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
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
    while any(side.process.poll() is None for side in sides):
        failures = [side.failure() for side in sides if side.failure()]
        if failures or time.monotonic() > end:
            raise CannotTryError("\n".join(failures) or f"not done within {LIMIT:.0f} seconds", 1)
        time.sleep(0.2)
    failures = [side.failure() for side in sides if side.failure()]
    if failures:
        raise CannotTryError("\n".join(failures), 1)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
