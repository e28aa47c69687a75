"""Tables of results, for a terminal or for README.md, and the targets.

Knows: records, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cases import GLOO, IN_COMMON, ROOFLINE, Operation
from .job import Measured, Waited
from .wire import Wire

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

WIDTH = 150  # columns of the widest table
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column is the row's name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["--:"] * (len(self.columns) - 1)], *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> RichTable:
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for _, rows in itertools.groupby(self.rows, key=lambda row: row[0]):
            for row in rows:
                table.add_row(*map(escape, row))
            table.add_section()
        return table


def console(stderr: bool) -> Console:
    """Return a console wide enough for every table, even if the output is no terminal."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.width >= WIDTH else Console(stderr=stderr, width=WIDTH)


def show(heading: str, found: Iterable[Table], markdown: bool, console: Console) -> None:
    """Print tables below a heading, which names the command and the machine."""
    if markdown:
        print(f"{heading}\n")
    else:
        console.print(heading, markup=False)
    for table in found:
        if markdown:
            print(table.markdown())
        else:
            console.print(table.rich())


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


class Results:
    """Records of one machine, by collective, number of ranks, size and algorithm."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._found = {(m.operation, m.world_size, m.nbytes, m.algorithm): m for m in measured}
        self.measured = measured

    def groups(self) -> Iterator[tuple[str, int]]:
        """Yield every (operation, world size)."""
        yield from dict.fromkeys((m.operation, m.world_size) for m in self.measured)

    def sizes(self, operation: str, world_size: int) -> list[int]:
        return sorted({n for o, w, n, _ in self._found if (o, w) == (operation, world_size)})

    def algorithms(self, operation: str, world_size: int) -> list[str]:
        of = (operation, world_size)
        return list(dict.fromkeys(m.algorithm for m in self.measured if (m.operation, m.world_size) == of))

    def get(self, operation: str, world_size: int, nbytes: int, algorithm: str) -> Measured | None:
        return self._found.get((operation, world_size, nbytes, algorithm))

    def times(self, m: Measured, than: str) -> float | None:
        """Return how many times faster a record is than the algorithm ``than`` in the same rounds.

        Return None if that algorithm was not run.
        """
        other = self.get(m.operation, m.world_size, m.nbytes, than)
        return None if other is None else other.median / m.median

    def ratio(self, m: Measured, than: str) -> str:
        times = self.times(m, than)
        return "–" if times is None else f"{times:.2f}"


def every_number(results: Results) -> Iterator[Table]:
    """Yield all results of one host, a table for each collective and number of ranks."""
    columns = ["size", "algorithm", "ms", "quartiles", "rounds", "algbw GB/s", "busbw GB/s", "× gloo", "× roofline"]
    for operation, world_size in results.groups():
        rows = []
        for m in sorted(
            (m for m in results.measured if (m.operation, m.world_size) == (operation, world_size)),
            key=lambda m: m.nbytes,
        ):
            row = [size(m.nbytes), m.algorithm, milliseconds(m.median), _quartiles(m), str(m.rounds)]
            row += [f"{m.algbw / 1e9:.3f}", f"{m.busbw / 1e9:.3f}"]
            rows.append([*row, results.ratio(m, GLOO), results.ratio(m, ROOFLINE)])
        yield Table(f"{operation}, {world_size} ranks", columns, rows)


def _quartiles(m: Measured) -> str:
    return f"{milliseconds(m.low)}–{milliseconds(m.high)}"


def by_size(results: Results) -> Iterator[Table]:
    """Yield the tables of README.md: medians of every algorithm beside each other, and the ratios of shared memory."""
    for operation, world_size in results.groups():
        names = results.algorithms(operation, world_size)
        columns = ["size", *(f"{name} ms" for name in names), "shared busbw GB/s", "× gloo", "× roofline"]
        rows = []
        for nbytes in results.sizes(operation, world_size):
            found = {name: results.get(operation, world_size, nbytes, name) for name in names}
            row = [size(nbytes), *("–" if m is None else milliseconds(m.median) for m in found.values())]
            shared = found.get("shared")
            if shared is not None:
                row += [f"{shared.busbw / 1e9:.2f}", results.ratio(shared, GLOO), results.ratio(shared, ROOFLINE)]
            rows.append(row)
        yield Table(f"{operation}, {world_size} ranks", columns, rows)


def waited(records: Sequence[Waited]) -> Table:
    """Make a table of the CPU time of ranks that wait."""
    rows = [[str(r.world_size), r.algorithm, f"{r.cpu_seconds * 1e3:.1f}"] for r in records]
    late = records[0].late if records else 0
    return Table(f"CPU of a rank while another is {late:g} s late", ["ranks", "algorithm", "CPU ms"], rows)


# -- targets ----------------------------------------------------------------------------------------------------------

TARGETS: Sequence[tuple[Operation, Sequence[int], str, dict[int, float]]] = (
    (Operation.REDUCE_SCATTER, (16 * MIB, 64 * MIB), GLOO, {2: 9, 4: 9}),
    (Operation.ALL_GATHER, (16 * MIB, 64 * MIB), GLOO, {2: 4, 4: 3.5}),
    (Operation.REDUCE_SCATTER, (16 * MIB, 64 * MIB), ROOFLINE, {2: 0.8, 4: 0.8}),
    (Operation.ALL_GATHER, (16 * MIB, 64 * MIB), ROOFLINE, {2: 0.8, 4: 0.8}),
    (Operation.REDUCE_SCATTER, (64 * KIB,), GLOO, {2: 8, 4: 8}),
    (Operation.ALL_GATHER, (64 * KIB,), GLOO, {2: 8, 4: 8}),
)
MOST_CPU = 0.05  # of a second of waiting
SAME_COST = 1.5  # the cost must not depend on the size; the rest is noise


def targets(results: Results, waits: Sequence[Waited]) -> Table:
    """Make a table of the targets of shared memory, which must be met at each of several sizes."""
    rows = []
    for operation, sizes, than, least in TARGETS:
        for world_size, target in least.items():
            measured = (results.get(operation.value, world_size, nbytes, "shared") for nbytes in sizes)
            times = [found for m in measured if m is not None and (found := results.times(m, than)) is not None]
            if times:
                what = f"shared {operation.value}, {', '.join(map(size, sizes))}, × {than}"
                seen = ", ".join(f"{value:.2f}" for value in times)
                rows.append([what, str(world_size), f"≥ {target:g}", seen, _met(min(times) >= target)])
    rows += _whatever_the_size(results)
    for wait in waits:
        if wait.algorithm != GLOO:
            what = f"{wait.algorithm}: CPU while another rank is {wait.late:g} s late"
            seen = f"{wait.cpu_seconds * 1e3:.1f} ms"
            rows.append(
                [what, str(wait.world_size), f"< {MOST_CPU * 1e3:g} ms", seen, _met(wait.cpu_seconds < MOST_CPU)]
            )
    return Table("What must be seen on one host", ["measure", "ranks", "target", "measured", "met"], rows)


def _whatever_the_size(results: Results) -> Iterator[list[str]]:
    operation = Operation.ALL_GATHER.value
    for _, world_size in (group for group in results.groups() if group[0] == operation):
        sizes = results.sizes(operation, world_size)
        found = [m for n in sizes if (m := results.get(operation, world_size, n, IN_COMMON)) is not None]
        if found:
            ratio = found[-1].median / found[0].median
            what = f"gather in common, time of {size(found[-1].nbytes)} ÷ {size(found[0].nbytes)}"
            yield [what, str(world_size), f"≤ {SAME_COST:g}", f"{ratio:.2f}", _met(ratio <= SAME_COST)]


def _met(yes: bool) -> str:
    return "yes" if yes else "no"


# -- several hosts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    """A record beside the limits of its wire."""

    wire: Wire
    measured: Measured

    @property
    def times_wire(self) -> float:
        """Time, as a multiple of the wire's time for the bytes that must leave a host."""
        return self.measured.median / self.wire.seconds(self.wire.least(self.measured.nbytes))

    @property
    def left(self) -> list[int]:
        """Bytes that left each host, by its counters."""
        return self.wire.by_host(self.measured.left)

    @property
    def busiest(self) -> int:
        """Bytes of the busiest link and direction, by the counters."""
        return max(*self.left, *self.wire.by_host(self.measured.came))

    @property
    def times_own(self) -> float:
        """Time, as a multiple of the wire's time for the busiest link's bytes."""
        return self.measured.median / self.wire.seconds(self.busiest)

    @property
    def formula(self) -> list[int] | None:
        m = self.measured
        return self.wire.leaving(m.algorithm, Operation(m.operation), m.nbytes)

    @property
    def times_formula(self) -> float | None:
        """Bytes that left all hosts, as a multiple of the closed form."""
        return None if self.formula is None else sum(self.left) / sum(self.formula)

    @property
    def times_least(self) -> float:
        """Bytes that left a host on average, as a multiple of the least possible."""
        return sum(self.left) / self.wire.hosts / self.wire.least(self.measured.nbytes)


def crossings(found: Sequence[Crossing]) -> Iterator[Table]:
    """Yield all results between hosts: a table for each number of hosts and of ranks on each."""
    columns = ["collective", "algorithm", "ms", "quartiles", "× gloo", "÷ wire"]
    columns += ["MB left", "÷ least", "÷ form", "counted", "÷ own"]
    for wire, group in itertools.groupby(found, key=lambda c: c.wire):
        own = list(group)
        results = Results([c.measured for c in own])
        title = f"{wire.hosts} hosts, {_count(wire.ranks_per_host, 'rank')} on each"
        yield Table(
            f"{title}, {wire.bits_per_second / 1e9:g} Gbit/s each way",
            columns,
            [_crossing_row(c, results) for c in own],
        )


def _crossing_row(c: Crossing, results: Results) -> list[str]:
    m, formula = c.measured, c.formula
    return [
        f"{m.operation}, {size(m.nbytes)}",
        m.algorithm,
        milliseconds(m.median),
        _quartiles(m),
        results.ratio(m, GLOO),
        f"{c.times_wire:.3f}",
        " ".join(f"{nbytes / 1e6:.1f}" for nbytes in c.left),
        f"{c.times_least:.3f}",
        "–" if c.times_formula is None else f"{c.times_formula:.3f}",
        "–" if formula is None or not sum(m.crossed) else f"{sum(m.crossed) / sum(formula):.4f}",
        f"{c.times_own:.3f}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def crossing_targets(found: Sequence[Crossing]) -> Table:
    """Make a table of the targets of the algorithm that `auto` chooses."""
    rows = []

    def add(c: Crossing, what: str, value: float, most: float) -> None:
        m = c.measured
        place = f"{c.wire.hosts} × {c.wire.ranks_per_host}"
        name = f"{m.operation}, {size(m.nbytes)}: {what}"
        rows.append([name, place, f"≤ {most:g}", f"{value:.3f}", _met(value <= most)])

    for c in found:
        chosen = "pairwise" if c.wire.ranks_per_host == 1 else "hierarchical"
        if c.measured.algorithm != chosen or c.formula is None or c.times_formula is None:
            continue
        if c.wire.ranks_per_host == 1:
            add(c, "time ÷ wire time", c.times_wire, 1.08)
            continue
        if c.measured.operation == Operation.ALL_GATHER.value:
            add(c, "bytes ÷ least", c.times_least, 1.02)
        else:
            add(c, "bytes ÷ closed form", c.times_formula, 1.02)
            least = c.wire.least(c.measured.nbytes) * c.wire.hosts
            add(c, "closed form ÷ least", sum(c.formula) / least, 1.5)
        add(c, "time ÷ own bytes at wire rate", c.times_own, 1.15)
    return Table(
        "What must be seen between hosts, of what auto chooses",
        ["measure", "hosts × ranks", "target", "measured", "met"],
        rows,
    )
