"""`python -m benchmarks.two_hosts`: every algorithm between simulated hosts, beside gloo and the wire.

Needs root, `ip` and `tc`.

Knows: the command's flags, and the order of its parts. Does not know: how hosts are made, or anything is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import network, tables
from .job import Job, Measured
from .processes import RankError, run_ranks
from .report import Report
from .wire import Wire

ALGORITHMS = ("pairwise", "ring", "auto")
FULL = Job(ALGORITHMS, [16 << 20, 64 << 20], seconds=10, least=5, most=15, interface=network.INTERFACE)
QUICK = replace(FULL, sizes=[4 << 20], seconds=1.0, least=3)


def measure(wires: list[Wire], job: Job, console: Console) -> Iterator[tables.Crossing]:
    """Run the job over each wire; all have the same number of hosts and the same rate."""
    first = wires[0]
    with network.hosts(first.hosts, round(first.bits_per_second / 1e6)) as names, console.status("starting") as status:
        for wire in wires:
            commands = [["ip", "netns", "exec", name] for name in names for _ in range(wire.ranks_per_host)]
            for record in run_ranks(job, commands, network.INTERFACE):
                assert isinstance(record, Measured)
                status.update(
                    f"{wire.hosts} hosts, {wire.ranks_per_host} on each: {record.operation}, "
                    f"{tables.size(record.nbytes)} done"
                )
                yield tables.Crossing(wire, record)


def show(report: Report, markdown: bool, console: Console) -> None:
    """Print the tables of a report."""
    found = [tables.Crossing(Wire(**part["wire"]), Measured(**part["measured"])) for part in report.parts]
    made = [*tables.crossings(found), tables.crossing_targets(found)]
    tables.show(report.line(), made, markdown, console)


def main(
    hosts: Annotated[int, typer.Option(min=2, max=16, help="How many hosts to play.")] = 2,
    ranks: Annotated[list[int] | None, typer.Option(help="How many ranks a host; may be repeated.")] = None,
    megabits: Annotated[int, typer.Option(help="The rate of a link, in Mbit/s each way.")] = 1000,
    quick: Annotated[bool, typer.Option("--quick", help="One size, few rounds: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON of all numbers.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of README.md.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Reduce-scatter and all-gather of fp32 between hosts, beside gloo's own and the wire."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        show(Report.read(show_only), markdown, console)
        return
    needs = network.missing()
    if needs:
        print(f"error: this benchmark makes network namespaces and needs {' and '.join(needs)}", file=sys.stderr)
        raise typer.Exit(1)
    wires = [Wire(hosts, on_each, megabits * 1e6) for on_each in ranks or [1, 2]]
    try:
        found = list(measure(wires, QUICK if quick else FULL, console))
    except (RankError, network.NetworkError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    parts = [{"wire": asdict(crossing.wire), "measured": asdict(crossing.measured)} for crossing in found]
    report = Report.of_this_machine("benchmarks.two_hosts", parts)
    path = out / f"hosts{hosts}.json"
    report.write(path)
    show(report, markdown, console)
    console.print(f"written to {path}", markup=False)


if __name__ == "__main__":
    typer.run(main)
