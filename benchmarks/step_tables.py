"""Runs of a step as medians and spread, their tables, and the picture of memory against time.

Knows: runs, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .dials import PAIRS
from .models import MODELS
from .step_rank import Trained
from .systems import DDP, FLOOR
from .tables import Table, megabytes, milliseconds, quartiles, spread, two

BYTES = ("parameters", "gradients", "states", "peak")
COLORS = {"zero": "#c4552d", "FSDP2": "#2f6f9f", "DeepSpeed": "#6aa084", "FairScale": "#d9a441"}
OTHER, MARKERS = "#5b6770", "os^DvX"
PANEL, RESOLUTION, COLORS_OF_A_FILE = (5.0, 3.3), 100, 24


@dataclass(frozen=True)
class Run:
    """One run of all ranks. ``seconds``: of the slowest rank, the median over steps. ``loss``: of rank 0. Bytes are
    those of the largest rank, ``proportional`` of all together."""

    system: str
    model: str
    round: int
    ranks: int
    seconds: float
    loss: float | None
    parameters: int
    gradients: int
    states: int
    peak: int
    proportional: int

    @classmethod
    def of(cls, system: str, model: str, number: int, ranks: Sequence[Trained]) -> Run:
        seconds = median(map(max, zip(*(rank.seconds for rank in ranks), strict=True)))
        most = {kind: max(getattr(rank, kind) for rank in ranks) for kind in BYTES}
        whole = sum(rank.proportional for rank in ranks)
        return cls(system, model, number, len(ranks), seconds, ranks[0].loss, **most, proportional=whole)


@dataclass(frozen=True)
class Summary:
    """A system on a model, over all rounds.

    ``seconds``: the median, ``low`` and ``high``: the quartiles. ``of_ddp``, ``of_floor``: the ratio to DDP's time and
    to the floor's in the same round, the median; None if these were not run. ``of_fsdp2``: of a system with an option,
    the ratio to FSDP2's time with the same option. Bytes are as in `Run`: the largest, and
    the medians of ``peak`` and ``proportional``.
    """

    system: str
    model: str
    ranks: int
    rounds: int
    seconds: float
    low: float
    high: float
    of_ddp: float | None
    of_floor: float | None
    loss: float | None
    parameters: int
    gradients: int
    states: int
    peak: int
    proportional: int
    of_fsdp2: float | None = None


def summaries(runs: Sequence[Run]) -> list[Summary]:
    """Sum up runs, by model and system."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        found.setdefault((run.model, run.system), {})[run.round] = run
    return [_summary(list(of.values()), found) for of in found.values()]


def _summary(runs: Sequence[Run], found: dict[tuple[str, str], dict[int, Run]]) -> Summary:
    first, seconds = runs[0], [run.seconds for run in runs]

    def ratio(than: str) -> float | None:
        theirs = found.get((first.model, than), {})
        ratios = [run.seconds / theirs[run.round].seconds for run in runs if run.round in theirs]
        return round(median(ratios), 4) if ratios else None

    low, high = quartiles(seconds)
    return Summary(
        first.system,
        first.model,
        first.ranks,
        len(runs),
        seconds=round(median(seconds), 6),
        low=round(low, 6),
        high=round(high, 6),
        of_ddp=ratio(DDP),
        of_floor=ratio(FLOOR),
        loss=first.loss,
        of_fsdp2=next((ratio(theirs) for theirs, ours in PAIRS.values() if ours == first.system), None),
        **{kind: max(getattr(run, kind) for run in runs) for kind in BYTES[:-1]},
        **{kind: round(median(getattr(run, kind) for run in runs)) for kind in ("peak", "proportional")},
    )


@dataclass(frozen=True)
class Turn:
    """The turns of a system in a round: ``seconds`` of each step, and ``loss`` of the last one."""

    turn: int
    model: str
    system: str
    seconds: list[float]
    loss: float


def in_turn(turns: Sequence[Turn]) -> Table:
    """Make a table with a row for each system. A ratio is of two steps that followed each other: its median over the
    steps of a round, and then the median and the quartiles over the rounds."""
    systems = list(dict.fromkeys(turn.system for turn in turns))
    by_system = {name: [turn for turn in turns if turn.system == name] for name in systems}
    rows = []
    for name, of in by_system.items():
        ratios = []
        for own, first in zip(of, by_system[systems[0]], strict=True):
            ratios.append(median(mine / theirs for mine, theirs in zip(own.seconds, first.seconds, strict=True)))
        low, high = quartiles(ratios)
        seconds = milliseconds(median(median(turn.seconds) for turn in of))
        rows.append([name, seconds, f"{median(ratios):.3f}", f"{low:.3f}–{high:.3f}", f"{of[0].loss:.6f}"])
    heading = f"{turns[0].model}, rounds: {len(by_system[systems[0]])} of {len(turns[0].seconds)} steps, in turn"
    return Table(heading, ["system", "ms", f"÷ {systems[0]}", "quartiles", "loss"], rows)


def by_system(results: Sequence[Summary]) -> Iterator[Table]:
    """Yield a table of times, and one of memory."""
    found = {(result.model, result.system): result for result in results}
    models = list(dict.fromkeys(result.model for result in results))
    systems = list(dict.fromkeys(result.system for result in results))
    times = ["system", *(name for model in models for name in (f"{model}, ms", "÷ DDP"))]
    rows = [[name, *(cell for model in models for cell in _times(found.get((model, name))))] for name in systems]
    yield Table(f"A step on {results[0].ranks} ranks: medians and quartiles of {results[0].rounds} rounds", times, rows)
    model = "wide" if "wide" in models else models[0]
    columns = [*BYTES, "ms ÷ floor", "loss", *(f"job, {name}" for name in models)]
    rows = [[name, *_bytes(found[model, name]), *(_job(found.get((m, name))) for m in models)] for name in systems]
    yield Table(f"MB of a rank on {model}, and of each whole job", ["system", *columns], rows)


def by_option(results: Sequence[Summary]) -> Iterator[Table]:
    """Yield a table for each model, with a row for each option that was run under both libraries."""
    found = {(result.model, result.system): result for result in results}
    columns = ["option", "FSDP2, ms", "zero 3, ms", "zero ÷ FSDP2", "MB of a rank", "peak", "of the job", "losses"]
    for model in dict.fromkeys(result.model for result in results):
        rows = []
        for option, names in PAIRS.items():
            both = [found[model, name] for name in names if (model, name) in found]
            if len(both) == 2:
                held = [megabytes(each.parameters + each.gradients + each.states) for each in both]
                peaks, jobs = ([megabytes(getattr(each, of)) for each in both] for of in ("peak", "proportional"))
                losses = " / ".join("–" if each.loss is None else f"{each.loss:.6f}" for each in both)
                times = [f"{milliseconds(each.seconds)} ({spread(each.low, each.high)})" for each in both]
                rows.append([option, *times, two(both[1].of_fsdp2), *map(" / ".join, (held, peaks, jobs)), losses])
        yield Table(f"{model}, {results[0].ranks} ranks, rounds: {results[0].rounds}; FSDP2 / zero", columns, rows)


def _times(result: Summary | None) -> list[str]:
    if result is None:
        return ["–", "–"]
    return [f"{milliseconds(result.seconds)} ({spread(result.low, result.high)})", two(result.of_ddp)]


def _bytes(result: Summary) -> list[str]:
    held = [megabytes(getattr(result, kind)) for kind in BYTES]
    return [*held, two(result.of_floor), "–" if result.loss is None else f"{result.loss:.4f}"]


def _job(result: Summary | None) -> str:
    return "–" if result is None else megabytes(result.proportional)


def draw(path: Path, results: Sequence[Summary], footer: str) -> None:
    """Write a PNG: memory of the job against time of a step, a panel for each model; no floor, no for-loops."""
    models = list(dict.fromkeys(result.model for result in results))
    shown = [result for result in results if result.system != FLOOR and "for-loop" not in result.system]
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    looks = _looks(list(dict.fromkeys(result.system for result in shown)))
    for axes, model in zip(panels, models, strict=False):
        for result in shown:
            if result.model == model:
                color, marker = looks[result.system]
                place = [result.seconds * 1e3], [result.proportional / 1e6]
                axes.scatter(*place, s=42, color=color, marker=marker, label=result.system, zorder=3)
        axes.set_title("\n".join([model, *textwrap.wrap(MODELS[model].says, 52)]), fontsize=10, loc="left")
        axes.set(xlabel="ms per step", ylabel="MB, all ranks (10⁶ bytes)")
        axes.margins(0.08)
        axes.set_xlim(left=0)  # ends automatic scaling, so it comes after the margins
        axes.set_ylim(bottom=0)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(models) :]:
        axes.remove()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(textwrap.fill(footer, int(figure.get_figwidth() * 16)), fontsize=7, color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=RESOLUTION)
    Image.open(path).quantize(COLORS_OF_A_FILE).save(path, optimize=True)


def _looks(systems: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour for each family of systems, and a marker for each system of a family."""
    families: dict[str, list[str]] = {}
    for system in systems:
        family = system.replace(",", "").split()[0]
        families.setdefault(COLORS.get(family, OTHER), []).append(system)
    return {name: (color, marker) for color, of in families.items() for name, marker in zip(of, MARKERS, strict=False)}
