"""`python -m benchmarks.crossing`: the bytes between two hosts in a training step, by `sharding_factor`.

The bytes are read from the counters of the hosts' interfaces. Needs root, `ip` and `tc`.

If a copy has F ranks and each host has F ranks, the sums of gradient shards go to the other host, and the total comes
back. With Ψ elements, 4Ψ bytes leave each of two hosts in a step, at every stage, and nothing else.

Knows: the command's flags, the closed form, the table. Does not know: how hosts are made, or anything is measured.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import network, tables
from .crossing_rank import Crossed, CrossingJob
from .processes import RankError, crossing_ranks
from .report import Report

HOSTS = 2
MEGABITS = 1000
MODEL, STEPS = "layers-4x1x1024", 5


def table(found: Sequence[Crossed], ranks_per_host: int) -> tables.Table:
    """Make a table with a row for each setting."""
    rows = []
    for (stage, factor), group in itertools.groupby(found, key=lambda c: (c.stage, c.factor)):
        ranks = sorted(group, key=lambda c: c.rank)
        left = [ranks[host * ranks_per_host].left for host in range(HOSTS)]
        crossed, sent = sum(c.crossed for c in ranks), sum(c.sent for c in ranks)
        form = 4 * ranks[0].numel * HOSTS if factor == ranks_per_host else None
        rows.append(
            [
                f"stage {stage}, F = {factor}",
                " ".join(f"{nbytes / 1e6:.2f}" for nbytes in left),
                f"{crossed / 1e6:.2f}",
                f"{(sent - crossed) / 1e6:.2f}",
                f"{sent / ranks[0].formula:.4f}",
                *(("–", "–") if form is None else (f"{crossed / form:.4f}", f"{sum(left) / form:.4f}")),
            ]
        )
    heading = f"{HOSTS} hosts of {ranks_per_host} ranks, {found[0].numel * 4 / 1e6:.1f} MB of parameters: MB of a step"
    columns = ["setting", "left each host", "counted, all hosts", "inside hosts", "sent ÷ formula"]
    return tables.Table(heading, [*columns, "counted ÷ form", "left ÷ form"], rows)


def main(
    ranks: Annotated[int, typer.Option(help="How many ranks a host.")] = 2,
    model: Annotated[str, typer.Option(help="One of benchmarks.models.")] = MODEL,
    out: Annotated[Path, typer.Option(help="Folder for crossing.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Bytes between hosts in a step of training, at stages 1 to 3, for every number of ranks to a copy."""
    console = tables.console(stderr=markdown)
    if show_only is None:
        needs = network.missing()
        if needs:
            print(f"error: this benchmark makes network namespaces and needs {' and '.join(needs)}", file=sys.stderr)
            raise typer.Exit(1)
        world_size = HOSTS * ranks
        factors = [factor for factor in range(1, world_size + 1) if world_size % factor == 0]
        job = CrossingJob(list(itertools.product((1, 2, 3), factors)), model, STEPS, network.INTERFACE)
        try:
            with network.hosts(HOSTS, MEGABITS) as names, console.status("training"):
                commands = [["ip", "netns", "exec", name] for name in names for _ in range(ranks)]
                found = crossing_ranks(job, commands)
        except (RankError, network.NetworkError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        parts = [asdict(crossed) for crossed in found]
        report = Report.of_this_machine("benchmarks.crossing", parts)
        report.write(out / "crossing.json")
    else:
        report = Report.read(show_only)
        found = [Crossed(**part) for part in report.parts]
        ranks = len({crossed.rank for crossed in found}) // HOSTS
    tables.show(report.line(), [table(found, ranks)], markdown, console)


if __name__ == "__main__":
    typer.run(main)
