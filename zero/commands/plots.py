"""The pictures of `zero train`: loss and memory of a run; and the figure that all pictures are drawn in.

Knows: how to draw them from numbers, with matplotlib, which is imported when something is drawn. Does not know: where
the numbers come from.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, FORMULA, ACCENT = "#2f6f9f", "#c9d6e0", "#c4552d"
SIZE, RESOLUTION = (8.0, 4.5), 150


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_loss(path: Path, title: str, losses: Sequence[float], validation_bits_per_byte: float) -> None:
    """Draw the training loss of each step (given in nats per byte) and the final validation, in bits per byte."""
    figure, axes = figure_of(title)
    bits = [loss / math.log(2) for loss in losses]
    steps = range(1, len(bits) + 1)
    window = max(1, len(bits) // 20)
    axes.plot(steps, bits, color=FORMULA, linewidth=1.0, label="training, each step")
    if window > 1:
        means = [sum(part) / len(part) for part in _windows(bits, window)]
        axes.plot(steps, means, color=MEASURED, linewidth=2.0, label=f"mean of {window} steps")
    label = f"validation at the end: {validation_bits_per_byte:.3f}"
    axes.axhline(validation_bits_per_byte, color=ACCENT, linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(1, max(2, len(bits))), ylim=(0, None))
    axes.grid(color="0.92")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=RESOLUTION)


def _windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Return about ``size`` values around each place, fewer at the ends."""
    reach = size // 2
    return [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]


def draw_memory(path: Path, title: str, sizes: dict[str, tuple[int, int]]) -> None:
    """Draw the bytes of one rank by kind, measured beside formula."""
    figure, axes = figure_of(title)
    for number, (name, color) in enumerate((("measured", MEASURED), ("formula", FORMULA))):
        places = [place + 0.4 * number - 0.2 for place in range(len(sizes))]
        heights = [both[number] / 1e6 for both in sizes.values()]
        drawn = axes.bar(places, heights, 0.38, label=name, color=color)
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=9)
    axes.set_xticks(list(range(len(sizes))), [kind.replace("_", " ") for kind in sizes])
    axes.set(ylabel="MB of one rank (10⁶ bytes)")
    axes.margins(y=0.12)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
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
