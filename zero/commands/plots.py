"""The pictures of the commands: loss and memory of a run, settings as dots, lines with bands.

Knows: how to draw them from numbers, with matplotlib, which is imported when something is drawn. Does not know: where
the numbers come from.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = ["Curve", "Dot", "can_draw", "draw_curves", "draw_loss", "draw_memory", "draw_sweep"]

MEASURED, FORMULA, ACCENT = "#2f6f9f", "#c9d6e0", "#c4552d"
SIZE, RESOLUTION = (8.0, 4.5), 150
RADIUS = 4  # points: of a dot and its edge
AROUND = ((5, 5), (5, -5), (-5, 5), (-5, -5), (5, 12), (5, -12), (-5, 12), (-5, -12))  # points: from a dot to its name
PEER, SERIES = "#5b6770", ("#8a5fa8", "#2f6f9f", "#2b8a5a", "#c98a1b")

MEASURED_LABELS = ("step, ms", "MB of a rank at its peak, above its start (10⁶ bytes)", "on disk")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_loss(path: Path, title: str, losses: Sequence[float], validation_bits_per_byte: float) -> None:
    """Draw the training loss of each step (given in nats per byte) and the final validation, in bits per byte."""
    figure, axes = _figure(title)
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
    _save(figure, path)


def _windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Return about ``size`` values around each place, fewer at the ends."""
    reach = size // 2
    return [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]


def draw_memory(path: Path, title: str, sizes: dict[str, tuple[int, int]]) -> None:
    """Draw the bytes of one rank by kind, measured beside formula."""
    figure, axes = _figure(title)
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
    _save(figure, path)


@dataclass(frozen=True)
class Dot:
    """One setting. ``series``: settings of one colour; ``ours``: a setting of zero, not of a peer;
    ``hollow``: it keeps something elsewhere, on disk for instance; ``best``: it lies on the line."""

    name: str
    series: str
    ours: bool
    step_ms: float
    nbytes: int
    hollow: bool
    best: bool


def draw_sweep(
    path: Path,
    title: str,
    dots: Sequence[Dot],
    labels: tuple[str, str, str] = MEASURED_LABELS,
    limit: float | None = None,
) -> None:
    """Draw the memory of a rank against the time of a step, with a line through the best settings. The best settings
    and all peers have their names beside them, where there is room.

    Args:
        path: of the picture.
        title: above it.
        dots: settings.
        labels: of the axes, and of hollow dots.
        limit: the most that a rank has, in MB.
    """
    figure, axes = _figure(title, (10.0, 6.0))
    colors = dict(zip(dict.fromkeys(dot.series for dot in dots if dot.ours), SERIES, strict=False))
    for name in dict.fromkeys(dot.series for dot in dots):
        color = colors.get(name, PEER)
        for hollow in (False, True):
            part = [dot for dot in dots if (dot.series, dot.hollow) == (name, hollow)]
            axes.scatter(
                [dot.step_ms for dot in part],
                [dot.nbytes / 1e6 for dot in part],
                s=46,
                marker="o" if part and part[0].ours else "X",
                facecolors="white" if hollow else color,
                edgecolors=color,
                label=f"{name}{', ' + labels[2] if hollow else ''}" if part else None,
                zorder=3,
            )
    line = sorted((dot.step_ms, dot.nbytes / 1e6) for dot in dots if dot.best)
    steps = (corner for (_, y), after in itertools.pairwise(line) for corner in ((after[0], y), after))
    corners = [*line[:1], *steps]
    axes.plot([x for x, _ in corners], [y for _, y in corners], color="0.75", linewidth=1.2)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if limit is not None:
        axes.axhline(limit, color=ACCENT, linestyle="--", linewidth=1.0, label="memory that a rank can use")
    axes.margins(x=0.15, y=0.08)
    axes.set_xlim(left=0)  # ends automatic scaling, so it comes after the margins
    axes.set_ylim(bottom=0)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
    figure.draw_without_rendering()  # fixes all positions
    _name(axes, [dot for dot in dots if dot.best or not dot.ours], _taken(axes, dots, corners))
    _save(figure, path)


def _taken(axes: Axes, dots: Sequence[Dot], corners: Sequence[tuple[float, float]]) -> list[Bbox]:
    """Return the boxes, in pixels, that names must not cover: dots, the line through these corners, the legend."""
    from matplotlib.transforms import Bbox

    figure, legend = axes.figure, axes.get_legend()
    assert legend is not None
    radius = RADIUS * figure.dpi / 72
    places = [axes.transData.transform((dot.step_ms, dot.nbytes / 1e6)) for dot in dots]
    ends = itertools.pairwise(axes.transData.transform(corner) for corner in corners)
    return [
        *(Bbox([place - radius, place + radius]) for place in places),
        *(Bbox([begin, end]) for begin, end in ends),
        legend.get_window_extent(),
    ]


def _name(axes: Axes, dots: Sequence[Dot], taken: list[Bbox]) -> None:
    """Write each dot's name at the first offset of `AROUND` where it covers no box of ``taken`` and is inside the axes.
    If there is none, leave the name out. Adds the boxes of the names to ``taken``."""
    inside = axes.get_window_extent()
    for dot in dots:
        texts = [
            axes.annotate(
                dot.name,
                (dot.step_ms, dot.nbytes / 1e6),
                xytext=(right, up),
                textcoords="offset points",
                fontsize=7.5,
                ha="left" if right > 0 else "right",
                va="bottom" if up > 0 else "top",
            )
            for right, up in AROUND
        ]
        boxes = {text: text.get_window_extent() for text in texts}
        free = [
            text
            for text, box in boxes.items()
            if inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(taken)
        ]
        taken += [boxes[text] for text in free[:1]]
        for text in texts:
            if text not in free[:1]:
                text.remove()


@dataclass(frozen=True)
class Curve:
    """One line of `draw_curves`. ``points``: (x, y, low, high, whether it is filled), in order of x."""

    name: str
    points: Sequence[tuple[int, float, float, float, bool]]


def draw_curves(path: Path, title: str, curves: Sequence[Curve], labels: tuple[str, str]) -> None:
    """Draw lines with their bands over a logarithmic x, whose ticks are the points of the longest line."""
    figure, axes = _figure(title)
    for curve, color in zip(curves, itertools.cycle(reversed(SERIES))):
        x = [point[0] for point in curve.points]
        axes.plot(x, [point[1] for point in curve.points], color=color, linewidth=1.5, label=curve.name)
        axes.fill_between(
            x, [point[2] for point in curve.points], [point[3] for point in curve.points], color=color, alpha=0.15
        )
        for x_, y, _, _, is_filled in curve.points:
            axes.scatter([x_], [y], s=22, facecolors=color if is_filled else "white", edgecolors=color, zorder=3)
    axes.set(xlabel=labels[0], ylabel=labels[1], xscale="log", ylim=(0, None))
    ticks = [point[0] for point in max(curves, key=lambda curve: len(curve.points)).points]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8, rotation=30)
    axes.minorticks_off()
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    _save(figure, path)


def _figure(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """Make a figure that needs no display and changes no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=RESOLUTION)
