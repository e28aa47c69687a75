"""The pictures of `zero train`: loss and memory of a run; and the figure that all pictures are drawn in.

Knows: how to draw them from numbers, with matplotlib, which is imported when something is drawn. Does not know: where
the numbers come from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, FORMULA, ACCENT = "#2f6f9f", "#c9d6e0", "#c4552d"
KIND_COLORS = ("#2f6f9f", "#e0a030", "#5b9a68")  # of parameters, gradients and optimizer states
SIZE, RESOLUTION = (8.0, 4.5), 150


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_loss(path: Path, title: str, losses: Sequence[float], validation: float) -> None:
    """Draw the training loss of each step, and that of the validation at the end, in nats per byte."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = figure_of(title)
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 20)
    color, width = (FORMULA, 1.0) if window > 1 else (MEASURED, 2.0)
    axes.plot(steps, losses, color=color, linewidth=width, label="training, each step")
    if window > 1:
        means = [sum(part) / len(part) for part in _windows(losses, window)]
        axes.plot(steps, means, color=MEASURED, linewidth=2.0, label=f"mean of {window} steps")
    axes.axhline(
        validation, color=ACCENT, linestyle="--", linewidth=1.2, label=f"validation at the end: {validation:.3f}"
    )
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(1, max(2, len(losses))), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.92")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=RESOLUTION)


def _windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Return about ``size`` values around each place, fewer at the ends."""
    reach = size // 2
    return [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]


def draw_memory(path: Path, title: str, bars: Mapping[str, Mapping[str, int]], measured: str) -> None:
    """Draw the bytes of a rank as one bar for each setting, by kind. ``measured``: the setting that was measured; the
    others are formulas."""
    from matplotlib.patches import Patch

    figure, axes = figure_of(title)
    totals = [sum(held.values()) / 1e6 for held in bars.values()]
    bottoms, legend = [0.0] * len(bars), []
    for kind, color in zip(next(iter(bars.values())), KIND_COLORS, strict=True):
        heights = [held[kind] / 1e6 for held in bars.values()]
        drawn = axes.bar(range(len(bars)), heights, 0.62, bottoms, color=color, edgecolor="white")
        legend.append(Patch(color=color, label=kind))
        for bar, name in zip(drawn, bars, strict=True):
            bar.set_alpha(1.0 if name == measured else 0.55)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, (name, total) in enumerate(zip(bars, totals, strict=True)):
        share = f"\n{total / totals[0]:.0%}"
        weight = "bold" if name == measured else "normal"
        axes.annotate(
            f"{total:.2f} MB{share}", (place, total), (0, 4), ha="center", textcoords="offset points", weight=weight
        )
    names = [f"{name}\n{'measured' if name == measured else 'formula'}" for name in bars]
    axes.set_xticks(range(len(bars)), names)
    axes.get_xticklabels()[list(bars).index(measured)].set_fontweight("bold")
    axes.set(ylabel="MB (10⁶ bytes)")
    axes.margins(y=0.16)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(handles=legend[::-1], frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=RESOLUTION)


def figure_of(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """Make a figure that needs no display and changes no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
