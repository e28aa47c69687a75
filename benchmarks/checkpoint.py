"""`python -m benchmarks.checkpoint`: saves and loads of one training, beside DCP's and the disk's own time.

Knows: the command's flags, and the order of jobs. Does not know: how anything is measured.
"""

from __future__ import annotations

import json
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
from .checkpoint_rank import (
    CACHED,
    COLD,
    COPY,
    DISK,
    LOADS,
    SAVE,
    SAVES,
    TRAIN,
    CheckpointJob,
    SaveSample,
    merged,
)
from .checkpoint_systems import TORCH
from .processes import RankError, run_ranks
from .report import Report

RANKS, OTHER_RANKS = 2, (1, 3)
ROUNDS = {"gpt-8x384": 7, "tensors-1000": 3}
LARGE = {"gpt-12x768": 3}
QUICK = {"gpt-2x32": 1}


def jobs(rounds: dict[str, int], folder: Path) -> Iterator[tuple[CheckpointJob, int]]:
    """Yield all jobs with their numbers of ranks. The first job of a model leaves what the loads need."""
    for model, count in rounds.items():
        below = folder / model
        below.mkdir()
        job = CheckpointJob(SAVE, model, str(below), count, (DISK, CACHED, COPY, *SAVES, TORCH))
        yield job, RANKS
        yield replace(job, what=TRAIN, ways=SAVES), RANKS
        for ranks in OTHER_RANKS:
            yield replace(job, what=COLD, ways=LOADS), ranks


def measure(rounds: dict[str, int], folder: Path, console: Console) -> Iterator[SaveSample]:
    """Run all jobs, each in fresh processes."""
    with (
        tempfile.TemporaryDirectory(prefix="zero-checkpoint-", dir=folder) as inside,
        console.status("starting") as status,
    ):
        for job, ranks in jobs(rounds, Path(inside)):
            status.update(f"{job.model}, {ranks} ranks: {job.what} {', '.join(job.ways)}")
            printed = run_ranks("checkpoint_rank", json.dumps(asdict(job)), ranks)
            yield from merged(
                [[SaveSample(**json.loads(line)) for line in lines if line.startswith("{")] for lines in printed]
            )


def main(
    model: Annotated[list[str] | None, typer.Option(help="One of benchmarks.models; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds of each job.")] = None,
    large: Annotated[bool, typer.Option("--large", help="Measure a model with 1 GB of states, too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small model, one round: to see that it works.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder on the disk that is measured.")] = Path(),
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Saves and loads of one training in every way, beside the disk's own time."""
    console, failed = tables.console(stderr=markdown), False
    if show_only is None:
        chosen = QUICK if quick else {**ROUNDS, **(LARGE if large else {})}
        chosen = {name: rounds or (ROUNDS | LARGE).get(name, 3) for name in model} if model else chosen
        samples: list[SaveSample] = []
        try:
            for sample in measure(chosen, folder.absolute(), console):
                samples.append(sample)  # after an error, those before it are still shown
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
        if not samples:
            raise typer.Exit(1)
        Report.of_this_machine("benchmarks.checkpoint", [asdict(s) for s in samples]).write(out / "checkpoint.json")
    report = Report.read(show_only or out / "checkpoint.json")
    results = checkpoint_tables.CheckpointResults([SaveSample(**part) for part in report.parts])
    tables.show(report.line(), checkpoint_tables.every(results), markdown, console)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
