"""The pictures of a plan: plan.png, memory against time, and plan-scale.png, more and more ranks.

Knows: what is drawn, and where names have room. Does not know: bytes and seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.buckets import DEFAULT_CAP_MB, MIB
from ...planning.choose import Findings, frontier, name_of
from ...planning.plan import PlannedSetting, usable_bytes
from ...planning.setting import PlanSetting
from ..plots import ACCENT, RESOLUTION, figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

FARTHEST = 3.0  # times the fastest: slower settings would squeeze the others
COLORS = ("#8a5fa8", "#2f6f9f", "#2b8a5a", "#c98a1b")
RADIUS = 4  # points: of a dot and its edge
AROUND = ((5, 5), (5, -5), (-5, 5), (-5, -5), (5, 12), (5, -12), (-5, 12), (-5, -12))  # points: from a dot to its name

_Place = tuple[float, float]  # seconds, and GB of a rank


def draw_choices(folder: Path, found: Findings) -> str:
    """Draw the settings that were simulated, in seconds and GB, with a line through those that no other one beats, and
    their names where there is room. Return the name of the file."""
    shown, cluster = frontier(found.choices), found.cluster
    if found.best is not None and found.best not in shown:
        shown.append(found.best)
    cap = shown[0].setting.bucket_bytes
    slowest = FARTHEST * min(choice.seconds for choice in found.choices)
    drawn = [choice for choice in found.choices if choice.seconds <= slowest or choice in shown]
    figure, axes = figure_of(
        f"{found.training.model.name} on {cluster.ranks:,} {cluster.gpu.name}, planned", (10.0, 6.0)
    )
    elsewhere = ", states on a disk" if cluster.gpu.family == "cpu" else ", states on the host"
    for stage, color in zip(dict.fromkeys(choice.setting.stage for choice in drawn), COLORS, strict=False):
        for hollow in (False, True):
            part = [_place(c) for c in drawn if (c.setting.stage, bool(c.setting.offload)) == (stage, hollow)]
            axes.scatter(
                [x for x, _ in part],
                [y for _, y in part],
                s=46,
                facecolors="white" if hollow else color,
                edgecolors=color,
                label=f"zero {stage}{elsewhere if hollow else ''}" if part else None,
                zorder=3,
            )
    line = sorted(_place(choice) for choice in drawn if choice in shown)
    steps = (corner for (_, y), after in itertools.pairwise(line) for corner in ((after[0], y), after))
    corners = [*line[:1], *steps]
    axes.plot([x for x, _ in corners], [y for _, y in corners], color="0.75", linewidth=1.2)
    seconds = f"step, s (up to {FARTHEST:g} times the fastest); names: buckets of {cap // MIB} MiB unless said"
    axes.set(xlabel=seconds, ylabel="GB per rank (10⁹ bytes)")
    limit = usable_bytes(cluster) / 1e9
    axes.axhline(limit, color=ACCENT, linestyle="--", linewidth=1.0, label="memory that a rank can use")
    axes.margins(x=0.15, y=0.08)
    axes.set_xlim(left=0)  # ends automatic scaling, so it comes after the margins
    axes.set_ylim(bottom=0)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
    figure.draw_without_rendering()  # fixes all positions
    names = {name_of(_without(choice.setting, cap)): _place(choice) for choice in drawn if choice in shown}
    _name(axes, names, _taken(axes, [_place(choice) for choice in drawn], corners))
    figure.savefig(folder / "plan.png", dpi=RESOLUTION)
    return "plan.png"


def _place(choice: PlannedSetting) -> _Place:
    return choice.seconds, round(choice.peak.total / 1e3) / 1e6


def _without(setting: PlanSetting, cap: int) -> PlanSetting:
    """Return a setting whose name does not say that its buckets have ``cap`` bytes."""
    return replace(setting, bucket_cap_mb=DEFAULT_CAP_MB) if setting.bucket_bytes == cap else setting


def _taken(axes: Axes, dots: Sequence[_Place], corners: Sequence[_Place]) -> list[Bbox]:
    """Return the boxes, in pixels, that names must not cover: dots, the line through these corners, the legend."""
    from matplotlib.transforms import Bbox

    figure, legend = axes.figure, axes.get_legend()
    assert legend is not None
    radius = RADIUS * figure.dpi / 72
    places = [axes.transData.transform(dot) for dot in dots]
    ends = itertools.pairwise(axes.transData.transform(corner) for corner in corners)
    return [
        *(Bbox([place - radius, place + radius]) for place in places),
        *(Bbox([begin, end]) for begin, end in ends),
        legend.get_window_extent(),
    ]


def _name(axes: Axes, names: dict[str, _Place], taken: list[Bbox]) -> None:
    """Write each dot's name at the first offset of `AROUND` where it covers no box of ``taken`` and is inside the axes.
    If there is none, leave the name out. Adds the boxes of the names to ``taken``."""
    inside = axes.get_window_extent()
    for name, place in names.items():
        for right, up in AROUND:
            text = axes.annotate(
                name,
                place,
                xytext=(right, up),
                textcoords="offset points",
                fontsize=7.5,
                ha="left" if right > 0 else "right",
                va="bottom" if up > 0 else "top",
            )
            box = text.get_window_extent()
            if inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def draw_scale(folder: Path, found: Findings) -> str:
    """Draw tokens a second of a rank over the number of ranks, with bands, on a logarithmic axis whose ticks are the
    points of the longest line. Return the name of the file."""
    figure, axes = figure_of(f"{found.training.model.name} on {found.cluster.gpu.name}, planned")
    for curve, color in zip(found.curves, itertools.cycle(reversed(COLORS))):
        ranks = [point.ranks for point in curve.points]
        axes.plot(
            ranks, [p.tokens_per_second_of_rank for p in curve.points], color=color, linewidth=1.5, label=curve.name
        )
        axes.fill_between(ranks, [p.low for p in curve.points], [p.high for p in curve.points], color=color, alpha=0.15)
        for p in curve.points:
            face = color if p.fits else "white"
            axes.scatter([p.ranks], [p.tokens_per_second_of_rank], s=22, facecolors=face, edgecolors=color, zorder=3)
    ranks_label = "ranks, each with the same batch (bands: fabrics; hollow: does not fit)"
    axes.set(xlabel=ranks_label, ylabel="tokens/s per rank", xscale="log", ylim=(0, None))
    ticks = [point.ranks for point in max(found.curves, key=lambda curve: len(curve.points)).points]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8, rotation=30)
    axes.minorticks_off()
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(folder / "plan-scale.png", dpi=RESOLUTION)
    return "plan-scale.png"
