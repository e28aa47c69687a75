"""`python -m benchmarks.scaling`: the time of a step against tensors, elements, bucket size and ranks.

Knows: the command's flags, and the order of runs. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import matplotlib  # noqa: F401
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import scaling_axes, scaling_tables, tables
from .processes import RankError, forked_ranks
from .report import Report
from .scaling_axes import Axis
from .scaling_tables import Sample, ScalingResults
from .step_job import StepJob
from .steps import checked
from .systems import DDP, PLAIN

SYSTEMS = (PLAIN, DDP, "zero 1", "zero 2", "zero 3")
ROUNDS, WARM = 5, 2


def measure(axes: Sequence[Axis], systems: list[str], rounds: int, console: Console) -> list[Sample]:
    """Run every system at every point in rounds.

    Each round begins with another system; each run has fresh processes.
    """
    found = []
    with console.status("starting") as status, forked_ranks() as train:
        for number in range(rounds):
            for axis in axes:
                for point in axis.points:
                    for i in range(len(systems)):
                        system = systems[(number + i) % len(systems)]
                        if system == PLAIN and not axis.has_plain(point):
                            continue
                        status.update(f"round {number + 1} of {rounds}: {axis.name} {point.x:g}: {system}")
                        job = StepJob(system, point.model, WARM, point.steps, bucket_cap_mb=point.bucket_cap_mb)
                        ranks = train(job, 1 if system == PLAIN else point.ranks)
                        found.append(Sample.of(axis.name, point.x, ranks))
    return found


def main(
    axis: Annotated[list[str] | None, typer.Option(help="One of the axes; may be repeated.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="How often everything is run.")] = ROUNDS,
    quick: Annotated[bool, typer.Option("--quick", help="One round, few points: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for scaling.json and scaling.png.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """The cost of a step, of each bucket and of each tensor, beside DDP and the plain loop."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        known = scaling_axes.QUICK if quick else scaling_axes.AXES
        axes = [known[name] for name in checked(axis, known, "axis")]
        systems = checked(system, SYSTEMS, "system here")
        try:
            samples = measure(axes, systems, 1 if quick else rounds, console)
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        report = Report.of_this_machine("benchmarks.scaling", [asdict(sample) for sample in samples])
        report.write(out / "scaling.json")
    results = ScalingResults([Sample(**part) for part in report.parts])
    out.mkdir(parents=True, exist_ok=True)
    scaling_tables.draw(out / "scaling.png", results, report.line().replace("`", ""))
    found = list(scaling_tables.every_table(results))
    tables.show(report.line(), found, markdown, console)
    console.print(f"written to {out}", markup=False)


if __name__ == "__main__":
    typer.run(main)
