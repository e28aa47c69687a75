"""The picture of results on one host: bus bandwidth over size, a panel for each collective and world size.

Knows: records, matplotlib. Does not know: how they were measured.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .cases import GLOO, IN_COMMON, RELEASED, ROOFLINE
from .job import Measured
from .pictures import legend, save
from .tables import Results, size

COLORS = {"shared": "#c4552d", "pairwise": "#2f6f9f", "ring": "#6aa084", GLOO: "#555555", ROOFLINE: "#999999"}
COLORS |= {IN_COMMON: "#d9a441", RELEASED: "#7a5195"}
MARKERS = {"shared": "o", "pairwise": "s", "ring": "^", GLOO: "D", IN_COMMON: "v", RELEASED: "x"}
PANEL = (5.6, 3.6)


def draw(path: Path, results: Results, footer: str) -> None:
    """Write a PNG."""
    operations = list(dict.fromkeys(operation for operation, _ in results.groups()))
    worlds = sorted({world_size for _, world_size in results.groups()})
    figure = Figure(figsize=(PANEL[0] * len(worlds), PANEL[1] * len(operations) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(operations), len(worlds), sharey=True, squeeze=False)
    for row, operation in enumerate(operations):
        for column, world_size in enumerate(worlds):
            _panel(panels[row][column], results, operation, world_size)
    for axes in panels[:, 0]:
        axes.set_ylabel("busbw, GB/s")
    for axes in panels[-1]:
        axes.set_xlabel("bytes of the whole buffer, fp32")
    legend(figure, panels[-1][0])
    save(figure, path, footer)


def _panel(axes: Axes, results: Results, operation: str, world_size: int) -> None:
    sizes = results.sizes(operation, world_size)
    for name in results.algorithms(operation, world_size):
        found = [m for n in sizes if (m := results.get(operation, world_size, n, name)) is not None]
        if found:
            _line(axes, name, found)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(n) for n in sizes], rotation=35, fontsize=8)
    axes.minorticks_off()
    axes.set_title(f"{operation}, {world_size} ranks", fontsize=11, loc="left")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, name: str, found: list[Measured]) -> None:
    """Draw medians, and a shade between the quartiles."""
    sizes = [m.nbytes for m in found]
    color = COLORS[name]
    style = "--" if name == ROOFLINE else "-"
    values = [m.busbw / 1e9 for m in found]
    axes.plot(sizes, values, style, color=color, marker=MARKERS.get(name, ""), markersize=4, linewidth=1.6, label=name)
    fast = [value * m.median / m.low for value, m in zip(values, found, strict=True)]
    slow = [value * m.median / m.high for value, m in zip(values, found, strict=True)]
    axes.fill_between(sizes, slow, fast, color=color, alpha=0.15, linewidth=0)
