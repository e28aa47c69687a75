"""`zero sweep`: one model under every setting of ZeroOptimizer, with memory of a rank against the time of a step.

Knows: the settings, the order of runs, the table and the files, also after failures and an interrupt. Does not know:
what a rank does (`rank`), or how a picture is drawn.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from ...core.stage import STAGES, Placement
from ..console import INSTALL_HINT, Console, megabytes
from ..runner import (
    RankError,
    cannot_write,
    check_alone,
    check_output,
    checking_input,
    fail,
    launch_ranks,
    one_line,
    reports_errors,
)
from ..train.plots import Dot, can_draw, draw_sweep
from ..train.settings import SweepConfig
from .baselines import baselines
from .rank import RankResult, RunSpec, result_path

__all__ = ["Point", "draw", "frontier", "jobs", "run"]


@dataclass(frozen=True)
class Point:
    """The result of a setting. ``step_ms``: of the slowest rank, the median over steps, and then over rounds. ``peak``:
    bytes above its start of the rank that held most, the median over rounds; None if the system does not report them.
    ``sha256``: of the trained parameters on all ranks in all rounds, for settings of zero; one, unless bits differ."""

    name: str
    job: RunSpec
    step_ms: float
    peak: int | None
    sha256: tuple[str, ...]


@dataclass
class _Found:
    """The results so far. ``runs``: of each setting, one per round; ``failures``: name -> its error in one line."""

    runs: dict[RunSpec, list[list[RankResult]]]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        return [_point(job, runs) for job, runs in self.runs.items() if runs]


def jobs(config: SweepConfig) -> Iterator[RunSpec]:
    """Yield the baselines, and then every setting of zero that differs from the others for this number of ranks."""
    c = config
    base = RunSpec(c.preset, c.batch, c.sequence, c.steps, c.seed, c.threads, c.bucket_cap_mb)
    if config.peers:
        yield from (replace(base, peer=peer.name) for peer in baselines(config.ranks))
    for number in config.stage or STAGES:
        stage = STAGES[number]
        if stage.states is Placement.WHOLE:
            yield replace(base, stage=number)
            continue
        for factor in _divisors(config.ranks):
            sharded = stage.parameters is Placement.SHARD
            for kept in [factor, *_divisors(factor)[:-1]] if sharded else [factor]:
                reshard = kept == factor or (kept > 1 and kept)
                shared = replace(base, stage=number, sharding_factor=factor, reshard=reshard)
                yield from (shared, replace(shared, offload=True))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def name_of(job: RunSpec) -> str:
    """Name a setting in a few words, without its defaults."""
    if job.peer is not None:
        return job.peer
    parts = [f"zero {job.stage}"]
    if job.sharding_factor is not None:
        parts.append(f"F={job.sharding_factor}")
    if job.reshard is not True:
        parts.append("kept" if job.reshard is False else f"kept by {job.reshard}")
    if job.offload:
        parts.append("states on disk")
    return ", ".join(parts)


@reports_errors
def run(config: SweepConfig) -> int:
    """Measure every setting, print and write the results. The exit code is 1 if a setting failed or if settings trained
    different parameters. After an interrupt, the results so far are printed and written."""
    with checking_input():
        check_alone("zero sweep")
        check_output(config.out)
    console = Console()
    found = _Found({job: [] for job in jobs(config)})
    try:
        _measure(found, config, console)
    except KeyboardInterrupt:
        _report(found, config, console)
        raise
    return _report(found, config, console)


def frontier(points: list[Point]) -> list[Point]:
    """Return the settings of zero for which no other one is both smaller and faster, ordered by time."""
    best: list[Point] = []
    ours = [point for point in points if point.job.peer is None and point.peak is not None]
    for point in sorted(ours, key=lambda point: (point.step_ms, point.peak or 0)):
        if not best or (point.peak or 0) < (best[-1].peak or 0):
            best.append(point)
    return best


def _measure(found: _Found, config: SweepConfig, console: Console) -> None:
    """Run all rounds. A round runs each setting once, without those that have failed."""
    for number in range(config.rounds):
        turn = "" if config.rounds == 1 else f"round {number + 1} of {config.rounds}: "
        for job, runs in found.runs.items():
            name = name_of(job)
            if name in found.failures:
                continue
            try:
                runs.append(_run(job, config))
            except (RankError, OSError) as error:
                found.failures[name] = one_line(error)
                console.line(f"{turn}{name}: failed: {found.failures[name]}")
            else:
                point = _point(job, runs[-1:])
                console.line(f"{turn}{name}: {point.step_ms:.1f} ms, {_held(point)}")


def _run(job: RunSpec, config: SweepConfig) -> list[RankResult]:
    with tempfile.TemporaryDirectory(dir=config.out) as folder:
        launch_ranks("zero.commands.sweep.rank", {"job": asdict(job), "folder": folder}, config.ranks)
        return [RankResult(**json.loads(result_path(Path(folder), rank).read_text())) for rank in range(config.ranks)]


def _point(job: RunSpec, runs: list[list[RankResult]]) -> Point:
    seconds = [median(map(max, zip(*(result.seconds for result in ranks), strict=True))) for ranks in runs]
    peaks = [
        max(result.peak for result in ranks if result.peak is not None) for ranks in runs if ranks[0].peak is not None
    ]
    sha256 = tuple(sorted({result.sha256 for ranks in runs for result in ranks if result.sha256 is not None}))
    return Point(name_of(job), job, 1000 * median(seconds), round(median(peaks)) if peaks else None, sha256)


def _held(point: Point) -> str:
    return "unknown memory" if point.peak is None else f"{megabytes(point.peak)} a rank"


def _report(found: _Found, config: SweepConfig, console: Console) -> int:
    """Print and write all results. Return the exit code: 1 after an error, which is printed."""
    points, code = found.points, 0
    if points or found.failures:
        best = frontier(points)
        _show(points, best, config, console)
        try:
            written = _write(points, found.failures, config)
        except OSError as error:
            code = fail(cannot_write(config.out, error))
        else:
            console.line(f"written to {config.out}: {', '.join(written)}")
        if not can_draw():
            console.line(f"matplotlib is not installed: no sweep.png. To have it: {INSTALL_HINT}")
    hashes = {sha256 for point in points for sha256 in point.sha256}
    if len(hashes) > 1:
        code = fail(f"settings of ours trained {len(hashes)} different sets of parameters: see sha256 in sweep.json")
    elif hashes:
        ours = sum(point.job.peer is None for point in points)
        console.line(f"settings of zero that trained the same bits: {ours}, SHA-256 {hashes.pop()}")
    if found.failures:
        number = len(found.failures)
        code = fail(f"{number} setting{'s' * (number > 1)} failed: {'; '.join(found.failures)}")
    return code


def _show(points: list[Point], best: list[Point], config: SweepConfig, console: Console) -> None:
    rows = [
        (
            point.name,
            f"{point.step_ms:.1f}",
            "?" if point.peak is None else f"{point.peak / 1e6:.1f}",
            "*" * (point in best),
        )
        for point in sorted(points, key=lambda point: point.step_ms)
    ]
    title = f"{config.preset} on {config.ranks} ranks: * no other of zero's is both smaller and faster"
    console.table(title, ["setting", "step, ms", "MB of a rank, at its peak", ""], rows)


def _write(points: list[Point], failures: dict[str, str], config: SweepConfig) -> list[str]:
    """Write sweep.json, and sweep.png if it can be drawn. Return the names of the files written. Raises OSError."""
    asked = asdict(config)
    del asked["out"]  # the file names no folder of the machine
    written = {
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform()},
        "config": asked,
        "points": [asdict(point) for point in points],
        "failures": failures,
    }
    (config.out / "sweep.json").write_text(json.dumps(written) + "\n")
    return ["sweep.json", *draw(config.out)]


def draw(folder: Path) -> list[str]:
    """Draw the sweep.json of a folder as sweep.png. Return the names of the files written: none if no setting was
    measured or matplotlib is missing."""
    written = json.loads((folder / "sweep.json").read_text())
    points = [Point(**point | {"job": RunSpec(**point["job"])}) for point in written["points"]]
    best = frontier(points)
    dots = [
        Dot(
            point.name,
            "torch" if point.job.peer is not None else f"zero {point.job.stage}",
            point.job.peer is None,
            point.step_ms,
            point.peak,
            hollow=point.job.offload,
            best=point in best,
        )
        for point in points
        if point.peak is not None
    ]
    if not dots or not can_draw():
        return []
    title = "{preset} on {ranks} ranks, {batch} x {sequence} bytes a rank and step".format(**written["config"])
    draw_sweep(folder / "sweep.png", title, dots)
    return ["sweep.png"]
