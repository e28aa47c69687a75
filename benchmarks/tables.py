"""Tables of results, for a terminal or for README.md.

Knows: texts in columns. Does not know: what was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

WIDTH = 170  # columns of the widest table
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


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of one value, that value."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def spread(low: float, high: float) -> str:
    """Return a range of seconds, in milliseconds."""
    return f"{milliseconds(low)}–{milliseconds(high)}"


def two(value: float | None) -> str:
    """Return a ratio with two decimals, or a dash."""
    return "–" if value is None else f"{value:.2f}"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"
