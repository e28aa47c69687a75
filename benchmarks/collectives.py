"""`python -m benchmarks.collectives`: every algorithm on one host, beside gloo and the memory bus.

Knows: the command's flags, and the order of its parts. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

try:
    import matplotlib  # noqa: F401
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .job import Job, Measured, Waited, read
from .plot import draw
from .processes import RankError, run_ranks
from .report import Report

SIZES = [4 << 10 << 2 * step for step in range(9)]  # 4 KiB to 256 MiB
QUICK_SIZES = SIZES[::2][:4]  # 4 KiB to 16 MiB
ALGORITHMS = ("shared", "pairwise", "ring")
FULL = Job(ALGORITHMS, SIZES, seconds=2.0, least=5, most=400, roofline=True, late=1.0)
QUICK = replace(FULL, sizes=QUICK_SIZES, seconds=0.2, least=3)


def measure(worlds: list[int], job: Job, console: Console) -> list[Measured | Waited]:
    """Run the job with each number of ranks."""
    found: list[Measured | Waited] = []
    for world_size in worlds:
        with console.status(f"{world_size} ranks: starting") as status:
            for record in run_ranks(job, [()] * world_size):
                found.append(record)
                if isinstance(record, Measured):
                    status.update(f"{world_size} ranks: {record.operation}, {tables.size(record.nbytes)} done")
    return found


def show(report: Report, markdown: bool, console: Console) -> None:
    """Print the tables of a report."""
    records = [read(part) for part in report.parts]
    results = tables.Results([record for record in records if isinstance(record, Measured)])
    waits = [record for record in records if isinstance(record, Waited)]
    met, waited = tables.targets(results, waits), tables.waited(waits)
    made = [met, *tables.by_size(results), waited] if markdown else [*tables.every_number(results), waited, met]
    tables.show(report.line(), made, markdown, console)


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many processes; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for collectives.json and collectives.png.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of README.md.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Reduce-scatter and all-gather of fp32 by every algorithm, beside gloo's own and a roofline."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        try:
            records = measure(ranks or [2, 4], QUICK if quick else FULL, console)
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        report = Report.of_this_machine("benchmarks.collectives", [asdict(record) for record in records])
        report.write(out / "collectives.json")
    results = tables.Results([record for record in map(read, report.parts) if isinstance(record, Measured)])
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "collectives.png", results, report.line().replace("`", ""))
    show(report, markdown, console)
    console.print(f"written to {out}", markup=False)


if __name__ == "__main__":
    typer.run(main)
