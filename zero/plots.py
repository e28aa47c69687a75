"""The pictures of a run: loss.png and memory.png.

Knows: how to draw them from plain numbers, with matplotlib. Does not know: where the numbers come from. This is
the only file that imports matplotlib, and only when it draws.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["can_draw", "draw_loss", "draw_memory"]

MEASURED, FORMULA, ACCENT = "#2f6f9f", "#c9d6e0", "#c4552d"
SIZE, RESOLUTION = (8.0, 4.5), 150


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_loss(path: Path, title: str, losses: Sequence[float], validation_bits_per_byte: float) -> None:
    """Training loss (nats a byte, one number a step) and the final validation, in bits per byte."""
    figure, axes = _figure(title)
    bits = [loss / math.log(2) for loss in losses]
    steps = range(1, len(bits) + 1)
    window = max(1, len(bits) // 20)
    axes.plot(steps, bits, color=FORMULA, linewidth=1.0, label="training, each step")
    if window > 1:
        axes.plot(steps, _running_mean(bits, window), color=MEASURED, linewidth=2.0, label=f"mean of {window} steps")
    label = f"validation at the end: {validation_bits_per_byte:.3f}"
    axes.axhline(validation_bits_per_byte, color=ACCENT, linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(1, max(2, len(bits))), ylim=(0, None))
    axes.grid(color="0.92")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_memory(path: Path, title: str, measured: Mapping[str, int], formula: Mapping[str, int]) -> None:
    """Bytes of one rank by kind (the same keys in both), measured beside formula."""
    figure, axes = _figure(title)
    places = range(len(measured))
    bars = [("measured", measured, -0.2, MEASURED), ("formula", formula, 0.2, FORMULA)]
    for name, sizes, shift, color in bars:
        drawn = axes.bar(
            [place + shift for place in places], [sizes[kind] / 1e6 for kind in measured], 0.38, label=name, color=color
        )
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=9)
    axes.set_xticks(list(places), [kind.replace("_", " ") for kind in measured])
    axes.set(ylabel="MB of one rank (10⁶ bytes)")
    axes.margins(y=0.12)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    _save(figure, path)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the values around each place, about `window` of them; of those that there are at the ends."""
    reach = window // 2
    around = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in around]


def _figure(title: str) -> tuple[Figure, Axes]:
    """A figure that needs no display and touches no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=RESOLUTION)
