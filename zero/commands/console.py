"""The output of the commands: lines, tables, and pictures if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL_HINT = "pip install 'zero-optimizer[cli]'"
ACCENT, RESOLUTION = "#c4552d", 150


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_line(text: str) -> None:
    print(text, flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the title and then the columns, the first one to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print_line(title)
    for row in (header, ["-" * width for width in widths], *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figure_of(
    title: str, size: tuple[float, float] = (8.0, 4.5), grid: Literal["both", "y"] = "both"
) -> tuple[Figure, Axes]:
    """Make a figure that needs no display and changes no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.92")
    axes.set_axisbelow(True)
    return figure, axes
