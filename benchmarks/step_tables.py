"""Tables and the picture of steps, and the targets.

Knows: runs, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .job import quartiles
from .pictures import PANEL, save, title
from .step_job import MODELS, Run
from .systems import DDP, FLOOR, smallest_peer
from .tables import Table, milliseconds

COLORS = {"zero": "#c4552d", "floor": "#999999"}
OTHER_COLOR = "#2f6f9f"


class StepResults:
    """Runs of one machine, by model and system."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._found: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            self._found.setdefault((run.model, run.system), []).append(run)

    def models(self) -> list[str]:
        return list(dict.fromkeys(model for model, _ in self._found))

    def systems(self, model: str) -> list[str]:
        return [system for found, system in self._found if found == model]

    def runs(self, model: str, system: str) -> list[Run]:
        return self._found[model, system]

    def seconds(self, model: str, system: str) -> float:
        """Return the median over rounds."""
        return median(run.seconds for run in self._found[model, system])

    def ratio(self, model: str, system: str, than: str) -> float | None:
        """Return the median over rounds of the ratio to another system within a round, or None if that was not run."""
        if (model, system) not in self._found or (model, than) not in self._found:
            return None
        pairs = zip(self._found[model, system], self._found[model, than], strict=False)  # a last round may be partial
        return median(mine.seconds / theirs.seconds for mine, theirs in pairs)

    @property
    def has_updates(self) -> bool:
        """Whether the processor's seconds of ``step`` were measured, as they are from 2026-11-25 on."""
        return all(run.update for runs in self._found.values() for run in runs)

    def update(self, model: str, system: str) -> float:
        """Return the seconds of the processor in the optimizer's ``step``: the median over rounds."""
        return median(run.update for run in self._found[model, system])

    def whole_job(self, model: str, system: str) -> float:
        """Return the bytes of all ranks together: the median over rounds."""
        return median(run.proportional for run in self._found[model, system])

    def ratio_to_least(self, model: str, system: str) -> float | None:
        """Return the ratio to the floor plus the time in which the bus copies the bytes that the system receives.

        It is a median as in `ratio`, or None if that was not run.
        """
        runs = self._found.get((model, system), [])
        if not runs or (model, FLOOR) not in self._found or not all(run.bus for run in runs):
            return None
        pairs = zip(runs, self._found[model, FLOOR], strict=False)
        return median(mine.seconds / (floor.seconds + mine.bus) for mine, floor in pairs)


def by_model(results: StepResults) -> Iterator[Table]:
    """Yield a table of all systems for each model."""
    columns = [
        "system",
        "ms",
        "quartiles",
        "÷ DDP",
        "÷ floor",
        "÷ (floor + bus)",
        *(["CPU ms of step()"] if results.has_updates else []),
        "parameters MB",
        "gradients MB",
        "states MB",
    ]
    columns += ["peak MB", "job's PSS MB", "loss"]
    for model in results.models():
        rows = [_row(results, model, system) for system in results.systems(model)]
        numel = MODELS[model]
        title = f"{model}: {numel.says}; {numel.batch} × {numel.sequence} tokens a rank, {_world(results, model)} ranks"
        yield Table(title, columns, rows)


def _world(results: StepResults, model: str) -> int:
    return results.runs(model, results.systems(model)[0])[0].ranks


def _row(results: StepResults, model: str, system: str) -> list[str]:
    runs = results.runs(model, system)
    low, high = quartiles([run.seconds for run in runs])
    loss = runs[0].loss
    return [
        system,
        milliseconds(results.seconds(model, system)),
        f"{milliseconds(low)}–{milliseconds(high)}",
        _two(results.ratio(model, system, DDP)),
        _two(results.ratio(model, system, FLOOR)),
        _two(results.ratio_to_least(model, system)),
        *([milliseconds(results.update(model, system))] if results.has_updates else []),
        *(_megabytes(max(getattr(run, kind) for run in runs)) for kind in ("parameters", "gradients", "states")),
        _megabytes(median(run.peak for run in runs)),
        _megabytes(results.whole_job(model, system)),
        "–" if loss is None else f"{loss:.4f}",
    ]


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:.0f}"


@dataclass(frozen=True)
class _Target:
    """The most that the time of ``system`` may be, relative to the fastest of ``than``.

    ``most`` has a ratio for each bound of a model, "communication" or "compute".
    """

    system: str
    than: Sequence[str]
    most: dict[str, float]


_PEERS = ("FSDP2", "FSDP2, kept", "DeepSpeed 3")
TARGETS = (
    *(_Target(f"zero {stage}", (DDP,), {"communication": 0.85, "compute": 0.95}) for stage in (1, 2)),
    _Target("zero 3", (DDP,), {"communication": 0.90, "compute": 0.95}),
    _Target("zero 3", _PEERS, {"communication": 0.40, "compute": 0.60}),
    *(_Target(f"zero {stage}", (FLOOR,), {"compute": 1.15}) for stage in (1, 2, 3)),
    *(
        _Target(f"zero {stage}, for-loop", (f"zero {stage}",), {"communication": 1.15, "compute": 1.15})
        for stage in range(4)
    ),
)


MOST_OF_SHARE = 1.10  # of what every rank does under DDP, added up over owners
MOST_OF_LEAST = 1.10  # times the floor plus the time of a copy of the received bytes


def targets(results: StepResults) -> Table:
    """Make a table of the targets and the measured values."""
    rows = [*_against_least(results), *_of_owners(results)]
    for target in TARGETS:
        for model in results.models():
            most = target.most.get(MODELS[model].bound)
            ratios = [ratio for than in target.than if (ratio := results.ratio(model, target.system, than)) is not None]
            if most is not None and ratios:
                against = "the fastest of " + ", ".join(target.than) if len(target.than) > 1 else target.than[0]
                worst = max(ratios)
                met = "yes" if worst <= most else "no"
                rows.append([f"{target.system} ÷ {against}", model, f"≤ {most:.2f}", f"{worst:.2f}", met])
    rows += _against_memory_of_peers(results)
    return Table("What must be seen", ["measure", "model", "target", "measured", "met"], rows)


def _of_owners(results: StepResults) -> Iterator[list[str]]:
    """Yield, with Muon, by how much the work of a step is more than 1/W of what DDP does on every rank."""
    for model in results.models():
        for stage in (1, 2, 3):
            name = f"zero {stage}"
            if {name, DDP} <= set(results.systems(model)) and results.runs(model, name)[0].muon:
                ratio = _world(results, model) * results.update(model, name) / results.update(model, DDP)
                met = "yes" if ratio <= MOST_OF_SHARE else "no"
                yield [f"{name}: ranks × CPU of step() ÷ DDP", model, f"≤ {MOST_OF_SHARE:.2f}", f"{ratio:.2f}", met]


def _against_memory_of_peers(results: StepResults) -> Iterator[list[str]]:
    for model in results.models():
        jobs = {name: results.whole_job(model, name) for name in results.systems(model)}
        for stage in (1, 2, 3):
            name, least = f"zero {stage}", smallest_peer(stage, jobs)
            if name in jobs and least is not None:
                ratio = jobs[name] / jobs[least]
                met = "yes" if ratio < 1 else "no"
                yield [f"{name}: job's PSS ÷ {least}", model, "< 1", f"{ratio:.2f}", met]


def _against_least(results: StepResults) -> Iterator[list[str]]:
    for model in results.models():
        for stage in (1, 2, 3):
            ratio = results.ratio_to_least(model, f"zero {stage}")
            if ratio is not None and MODELS[model].bound == "communication":
                met = "yes" if ratio <= MOST_OF_LEAST else "no"
                yield [f"zero {stage} ÷ (floor + bus)", model, f"≤ {MOST_OF_LEAST:.2f}", f"{ratio:.2f}", met]


def draw(path: Path, results: StepResults, footer: str) -> None:
    """Write a PNG: the time of a step by system, a panel for each model."""
    models = results.models()
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, model in zip(panels, models, strict=False):
        names = results.systems(model)
        values = [results.seconds(model, name) * 1e3 for name in names]
        colors = [COLORS.get(name.split()[0].rstrip(","), OTHER_COLOR) for name in names]
        axes.barh(names, values, color=colors)
        axes.invert_yaxis()
        for row, value in enumerate(values):
            axes.text(value, row, f" {value:.0f}", va="center", fontsize=8)
        title(axes, model, MODELS[model].says)
        axes.set_xlabel("ms a step")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(models) :]:
        axes.remove()
    save(figure, path, footer)
