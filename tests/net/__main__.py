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
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..support.processor import spare_matrix_unit
from .compare import differences

ROOT = Path(__file__).resolve().parent.parent.parent
COMPARED = ("zero", "collectives")
LIMIT = 5400.0  # seconds for everything
ASKS = "import zero; print(*(name for name in (*zero.__all__, *dir(zero.ZeroOptimizer)) if name[0] != '_'))"


class CannotTryError(Exception):
    """There is no reference. The message is one line."""


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each check that differs."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m tests.net COMMIT", file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        commit = output("git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{arguments[0]}^{{commit}}")
        with tempfile.TemporaryDirectory(prefix="zero-net-") as name:
            folders = prepared(Path(name), commit.decode().strip())
            old, new = records(folders)
    except (CannotTryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    lines = differences(old, new)
    for line in lines:
        print(line)
    checks, seconds = len({*old, *new}), time.monotonic() - begin
    print(f"{checks} checks, {len(lines)} differ, {seconds:.0f} seconds against {commit.decode()[:12]}")
    return 1 if lines else 0


def output(*command: str, folder: Path = ROOT) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=100, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"there is no {command[-1]!r}"]
        raise CannotTryError(said[-1])
    return done.stdout


def prepared(folder: Path, commit: str) -> tuple[Path, Path]:
    """Return the folders of the commit and of the working tree, each with its packages and the tests.

    The commit's packages come from `git archive`, as a worktree would have to be removed again. Those of the working
    tree are copied: edits during the run do not count.
    """
    old, new, tests = folder / "old", folder / "new", folder / "tests"
    with tarfile.open(fileobj=io.BytesIO(output("git", "archive", "--format=tar", commit, *COMPARED))) as archive:
        archive.extractall(old, filter="data")
    for source, target in (("tests", tests), *((package, new / package) for package in COMPARED)):
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for side in (old, new):
        (side / "tests").symlink_to(tests)
    return old, new


def records(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the records of each side, made at the same time. Raises `RuntimeError` if one fails or is late."""
    spare_matrix_unit()
    known = output(sys.executable, "-c", ASKS, folder=folders[0]).decode().split()
    foreign = ("PYTEST_", "HYPOTHESIS_", "COV_", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    sides, end = [], time.monotonic() + LIMIT
    with ExitStack() as stack:
        for folder in folders:
            errors = stack.enter_context(open(folder / "errors.txt", "wb"))
            side = subprocess.Popen(
                [sys.executable, "-m", "tests.net.side", str(folder / "records.jsonl"), *known],
                cwd=folder,
                env=kept | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TESTS_ROWS": "all"},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(stop, side)
            sides.append(side)
        while any(side.poll() is None for side in sides) and not any(side.poll() for side in sides):
            if time.monotonic() > end:
                raise RuntimeError(f"not done within {LIMIT:.0f} seconds")
            time.sleep(0.2)
    for side, folder in zip(sides, folders, strict=True):
        if side.returncode and side.returncode > 0:
            said = "\n".join((folder / "errors.txt").read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the side {folder.name} fails with code {side.returncode}:\n{said}")
    files = (folder / "records.jsonl" for folder in folders)
    return [dict(json.loads(line) for line in file.read_text().splitlines()) for file in files]


def stop(side: subprocess.Popen[bytes]) -> None:
    """End a side with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # upon SIGTERM a launcher ends its ranks first
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(side.pid, number)
            side.wait(20)
    side.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
