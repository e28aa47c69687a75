"""`python -m benchmarks.checkpoint`: saves and loads of one training, beside DCP's and the disk's own time.

Knows: the command's flags, the order of jobs, the tables. Does not know: how anything is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .checkpoint_rank import (
    CACHED,
    COLD,
    COPY,
    DISK,
    EVERY,
    LOADS,
    SAVE,
    SAVES,
    TRAIN,
    WARM,
    WITHOUT,
    CheckpointJob,
    SaveSample,
    merged,
)
from .checkpoint_systems import DCP, DCP_PROCESS, TORCH
from .processes import RankError, run_ranks
from .report import Report

RANKS, OTHER_RANKS = 2, (1, 3)
ROUNDS = {"gpt-8x384": 7, "tensors-1000": 3}
LARGE = {"gpt-12x768": 3}
QUICK = {"gpt-2x32": 1}
Key = tuple[str, str, int]  # what, model, number of ranks


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


class CheckpointResults:
    """Samples of one machine."""

    def __init__(self, samples: Sequence[SaveSample]) -> None:
        self._found: dict[Key, dict[str, list[SaveSample]]] = {}
        for sample in samples:
            of = self._found.setdefault((sample.what, sample.model, sample.ranks), {})
            of.setdefault(sample.way, []).append(sample)

    def of(self, what: str) -> list[Key]:
        """Return every model and number of ranks for which something was measured."""
        return [key for key in self._found if key[0] == what]

    def ways(self, key: Key) -> list[str]:
        return list(self._found[key])

    def values(self, key: Key, way: str, name: str) -> list[float]:
        """Return a number of every round, in order."""
        return [sample.values[name] for sample in sorted(self._found[key][way], key=lambda sample: sample.round)]

    def median(self, key: Key, way: str, name: str) -> float:
        return median(self.values(key, way, name))

    def ratio(self, key: Key, way: str, than: str, name: str) -> float | None:
        """Return the median over rounds of the ratio to another way in the same round; None without it."""
        if than not in self._found[key]:
            return None
        pairs = zip(self.values(key, way, name), self.values(key, than, name), strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def lost(self, key: Key, way: str) -> list[float]:
        """Return, by round, the seconds that a save takes from training: ten steps with it, minus ten without."""
        usual = self.median(key, WITHOUT[way], "seconds")
        return [seconds - usual for seconds in self.values(key, way, "seconds")]


def every(results: CheckpointResults) -> Iterator[tables.Table]:
    """Yield all tables."""
    yield from (_saves(results, key) for key in results.of(SAVE))
    yield from (_trainings(results, key) for key in results.of(TRAIN))
    yield from (_loads(results, key) for key in results.of(COLD))


def _with_spread(values: Sequence[float]) -> list[str]:
    return [tables.milliseconds(median(values)), tables.spread(*tables.quartiles(values))]


def _saves(results: CheckpointResults, key: Key) -> tables.Table:
    payload, rows = results.median(key, DISK, "nbytes"), []
    for way in results.ways(key):
        row = [way]
        if way in (DISK, CACHED, COPY):
            row += ["–", "–", *_with_spread(results.values(key, way, "done"))]
            row += [tables.two(results.ratio(key, way, DISK, "done")), "–", "–", "–"]
        else:
            row += [*_with_spread(results.values(key, way, "call")), *_with_spread(results.values(key, way, "done"))]
            row += [tables.two(results.ratio(key, way, than, "done")) for than in (DISK, DCP)]
            row.append("–" if way == DCP_PROCESS else tables.two(results.median(key, way, "cpu") * 1e9 / payload))
            row.append(tables.two(results.median(key, way, "files") / payload))
        rows.append(row)
    columns = ["way", "call ms", "quartiles", "complete ms", "quartiles", "÷ disk", "÷ DCP", "CPU s/GB", "files"]
    rounds = len(results.values(key, DISK, "done"))
    return tables.Table(f"{key[1]}: a save of {payload / 1e6:.1f} MB, {key[2]} ranks, rounds: {rounds}", columns, rows)


def _trainings(results: CheckpointResults, key: Key) -> tables.Table:
    rows = []
    for way in results.ways(key):
        row = [way, *(tables.milliseconds(results.median(key, way, name)) for name in ("seconds", "worst"))]
        if way in SAVES:
            lost = results.lost(key, way)
            share = 100 * median(lost) / results.median(key, WITHOUT[way], "seconds")
            row += [*_with_spread(lost), f"{share:.1f} %"]
        else:
            row += ["–"] * 3
        rows.append(row)
    columns = ["way", f"{EVERY} steps ms", "worst step ms", "lost ms", "quartiles", "of training"]
    return tables.Table(f"{key[1]}: {EVERY} steps with a save, {key[2]} ranks", columns, rows)


def _loads(results: CheckpointResults, key: Key) -> tables.Table:
    rows = []
    for way in results.ways(key):
        row = [way]
        for what in (COLD, WARM):
            here = what, *key[1:]
            row += _with_spread(results.values(here, way, "seconds"))
            row += [tables.two(results.ratio(here, way, than, "seconds")) for than in (DISK, DCP)]
        rows.append(row)
    columns = ["way", "cold ms", "quartiles", "÷ disk", "÷ DCP", "warm ms", "quartiles", "÷ disk", "÷ DCP"]
    return tables.Table(f"{key[1]}: a load, ranks: {key[2]}, saved by 2", columns, rows)


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
    results = CheckpointResults([SaveSample(**part) for part in report.parts])
    tables.show(report.line(), every(results), markdown, console)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
