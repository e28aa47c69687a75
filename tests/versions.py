"""`python -m tests.versions`: the default tests on other versions of Python and torch.

Takes each Python of `PYTHONS` that this machine has and each torch from `OLDEST` on that the package index lists. Of a
pair for which the index has a CPU build, the default tests run in a fresh virtual environment. A build that brings CUDA
is not fetched: pip says beforehand what it would install. One line for each pair says what became of it. After `LIMIT`
seconds no further pair begins. Exit code: 0 where no tests failed, 1 where some did.

Knows: pip, virtual environments. Imports neither package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OLDEST = (2, 11)
LIMIT = 3600.0
ASKING = 120.0  # seconds for pip to say what it would install
TESTING = 1800.0  # seconds for the tests of one pair
ACCELERATORS = ("cuda", "nvidia", "rocm", "triton")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description="The default tests on other versions."
    )
    parser.add_argument("--python", action="append", help=f"a Python, as 3.12; several times (default: {PYTHONS})")
    parser.add_argument("--torch", action="append", help="a torch, as 2.12.1; several times (default: from 2.11 on)")
    options = parser.parse_args(arguments)
    end, failed = time.monotonic() + LIMIT, False
    for number in options.python or PYTHONS:
        python = shutil.which(f"python{number}")
        if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
            print(f"Python {number}: not on this machine", flush=True)
            continue
        for version in options.torch or listed(python):
            result = "not run: the hour is over" if time.monotonic() > end else outcome(python, version)
            failed |= result.startswith("FAILED")
            print(f"Python {number}, torch {version}: {result}", flush=True)
    return int(failed)


def outcome(python: str, version: str) -> str:
    """Try one pair, and say in a few words what became of it."""
    with tempfile.TemporaryDirectory(prefix="zero-versions-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = os.path.join(folder, "bin", "python")
        try:
            report = pip(inside, "install", "--dry-run", "--quiet", "--report=-", f"torch=={version}", limit=ASKING)
            found = accelerators(json.loads(report))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return "not run: the index has no build for it"
        if found:
            return f"not run: the index has a build for GPUs alone, which brings {found[0]}"
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join([*others(ROOT / "constraints.txt"), f"torch=={version}\n"]))
        try:
            pip(inside, "install", "--quiet", "-c", str(constraints), "-e", f"{ROOT}[cli,test]", limit=TESTING)
            command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTING)
        except subprocess.CalledProcessError as error:
            return f"FAILED to install: {(error.stderr or '').strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired:
            return f"FAILED: not over after {TESTING:.0f} seconds"
        last = (ended.stdout.strip().splitlines() or [""])[-1].strip("= ")
        return last if ended.returncode == 0 else f"FAILED: {last}"


def listed(python: str) -> list[str]:
    """The versions of torch that the index lists, from `OLDEST` on."""
    found = re.search(r"Available versions: (.*)", pip(python, "index", "versions", "torch", limit=ASKING))
    versions = [] if found is None else found[1].split(", ")
    return [version for version in versions if "+" not in version and numbers(version) >= OLDEST]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 12, 1) of "2.12.1"."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def accelerators(report: dict[str, Any]) -> list[str]:
    """The packages that only an accelerator needs, of all that pip would install."""
    names = sorted(str(entry["metadata"]["name"]) for entry in report["install"])
    return [name for name in names if name.lower().startswith(ACCELERATORS)]


def others(constraints: Path) -> Iterator[str]:
    """The constraints but that of torch."""
    lines: Iterable[str] = constraints.read_text().splitlines()
    yield from (line for line in lines if not line.startswith("torch=="))


def pip(python: str, *arguments: str, limit: float) -> str:
    """What pip prints."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit).stdout


if __name__ == "__main__":
    sys.exit(main())
