"""Tables and the picture of how a step's time grows, the lines through it, and the targets.

Knows: samples, axes, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .fits import Line, fit
from .job import quartiles
from .pictures import PANEL, legend, save, title
from .scaling_axes import AXES, BUCKETS, ELEMENTS, TENSORS, WORLD, Axis
from .step_job import Trained, seconds_of_a_step
from .systems import DDP, PLAIN
from .tables import Table, milliseconds

COLORS = {PLAIN: "#999999", DDP: "#2f6f9f", "zero 1": "#d9a441", "zero 2": "#c4552d", "zero 3": "#7a5195"}


@dataclass(frozen=True)
class Sample:
    """One run of ``ranks`` processes at the point ``x`` of an axis.

    ``buckets`` and ``loss``: those of rank 0. ``seconds``: of a step (`seconds_of_a_step`).
    """

    axis: str
    x: float
    system: str
    ranks: int
    buckets: int
    seconds: float
    loss: float | None

    @classmethod
    def of(cls, axis: str, x: float, ranks: Sequence[Trained]) -> Sample:
        first = ranks[0]
        return cls(axis, x, first.system, len(ranks), first.buckets, seconds_of_a_step(ranks), first.loss)


class ScalingResults:
    """Runs of one machine, in rounds, by axis, system and place."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._found: dict[tuple[str, str, float], list[Sample]] = {}
        for sample in samples:
            self._found.setdefault((sample.axis, sample.system, sample.x), []).append(sample)

    def axes(self) -> list[Axis]:
        return [AXES[name] for name in dict.fromkeys(axis for axis, _, _ in self._found)]

    def systems(self, axis: Axis) -> list[str]:
        return sorted({system for name, system, _ in self._found if name == axis.name}, key=list(COLORS).index)

    def places(self, axis: Axis, system: str) -> list[float]:
        return sorted(x for name, found, x in self._found if (name, found) == (axis.name, system))

    def runs(self, axis: Axis, system: str, x: float) -> list[Sample]:
        """Return the runs in order of rounds; none if that was not measured.

        If the plain loop has one place, it stands for all.
        """
        places = self.places(axis, system)
        place = places[0] if system == PLAIN and axis.plain_once and places else x
        return self._found.get((axis.name, system, place), [])

    def seconds(self, axis: Axis, system: str, x: float) -> float:
        """Return the median over rounds."""
        return median(run.seconds for run in self.runs(axis, system, x))

    def pairs(self, axis: Axis, system: str, than: str, x: float) -> list[tuple[float, float]]:
        """Return the seconds of both systems in each round."""
        both = zip(self.runs(axis, system, x), self.runs(axis, than, x), strict=False)
        return [(mine.seconds, theirs.seconds) for mine, theirs in both]

    def ratio(self, axis: Axis, system: str, than: str, x: float) -> float | None:
        """Return the median over rounds of the ratio within a round, or None if one of the two was not run."""
        ratios = [mine / theirs for mine, theirs in self.pairs(axis, system, than, x)]
        return median(ratios) if ratios else None

    def over(self, axis: Axis, system: str, than: str, x: float) -> float | None:
        """Return the median over rounds of the difference in seconds within a round.

        Return None if one of the two systems was not run.
        """
        more = [mine - theirs for mine, theirs in self.pairs(axis, system, than, x)]
        return median(more) if more else None

    def points(self, axis: Axis, system: str) -> tuple[list[float], list[float]]:
        """Return the points of the fit: places, or numbers of buckets, and seconds."""
        places = self.places(axis, system)
        xs = [float(self.runs(axis, system, x)[0].buckets) if axis.by_buckets else x for x in places]
        return xs, [self.seconds(axis, system, x) for x in places]

    def line(self, axis: Axis, system: str) -> Line | None:
        return fit(*self.points(axis, system))


def every_table(results: ScalingResults) -> Iterator[Table]:
    for axis in results.axes():
        yield by_place(results, axis)
    yield lines(results)
    yield costs(results)
    yield targets(results)


def by_place(results: ScalingResults, axis: Axis) -> Table:
    """Make a table of all results of an axis."""
    columns = [axis.label, "system", "ranks", "buckets", "ms", "quartiles", "÷ DDP", "over plain ms", "loss"]
    if not axis.plain_once:
        columns.insert(-1, f"{axis.each} a {axis.unit} over plain")
    places = sorted({x for system in results.systems(axis) for x in results.places(axis, system)})
    rows = [
        _row(results, axis, system, x)
        for x in places
        for system in results.systems(axis)
        if x in results.places(axis, system)
    ]
    return Table(f"{axis.name}: {axis.says}", columns, rows)


def _row(results: ScalingResults, axis: Axis, system: str, x: float) -> list[str]:
    runs = results.runs(axis, system, x)
    low, high = quartiles([run.seconds for run in runs])
    ratio = results.ratio(axis, system, DDP, x)
    over = None if system == PLAIN else results.over(axis, system, PLAIN, x)
    each = [] if axis.plain_once else ["–" if over is None else f"{over / x * axis.scale:.2f}"]
    return [
        f"{x:g}",
        system,
        str(runs[0].ranks),
        str(runs[0].buckets or "–"),
        milliseconds(results.seconds(axis, system, x)),
        f"{milliseconds(low)}–{milliseconds(high)}",
        "–" if ratio is None else f"{ratio:.2f}",
        "–" if over is None else f"{over * 1e3:.2f}",
        *each,
        "–" if runs[0].loss is None else f"{runs[0].loss:.4f}",
    ]


def lines(results: ScalingResults) -> Table:
    """Make a table of the fixed cost and slope of every system along every axis, and of the bends."""
    columns = ["axis", "system", "fixed ms", "slope", "bends at", "slope beyond", "largest miss"]
    rows = []
    for axis in results.axes():
        for system in results.systems(axis):
            line = results.line(axis, system)
            if line is not None:
                slopes = [f"{slope * axis.scale:.3g} {axis.each} a {axis.unit}" for slope in (line.slope, line.beyond)]
                bent = ["–", "–"] if line.bend is None else [f"{line.bend:g}", slopes[1]]
                rows.append([axis.name, system, f"{line.fixed * 1e3:.2f}", slopes[0], *bent, f"{line.miss:.0%}"])
    return Table("Fitted lines: seconds = fixed + slope · x", columns, rows)


def costs(results: ScalingResults) -> Table:
    """Make a table of the cost that each system adds to the plain loop: for a step, a bucket, a tensor, an element."""
    columns = ["system", "ms a step", "µs a bucket", "µs a tensor", "ns an element"]
    systems = dict.fromkeys(system for axis in results.axes() for system in results.systems(axis) if system != PLAIN)
    rows = []
    for system in systems:
        plain, mine = (results.line(TENSORS, name) for name in (PLAIN, system))
        fixed = "–" if plain is None or mine is None else f"{(mine.fixed - plain.fixed) * 1e3:.2f}"
        slopes = [
            _slope(results, axis, system, scale) for axis, scale in ((BUCKETS, 1e6), (TENSORS, 1e6), (ELEMENTS, 1e3))
        ]
        rows.append([system, fixed, *slopes])
    return Table("What it adds to the plain loop, by the fitted lines", columns, rows)


def _slope(results: ScalingResults, axis: Axis, system: str, scale: float) -> str:
    """Return the slope less the plain loop's, and that beyond the bend of either."""
    mine = results.line(axis, system)
    plain = Line(0, 0, None, 0, 0) if axis.plain_once else results.line(axis, PLAIN)
    if mine is None or plain is None:
        return "–"
    first, last = (mine.slope - plain.slope) * scale, (mine.beyond - plain.beyond) * scale
    return f"{first:.2f}" if mine.bend is None and plain.bend is None else f"{first:.2f}, then {last:.2f}"


MANY = 10000  # the number of tensors at which targets are checked
OVER_DDP, OVER_PLAIN = 0.7, 4.0


def targets(results: ScalingResults) -> Table:
    """Make a table of the targets and the measured values."""
    rows = []
    for system in ("zero 1", "zero 2"):
        ratio = results.ratio(TENSORS, system, DDP, MANY)
        if ratio is not None:
            met = "yes" if ratio <= OVER_DDP else "no"
            rows.append([f"{system} ÷ {DDP}, {MANY} tensors", f"≤ {OVER_DDP:.2f}", f"{ratio:.2f}", met])
        over = results.over(TENSORS, system, PLAIN, MANY)
        if over is not None:
            each = over / MANY * 1e6
            met = "yes" if each <= OVER_PLAIN else "no"
            what = f"{system}, µs a tensor over the plain loop, {MANY} tensors"
            rows.append([what, f"≤ {OVER_PLAIN:g}", f"{each:.2f}", met])
    return Table("What must be seen", ["measure", "target", "measured", "met"], rows)


def draw(path: Path, results: ScalingResults, footer: str) -> None:
    """Write a PNG: points and fitted lines, a panel for each axis."""
    axes = results.axes()
    columns = min(2, len(axes))
    rows = -(-len(axes) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        _panel(panel, results, axis)
    for panel in panels[len(axes) :]:
        panel.remove()
    legend(figure, panels[0])
    save(figure, path, footer)


def _panel(panel: Axes, results: ScalingResults, axis: Axis) -> None:
    for system in results.systems(axis):
        color, (xs, seconds) = COLORS[system], results.points(axis, system)
        label = "plain, one rank" if system == PLAIN else system
        if system == PLAIN and axis.plain_once:
            panel.axhline(seconds[0] * 1e3, color=color, linestyle="--", label=label)
            continue
        panel.plot(xs, [value * 1e3 for value in seconds], "o", color=color, markersize=4, label=label)
        line = results.line(axis, system)
        if line is not None:
            dense = np.geomspace(min(xs), max(xs), 200)
            panel.plot(dense, [line.at(x) * 1e3 for x in dense], "-", color=color, linewidth=1.2)
            if line.bend is not None:
                panel.plot([line.bend], [line.at(line.bend) * 1e3], "D", mfc="none", color=color, markersize=8)
    if axis.name == WORLD.name:
        panel.set_xticks([point.x for point in axis.points])
    else:
        panel.set_xscale("log")
    if not axis.plain_once:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    panel.set_xlabel("buckets a step" if axis.by_buckets else axis.label)
    panel.set_ylabel("ms a step")
    title(panel, axis.name, axis.says)
    panel.grid(color="0.92")
    panel.spines[["top", "right"]].set_visible(False)
