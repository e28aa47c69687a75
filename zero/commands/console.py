"""What a person sees in the terminal: progress, tables and lines.

Knows: how to show these with rich where it is installed and standard output is a terminal, and as plain lines
where not. Does not know: training. This is the only file that imports rich.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["INSTALL_HINT", "PlainView", "Progress", "View", "make_view", "megabytes"]

INSTALL_HINT = "pip install 'zero-optimizer[cli]'"


@dataclass(frozen=True)
class Progress:
    """One moment of a run: steps done, mean loss in nats, speed of all ranks, live bytes of rank 0."""

    step: int
    loss: float
    tokens_per_second: float
    rank_bytes: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {megabytes(self.rank_bytes)} held by a rank"
        )


class View(Protocol):
    """Where a run shows itself. `finish` ends the progress bar; lines and tables may come before and after it."""

    def advance(self, progress: Progress) -> None: ...
    def finish(self) -> None: ...
    def line(self, text: str) -> None: ...
    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...


def megabytes(size: int) -> str:
    """Bytes as MB (10**6) for people; exact numbers are in the tables."""
    return f"{size / 1e6:,.1f} MB"


class PlainView:
    """Plain lines; about ten of progress in a whole run."""

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps
        self._shown = 0

    def advance(self, progress: Progress) -> None:
        tenth = progress.step * 10 // self._steps
        if tenth > self._shown:
            self._shown = tenth
            self.line(f"step {progress.step}/{self._steps}  {progress}")

    def finish(self) -> None:
        """Nothing to take down."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        self.line(title)
        for row in (header, ["-" * width for width in widths], *rows):
            first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


class RichView:
    """A live progress bar, where there are steps, and drawn tables."""

    def __init__(self, steps: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console = Console()
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=steps)
        if steps:
            self._bar.start()

    def advance(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.step, description=str(progress))

    def finish(self) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table

        drawn = Table(title=title, title_justify="left")
        for column, name in enumerate(header):
            drawn.add_column(name, justify="right" if column else "left")
        for row in rows:
            drawn.add_row(*row)
        self._console.print(drawn)


def make_view(steps: int = 0) -> View:
    """The best view that this machine has, of lines and tables alone where there are no steps to show; says what to
    install for a better one."""
    if importlib.util.find_spec("rich") is None:
        plain = PlainView(steps)
        plain.line(f"rich is not installed: progress comes as plain lines. For a live view: {INSTALL_HINT}")
        return plain
    return RichView(steps) if sys.stdout.isatty() else PlainView(steps)
