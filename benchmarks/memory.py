"""`python -m benchmarks.memory`: the memory of a rank under every system, beside the formulas, by the number of ranks.

Knows: the command's flags, and the order of runs. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import memory_tables, tables
from .processes import RankError, forked_ranks
from .report import Report
from .step_job import MODELS, Held, StepJob
from .systems import SYSTEMS

WORLDS = (1, 2, 4, 8)
STEPS = 2  # the first creates the states, the second is like all others


def measure(model: str, worlds: list[int], systems: list[str], console: Console) -> list[Held]:
    """Run each system with each number of ranks, in fresh processes."""
    found = []
    with console.status("starting") as status, forked_ranks() as train:
        for world_size in worlds:
            for system in systems:
                status.update(f"{model}, {world_size} ranks: {system}")
                found.append(Held.of(train(StepJob(system, model, 0, STEPS), world_size)))
    return found


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "wide",
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="How many processes; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for memory.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Bytes of a rank by kind, the most above its start, and the memory of the whole job."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        known = [name for name, found in SYSTEMS.items() if found.is_here and found.stage is not None]
        for name in system or ():
            if name not in known:
                raise typer.BadParameter(f"{name!r} is no system here: there are {', '.join(known)}")
        if model not in MODELS:
            raise typer.BadParameter(f"{model!r} is no model: there are {', '.join(MODELS)}")
        try:
            runs = measure(model, list(ranks or WORLDS), list(system or known), console)
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        report = Report.of_this_machine("benchmarks.memory", [asdict(run) for run in runs])
        report.write(out / "memory.json")
    runs = [Held(**part) for part in report.parts]
    found = [*memory_tables.by_ranks(runs), memory_tables.targets(runs)]
    tables.show(report.line(), found, markdown, console)


if __name__ == "__main__":
    typer.run(main)
