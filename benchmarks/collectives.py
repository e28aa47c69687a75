"""`python -m benchmarks.collectives`: every algorithm on one host, beside gloo and the memory bus.

Knows: the command's flags, the tables. Does not know: how anything is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .collective_cases import GLOO, ROOFLINE
from .collective_rank import Job, Measured
from .processes import RankError, run_ranks
from .report import Report

SIZES = [4 << 10 << 2 * step for step in range(9)]  # 4 KiB to 256 MiB
ALGORITHMS = ("shared", "pairwise", "ring")
FULL = Job(ALGORITHMS, SIZES, seconds=2.0, least=5, most=400, roofline=True)
QUICK = replace(FULL, sizes=SIZES[::2][:4], seconds=0.2, least=3)


def measure(worlds: Sequence[int], job: Job, console: Console) -> Iterator[Measured]:
    """Run the job with each number of ranks."""
    for world_size in worlds:
        with console.status(f"{world_size} ranks"):
            lines = run_ranks("collective_rank", json.dumps(asdict(job)), world_size)[0]
        yield from (Measured(**json.loads(line)) for line in lines)


def by_size(measured: Sequence[Measured]) -> Iterator[tables.Table]:
    """Yield a table for each collective and number of ranks: medians of every algorithm beside each other, and the
    quartiles, bandwidth and ratios of shared memory."""
    for operation, world_size in dict.fromkeys((m.operation, m.world_size) for m in measured):
        here = [m for m in measured if (m.operation, m.world_size) == (operation, world_size)]
        found = {(m.nbytes, m.algorithm): m for m in here}
        names = list(dict.fromkeys(m.algorithm for m in here))
        rows = []
        for nbytes in sorted({m.nbytes for m in here}):
            shared = found[nbytes, "shared"]
            row = [tables.size(nbytes), *(tables.milliseconds(found[nbytes, name].median) for name in names)]
            row += [tables.spread(shared.low, shared.high), f"{shared.busbw / 1e9:.2f}"]
            than = (found.get((nbytes, name)) for name in (GLOO, ROOFLINE))
            rows.append([*row, *(tables.two(other.median / shared.median if other else None) for other in than)])
        of_shared = ["shared quartiles", "shared busbw GB/s", "× gloo", "× roofline"]
        columns = ["size", *(f"{name} ms" for name in names), *of_shared]
        yield tables.Table(f"{operation}, {world_size} ranks", columns, rows)


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many processes; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for collectives.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Reduce-scatter and all-gather of fp32 by every algorithm, beside gloo's own and a roofline."""
    console = tables.console(stderr=markdown)
    if show_only is None:
        try:
            records = [asdict(m) for m in measure(ranks or [2, 4], QUICK if quick else FULL, console)]
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        Report.of_this_machine("benchmarks.collectives", records).write(out / "collectives.json")
    report = Report.read(show_only or out / "collectives.json")
    tables.show(report.line(), by_size([Measured(**part) for part in report.parts]), markdown, console)


if __name__ == "__main__":
    typer.run(main)
