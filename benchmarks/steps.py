"""`python -m benchmarks.steps`: one GPT trained by every system, side by side.

Knows: the command's flags, and the order of runs. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import matplotlib  # noqa: F401
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import step_tables, tables
from .processes import RankError, forked_ranks
from .report import Report
from .step_job import MODELS, Run, StepJob
from .systems import SYSTEMS

ROUNDS, WARM, STEPS = 5, 3, 12
QUICK = (2, 1, 3)


def measure(
    models: list[str],
    systems: list[str],
    ranks: int,
    rounds: tuple[int, int, int],
    how: dict[str, bool],
    console: Console,
) -> Iterator[Run]:
    """Run every system on every model in rounds. ``how``: "narrow" and "muon" of a `StepJob`.

    Each round begins with another system; each run has fresh processes.
    """
    count, warm, steps = rounds
    with console.status("starting") as status, forked_ranks() as train:
        for model in models:
            for number in range(count):
                for i in range(len(systems)):
                    system = systems[(number + i) % len(systems)]
                    status.update(f"{model}, round {number + 1} of {count}: {system}")
                    yield Run.of(train(StepJob(system, model, warm, steps, **how), ranks), muon=how["muon"])


def checked(names: list[str] | None, known: Collection[str], what: str) -> list[str]:
    """Return the names, or all known ones by default. An unknown name is an error that lists the known ones."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no {what}: there are {', '.join(known)}")
    return names or list(known)


def _stem(precision: str, optimizer: str) -> str:
    return "-".join(["steps", *[name for name in (precision, optimizer) if name not in ("fp32", "adamw")]])


def main(
    model: Annotated[list[str] | None, typer.Option(help="One of the models; may be repeated.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 2,
    precision: Annotated[str, typer.Option(help="What all compute in: fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw; muon: Muon for matrices of blocks, AdamW for the rest.")] = (
        "adamw"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and steps: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for steps.json and .png (steps-bf16, steps-muon).")] = Path(
        "zero-bench"
    ),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """A training step under every system that is installed, beside DDP and beside the floor below all of them."""
    console, failed = tables.console(stderr=markdown), False
    if show_only is not None:
        report = Report.read(show_only)
    else:
        checked([precision], ("fp32", "bf16"), "precision")
        checked([optimizer], ("adamw", "muon"), "optimizer")
        narrow, muon = precision == "bf16", optimizer == "muon"
        here = {name: found for name, found in SYSTEMS.items() if found.is_here and not found.alone}
        here = {n: each for n, each in here.items() if (each.in_bf16 or not narrow) and (each.with_muon or not muon)}
        how = {"narrow": narrow, "muon": muon}
        models, systems = checked(model, MODELS, "model"), checked(system, here, "system here")
        runs: list[Run] = []
        try:
            for run in measure(models, systems, ranks, QUICK if quick else (ROUNDS, WARM, STEPS), how, console):
                runs.append(run)  # after an error, the runs before it are still shown
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
        if not runs:
            raise typer.Exit(1)
        report = Report.of_this_machine("benchmarks.steps", [asdict(run) for run in runs])
        report.write(out / f"{_stem(precision, optimizer)}.json")
    results = step_tables.StepResults([Run(**part) for part in report.parts])
    out.mkdir(parents=True, exist_ok=True)
    step_tables.draw(out / f"{_stem(precision, optimizer)}.png", results, report.line().replace("`", ""))
    found = [*step_tables.by_model(results), step_tables.targets(results)]
    tables.show(report.line(), found, markdown, console)
    console.print(f"written to {out}", markup=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
