"""`python -m benchmarks.checkpoint`: saves and loads of one training, beside DCP's and the disk's own time.

Knows: the command's flags, and the order of jobs. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import checkpoint_tables, tables
from .checkpoint_job import (
    CACHED,
    COLD,
    COPY,
    DCP,
    DCP_THREAD,
    DISK,
    LOADS,
    MANY,
    PEAK_OF_LOAD,
    PEAK_OF_SAVE,
    SAVE,
    SAVES,
    TORCH,
    TRAIN,
    ZERO,
    ZERO_ASYNC,
    CheckpointJob,
    SaveSample,
)
from .processes import RankError, checkpointing_ranks
from .report import Report

RANKS, OTHER_RANKS = 2, (1, 3)
GPT, MANY_TENSORS, LARGE, SMALL = "gpt-8x384", "tensors-10000", "gpt-12x768", "gpt-4x64"
ROUNDS = {GPT: 7, MANY_TENSORS: 3, LARGE: 3}
QUICK = {"gpt-2x32": 1, "tensors-50": 1}
SAVES_OF_MANY = 200


def jobs(rounds: dict[str, int], quick: bool, folder: Path) -> Iterator[tuple[CheckpointJob, int]]:
    """Yield all jobs with their numbers of ranks. The first job of a model leaves what the loads need."""
    for number, (model, count) in enumerate(rounds.items()):
        below = folder / model
        below.mkdir()
        job = CheckpointJob(SAVE, model, str(below), count, (DISK, CACHED, COPY, *SAVES, TORCH))
        yield job, RANKS
        yield replace(job, what=TRAIN, ways=SAVES), RANKS
        for ranks in OTHER_RANKS:
            yield replace(job, what=COLD, ways=LOADS), ranks
        if number == 0:
            for way in (ZERO_ASYNC,) if quick else (ZERO_ASYNC, DCP, DCP_THREAD):
                yield replace(job, what=PEAK_OF_SAVE, ways=(way,)), RANKS
            for way in (ZERO,) if quick else (ZERO, DCP, TORCH):
                yield replace(job, what=PEAK_OF_LOAD, ways=(way,)), OTHER_RANKS[0]
    many = 30 if quick else SAVES_OF_MANY
    yield CheckpointJob(MANY, next(iter(rounds)) if quick else SMALL, str(folder), many, (ZERO_ASYNC,)), RANKS


def measure(rounds: dict[str, int], quick: bool, folder: Path, console: Console) -> Iterator[SaveSample]:
    """Run all jobs, each in fresh processes."""
    with (
        tempfile.TemporaryDirectory(prefix="zero-checkpoint-", dir=folder) as inside,
        console.status("starting") as status,
        checkpointing_ranks() as run,
    ):
        for job, ranks in jobs(rounds, quick, Path(inside)):
            status.update(f"{job.model}, {ranks} ranks: {job.what} {', '.join(job.ways)}")
            yield from run(job, ranks)


def main(
    model: Annotated[list[str] | None, typer.Option(help="One of benchmarks.models; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds of each job.")] = None,
    large: Annotated[bool, typer.Option("--large", help="Measure a model with 1 GB of states, too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, one round: to see that it works.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder on the disk that is measured.")] = Path(),
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Saves and loads of one training in every way, beside the disk's own time."""
    console, failed = tables.console(stderr=markdown), False
    if show_only is not None:
        report = Report.read(show_only)
    else:
        usual = QUICK if quick else {name: ROUNDS[name] for name in (GPT, MANY_TENSORS, *([LARGE] if large else []))}
        chosen = {name: rounds or ROUNDS.get(name, 3) for name in model} if model else usual
        samples: list[SaveSample] = []
        try:
            for sample in measure(chosen, quick, folder.absolute(), console):
                samples.append(sample)  # after an error, those before it are still shown
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
        if not samples:
            raise typer.Exit(1)
        report = Report.of_this_machine("benchmarks.checkpoint", [asdict(sample) for sample in samples])
        report.write(out / "checkpoint.json")
    results = checkpoint_tables.CheckpointResults([SaveSample(**part) for part in report.parts])
    tables.show(report.line(), checkpoint_tables.every(results), markdown, console)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
