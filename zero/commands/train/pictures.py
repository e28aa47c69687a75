"""The pictures of `zero train`: loss and memory of a run, drawn from numbers with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..console import ACCENT, RESOLUTION, figure_of

MEASURED = "#2f6f9f"
KIND_COLORS = (MEASURED, "#e0a030", "#5b9a68")  # of parameters, gradients and optimizer states


def draw_loss(path: Path, title: str, losses: Mapping[int, float], validation: float) -> None:
    """Draw the training loss by step, and that of the validation at the end, in nats per byte."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = figure_of(title)
    axes.plot(list(losses), list(losses.values()), color=MEASURED, linewidth=2.0, marker=".", label="training")
    axes.axhline(
        validation, color=ACCENT, linestyle="--", linewidth=1.2, label=f"validation at the end: {validation:.3f}"
    )
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=RESOLUTION)


def draw_memory(path: Path, title: str, bars: Mapping[str, Mapping[str, int]], measured: str) -> None:
    """Draw the bytes of a rank as one bar for each setting, by kind. ``measured``: the setting that was measured; the
    others are formulas."""
    from matplotlib.patches import Patch

    figure, axes = figure_of(title, grid="y")
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
    axes.legend(handles=legend[::-1], frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=RESOLUTION)
