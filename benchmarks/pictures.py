"""Titles, legends and footers that fit, for the pictures of all benchmarks.

Knows: matplotlib. Does not know: what is drawn.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANEL, RESOLUTION = (6.0, 4.2), 150
TITLE, FOOTER = 52, 16  # characters in a line of a panel's title, and in an inch of the footer
ENTRY = 1.6  # inches of an entry of the legend


def title(axes: Axes, name: str, says: str = "") -> None:
    """Write the title of a panel of size `PANEL`: its name, and below it a description, wrapped."""
    axes.set_title("\n".join([name, *textwrap.wrap(says, TITLE)]), fontsize=10, loc="left")


def legend(figure: Figure, panel: Axes) -> None:
    """Write the legend of a panel above all panels, in as many columns as fit."""
    handles, labels = panel.get_legend_handles_labels()
    columns = min(len(labels), int(figure.get_figwidth() / ENTRY))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def save(figure: Figure, path: Path, footer: str) -> None:
    """Write a PNG. ``footer``: date, command and machine, wrapped."""
    figure.supxlabel(textwrap.fill(footer, int(figure.get_figwidth() * FOOTER)), fontsize=7, color="0.4")
    figure.savefig(path, dpi=RESOLUTION)
