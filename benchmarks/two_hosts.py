"""`python -m benchmarks.two_hosts`: every algorithm between simulated hosts, beside gloo and the wire.

Needs root, `ip` and `tc`.

Knows: the command's flags, the bytes that a wire must carry. Does not know: how hosts are made, or how anything is
measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import network, tables
from .collective_cases import GLOO
from .collective_rank import Job, Measured
from .processes import RankError, started
from .report import Report

ALGORITHMS = ("pairwise", "ring", "auto")
FULL = Job(ALGORITHMS, [16 << 20, 64 << 20], seconds=10, least=5, most=15, interface=network.INTERFACE)
QUICK = replace(FULL, sizes=[4 << 20], seconds=1.0, least=3)


@dataclass(frozen=True)
class Crossing:
    """A record of so many hosts, numbered host by host, and the rate of each host's link, each way."""

    hosts: int
    bits_per_second: float
    measured: Measured

    @property
    def least(self) -> float:
        """Bytes that leave a host on average, whatever the algorithm."""
        return self.measured.nbytes * (self.hosts - 1) / self.hosts

    @property
    def left(self) -> list[int]:
        """Bytes that left each host, by its counters, which each of its ranks has read."""
        return self.measured.left[:: self.measured.world_size // self.hosts]

    def over_wire(self, nbytes: float) -> float:
        """Return the time, as a multiple of the wire's time for so many bytes."""
        return self.measured.median / (nbytes * 8 / self.bits_per_second)


def measure(hosts: int, on_each: Sequence[int], megabits: int, job: Job, console: Console) -> Iterator[Crossing]:
    """Run the job with each number of ranks on a host."""
    with network.hosts(hosts, megabits) as names:
        for width in on_each:
            commands = [["ip", "netns", "exec", name] for name in names for _ in range(width)]
            with (
                console.status(f"{hosts} hosts, {width} on each"),
                started("collective_rank", json.dumps(asdict(job)), commands, network.INTERFACE) as ranks,
            ):
                lines = ranks.lines()[0]
            yield from (Crossing(hosts, megabits * 1e6, Measured(**json.loads(line))) for line in lines)


def by_places(found: Sequence[Crossing]) -> Iterator[tables.Table]:
    """Yield a table for each number of ranks on a host."""
    columns = ["collective", "algorithm", "ms", "quartiles", "× gloo", "÷ wire", "MB left", "÷ least", "÷ own"]
    for world_size in dict.fromkeys(c.measured.world_size for c in found):
        own = [c for c in found if c.measured.world_size == world_size]
        gloo = {(m.operation, m.nbytes): m.median for m in (c.measured for c in own) if m.algorithm == GLOO}
        title = f"{own[0].hosts} hosts, ranks on each: {world_size // own[0].hosts}"
        rows = [_row(c, gloo[c.measured.operation, c.measured.nbytes]) for c in own]
        yield tables.Table(f"{title}, {own[0].bits_per_second / 1e9:g} Gbit/s each way", columns, rows)


def _row(c: Crossing, gloo: float) -> list[str]:
    m = c.measured
    return [
        f"{m.operation}, {tables.size(m.nbytes)}",
        m.algorithm,
        tables.milliseconds(m.median),
        tables.spread(m.low, m.high),
        f"{gloo / m.median:.2f}",
        f"{c.over_wire(c.least):.3f}",
        " ".join(f"{nbytes / 1e6:.1f}" for nbytes in c.left),
        f"{sum(c.left) / c.hosts / c.least:.3f}",
        f"{c.over_wire(max(c.left)):.3f}",
    ]


def main(
    hosts: Annotated[int, typer.Option(min=2, max=16, help="How many hosts to simulate.")] = 2,
    ranks: Annotated[list[int] | None, typer.Option(help="How many ranks a host; may be repeated.")] = None,
    megabits: Annotated[int, typer.Option(help="The rate of a link, in Mbit/s each way.")] = 1000,
    quick: Annotated[bool, typer.Option("--quick", help="One size, few rounds: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON of all numbers.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """Reduce-scatter and all-gather of fp32 between hosts, beside gloo's own and the wire."""
    console, path = tables.console(stderr=markdown), out / f"hosts{hosts}.json"
    if show_only is None:
        needs = network.missing()
        if needs:
            print(f"error: this benchmark makes network namespaces and needs {' and '.join(needs)}", file=sys.stderr)
            raise typer.Exit(1)
        try:
            found = list(measure(hosts, ranks or [1, 2], megabits, QUICK if quick else FULL, console))
        except (RankError, network.NetworkError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        Report.of_this_machine("benchmarks.two_hosts", [asdict(crossing) for crossing in found]).write(path)
    report = Report.read(show_only or path)
    crossings = [Crossing(**part | {"measured": Measured(**part["measured"])}) for part in report.parts]
    tables.show(report.line(), by_places(crossings), markdown, console)


if __name__ == "__main__":
    typer.run(main)
