"""`python -m tests.net.side FILE NAME...`: run everything on one side, and write a line of JSON for each check.

The names are the public ones that both sides have. The working directory holds the side's `zero` and `collectives`, and
the `tests` of the working tree.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import collectives
import zero
from collectives import Transport, solo
from zero import ZeroOptimizer

from ..dials import DIALS
from ..support.errors import error_of, errors_on
from ..support.generator import one_call_at_a_time
from ..support.pool import GlooPool, stop_forkserver
from . import programs, watched
from .compare import ERROR

LIMIT = 600.0  # seconds of a run of `zero train`, which takes about ten on an idle core
COMMON = ("--width=64", "--layers=2", "--steps=2", "--micro-batches=6", "--data=tests/README.md", "--out=out")
RUNS = (  # starting processes takes most of the time: one rank unless several matter, and then fp32, where sums differ
    "zero train --ranks=1 --stage=0 --precision=bf16 --clip=0.5",
    "zero train --ranks=1 --stage=1 --clip=inf",
    "zero train --ranks=1 --stage=2 --precision=fp16",
    "zero train --ranks=1 --stage=3 --precision=bf16 --offload=disk",
    "zero train --ranks=2 --stage=0 --collective=pairwise",
    "zero train --ranks=2 --stage=1 --sharding-factor=1",
    "zero train --ranks=2 --stage=3 --clip=0.5 --bucket-cap-mb=0.01",
    "zero train --ranks=3 --stage=2 --bucket-cap-mb=0.1",
    "torchrun --nproc-per-node=2 -m zero.train --stage=3 --bucket-cap-mb=0.01",
)
OF_THE_MOMENT = ("versions", "pss")


def main(file: str, *known: str) -> None:
    torch.set_num_threads(1)
    check_packages(zero.__file__, collectives.__file__)
    with open(file, "w") as records:
        for check, found in recorded(known):
            print(json.dumps([check, found]), file=records, flush=True)


def recorded(known: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    pool = GlooPool()
    try:
        for files in pool.run(packages):
            check_packages(*files)
        for program in programs.chosen(known):
            yield str(program), watched.record(program, pool)
    finally:
        pool.stop()
        stop_forkserver()
    for dial in DIALS:
        for number, refused in enumerate(dial.refused):
            yield f"{dial.name}, refused {number}", texts([error_of(built, refused.model, refused.arguments, solo())])
        for number, row in enumerate(dial.differs):
            by_rank = (row.of_first, row.of_others)
            build: Callable[[Transport], Any] = lambda t, row=row, by=by_rank: built(row.model, by[t.rank > 0], t)  # type: ignore[misc]  # noqa: E731
            yield f"{dial.name}, differs {number}", texts(errors_on(3, build))
    yield from ((run, trained(run)) for run in RUNS)


def built(model: Callable[[], Any], arguments: Any, group: Any) -> None:
    ZeroOptimizer(model(), process_group=group, **arguments)


def texts(errors: list[str]) -> dict[str, Any]:
    """Return the record of errors, without addresses of objects and the folder of this side."""
    here = str(Path.cwd())
    return {f"rank {rank}": re.sub("0x[0-9a-f]+", "0x", error.replace(here, "")) for rank, error in enumerate(errors)}


def trained(run: str) -> dict[str, Any]:
    """Run a command. Return the contents of run.json without values that differ between all runs."""
    Path("disk").mkdir(exist_ok=True)
    written = Path("out", "run.json")
    written.unlink(missing_ok=True)
    command = run.replace("zero train", "-m zero.commands.cli train")
    command = command.replace("torchrun", "-m torch.distributed.run --standalone")
    done = subprocess.run(
        [sys.executable, *command.split(), *COMMON], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode != 0:
        return {ERROR: f"code {done.returncode}: {' / '.join((done.stdout + done.stderr).strip().splitlines()[-5:])}"}
    found: dict[str, Any] = lasting(json.loads(written.read_text().replace(str(Path.cwd()), "")))
    return found


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lasting(inside) for key, inside in value.items() if key not in OF_THE_MOMENT}
    return [lasting(inside) for inside in value] if isinstance(value, list) else value


def packages(group: Any, rank: int) -> tuple[str, str]:
    return zero.__file__, collectives.__file__


def check_packages(*files: str) -> None:
    """Exit unless the packages are those of this side, not installed ones."""
    here = Path.cwd().resolve()
    for file in files:
        if not Path(file).resolve().is_relative_to(here):
            raise SystemExit(f"{file} is used, which is not in {here}")


if __name__ == "__main__":
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        one_call_at_a_time(patch)
        main(*sys.argv[1:])
