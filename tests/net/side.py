"""`python -m tests.net.side FILE`: run everything on one side, and write a line of JSON for each check when it is done.

The working directory holds the side's `zero` and `collectives`, and the `tests` of the working tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import collectives
import zero

from ..support.generator import one_call_at_a_time
from ..support.pool import GlooPool, stop_forkserver
from . import programs, trained, watched


def main(file: str) -> None:
    torch.set_num_threads(1)
    _check_packages(zero.__file__, collectives.__file__)
    with open(file, "w") as records:
        for check, found in _records():
            print(json.dumps([check, found]), file=records, flush=True)


def _records() -> Iterator[tuple[str, dict[str, Any]]]:
    pool = GlooPool()
    try:
        for files in pool.run(_packages):
            _check_packages(*files)
        for program in (*programs.random_programs(), *programs.settings_of_a_fixed_program()):
            yield str(program), watched.record(program, pool)
    finally:
        pool.stop()
        stop_forkserver()
    yield from ((run, trained.record(run)) for run in trained.RUNS)


def _packages(group: Any, rank: int) -> tuple[str, str]:
    return zero.__file__, collectives.__file__


def _check_packages(*files: str) -> None:
    """Exit unless the packages are those of this side, not installed ones."""
    here = Path.cwd().resolve()
    for file in files:
        if not Path(file).resolve().is_relative_to(here):
            raise SystemExit(f"{file} is used, which is not in {here}")


if __name__ == "__main__":
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        one_call_at_a_time(patch)
        main(sys.argv[1])
