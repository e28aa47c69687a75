"""Tables and the picture of training on one device, and the targets.

Knows: runs, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .gpu_job import DTYPES, PASSES, OnDevice
from .job import quartiles
from .pictures import PANEL, legend, save, title
from .step_tables import COLORS, OTHER_COLOR
from .systems import FSDP2, PLAIN
from .tables import Table, milliseconds

MOST = {f"zero {stage}": PLAIN for stage in range(3)} | {"zero 3": FSDP2}  # the baseline of each system
MOST_TIMES, LEAST_BANDWIDTH = 1.02, 0.85


class DeviceResults:
    """Runs on one device, by dtype and system."""

    def __init__(self, runs: Sequence[OnDevice]) -> None:
        self._found: dict[tuple[str, str], list[OnDevice]] = {}
        for run in runs:
            self._found.setdefault((run.job.dtype, run.job.system), []).append(run)

    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(dtype for dtype, _ in self._found))

    def systems(self, dtype: str) -> list[str]:
        return [system for found, system in self._found if found == dtype]

    def runs(self, dtype: str, system: str) -> list[OnDevice]:
        return self._found[dtype, system]

    def seconds(self, dtype: str, system: str) -> float:
        """Return the seconds of a step in a row: the median over rounds."""
        return median(run.in_a_row for run in self._found[dtype, system])

    def ratio(self, dtype: str, system: str, than: str) -> float | None:
        """Return the ratio of a step's time to another system's, or None if that was not run.

        It is the median over rounds of the ratio within a round.
        """
        if (dtype, system) not in self._found or (dtype, than) not in self._found:
            return None
        pairs = zip(self._found[dtype, system], self._found[dtype, than], strict=True)
        return median(mine.in_a_row / theirs.in_a_row for mine, theirs in pairs)

    def share(self, dtype: str, system: str) -> float:
        """Return the optimizer's share of the bandwidth of a copy: the median over rounds."""
        return median(run.update_bandwidth / run.copy for run in self._found[dtype, system])


def by_dtype(results: DeviceResults) -> Iterator[Table]:
    """Yield a table of all systems for each dtype."""
    columns = ["system", "ms", "quartiles", "÷ plain", "÷ FSDP2", "waited ms", "host ms", "update ms", "GB/s", "÷ copy"]
    columns += ["peak MB", "kept MB", "loss"]
    for dtype in results.dtypes():
        systems = results.systems(dtype)
        first = results.runs(dtype, systems[0])[0]
        copied = median(run.copy for system in systems for run in results.runs(dtype, system))
        job = first.job
        title = (
            f"{dtype}, {first.numel / 1e6:.0f} M parameters ({job.shape.layers} blocks of {job.shape.width}), "
            f"{job.batch} × {job.sequence} tokens, on {job.device}; a copy moves {copied / 1e9:.0f} GB/s; update: "
            f"{PASSES * DTYPES[dtype].itemsize} bytes an element"
        )
        yield Table(title, columns, [_row(results, dtype, system) for system in systems])


def _row(results: DeviceResults, dtype: str, system: str) -> list[str]:
    runs = results.runs(dtype, system)
    low, high = quartiles([run.in_a_row for run in runs])
    return [
        system,
        milliseconds(results.seconds(dtype, system)),
        f"{milliseconds(low)}–{milliseconds(high)}",
        _two(results.ratio(dtype, system, PLAIN)),
        _two(results.ratio(dtype, system, FSDP2)),
        *(milliseconds(median(getattr(run, time) for run in runs)) for time in ("waited", "host", "update")),
        f"{median(run.update_bandwidth for run in runs) / 1e9:.1f}",
        _two(results.share(dtype, system)),
        f"{max(run.peak for run in runs) / 1e6:.1f}",
        f"{max(run.kept for run in runs) / 1e6:.1f}",
        f"{runs[0].loss:.4f}",
    ]


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def targets(results: DeviceResults) -> Table:
    """Make a table of the targets and the measured values."""
    rows = []
    for dtype in results.dtypes():
        for system, than in MOST.items():
            if (ratio := results.ratio(dtype, system, than)) is not None:
                rows.append([f"{system} ÷ {than}", dtype, f"≤ {MOST_TIMES}", f"{ratio:.3f}", _met(ratio <= MOST_TIMES)])
        for system in results.systems(dtype):
            if system in MOST:
                share = results.share(dtype, system)
                met = _met(share >= LEAST_BANDWIDTH)
                rows.append([f"{system}: update ÷ copy", dtype, f"≥ {LEAST_BANDWIDTH}", f"{share:.2f}", met])
    return Table("What must be seen on a GPU", ["measure", "dtype", "target", "measured", "met"], rows)


def _met(met: bool) -> str:
    return "yes" if met else "no"


def draw(path: Path, results: DeviceResults, footer: str) -> None:
    """Write a PNG: time of a step, of the host and of the update by system, a panel for each dtype."""
    dtypes = results.dtypes()
    figure = Figure(figsize=(PANEL[0] * len(dtypes), PANEL[1] + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(dtypes), squeeze=False).flatten()
    for axes, dtype in zip(panels, dtypes, strict=True):
        names = results.systems(dtype)
        steps = [results.seconds(dtype, name) * 1e3 for name in names]
        axes.barh(names, steps, color=[COLORS.get(name.split()[0], OTHER_COLOR) for name in names])
        hosts = [median(run.host for run in results.runs(dtype, name)) * 1e3 for name in names]
        axes.plot(hosts, names, "|", color="black", markersize=14, label="the host's calls have returned")
        axes.invert_yaxis()
        for row, value in enumerate(steps):
            axes.text(0, row, f"  {value:.1f}", va="center", fontsize=8, color="white")
        title(axes, dtype)
        axes.set_xlabel("ms a step")
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure, panels[0])
    save(figure, path, footer)
