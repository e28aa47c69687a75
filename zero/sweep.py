"""`zero sweep`: one model under every setting of ZeroOptimizer's dials, memory of a rank against the time of a step.

Knows: which settings there are, the order of runs, the table and the files that are left. Does not know: what a rank
does (`sweep_rank`), or how a picture is drawn.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from .config import SweepConfig
from .launch import RankError, launch_ranks
from .peers import peers
from .plots import Dot, can_draw, draw_sweep
from .stages import STAGES, Placement
from .sweep_rank import Job, Seen
from .view import INSTALL_HINT, View, make_view, megabytes

__all__ = ["Point", "frontier", "jobs", "run"]


@dataclass(frozen=True)
class Point:
    """A setting, as it ran. ``step_ms``: of the slowest rank, the median over steps, and over rounds; ``peak``: bytes
    above its start of the rank that held most, the median over rounds; None where the system does not tell.
    ``sha256``: of the trained parameters, of all ranks and rounds, for settings of ours; one, unless bits differ."""

    name: str
    job: Job
    step_ms: float
    peak: int | None
    sha256: tuple[str, ...]


def jobs(config: SweepConfig) -> Iterator[Job]:
    """Every setting of the dials that is another one for so many ranks, and what torch has."""
    c = config
    base = Job("", c.preset, c.batch, c.sequence, c.steps, c.seed, c.threads, c.bucket_cap_mb)
    if config.peers:
        yield from (replace(base, peer=peer.name) for peer in peers(config.ranks))
    for number in config.stage or STAGES:
        stage = STAGES[number]
        if stage.states is Placement.WHOLE:
            yield replace(base, stage=number)
            continue
        for factor in (number for number in range(1, config.ranks + 1) if config.ranks % number == 0):
            shared = replace(base, stage=stage.number, sharding_factor=factor)
            yield from (shared, replace(shared, offload=True))
            if stage.parameters is Placement.SHARD:
                yield replace(shared, offload=True, offload_parameters=True)
                for kept in (number for number in range(1, factor) if factor % number == 0):
                    yield replace(shared, reshard=kept > 1 and kept)


def name_of(job: Job) -> str:
    """A setting in few words, without what is the default."""
    if job.peer is not None:
        return job.peer
    parts = [f"zero {job.stage}"]
    if job.sharding_factor is not None:
        parts.append(f"F={job.sharding_factor}")
    if job.reshard is not True:
        parts.append("kept" if job.reshard is False else f"kept by {job.reshard}")
    if job.offload:
        parts.append("all on disk" if job.offload_parameters else "states on disk")
    return ", ".join(parts)


def run(config: SweepConfig) -> int:
    """Measure, show and write; the exit code: 0, 1 after an error or where settings trained other parameters, 130 if
    interrupted. What was measured before an error is shown and written."""
    if "WORLD_SIZE" in os.environ:
        return _fail("zero sweep starts ranks of its own: call it in one process, without torchrun")
    view = make_view(1)
    view.finish()
    found: dict[Job, list[list[Seen]]] = {job: [] for job in jobs(config)}
    failure: str | None = None
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        for number in range(config.rounds):
            for job, runs in found.items():
                runs.append(_run(job, config))
                point = _point(job, runs[-1:])
                view.line(f"{_round(number, config)}{point.name}: {point.step_ms:.1f} ms, {_held(point)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        return _fail(f"--out {config.out}: cannot write there ({error.strerror}). Name a folder that can be written")
    except RankError as error:
        failure = f"{name_of(job)}: {error}"
    points = [_point(job, runs) for job, runs in found.items() if runs]
    if points:
        _report(points, config, view)
    hashes = {sha256 for point in points for sha256 in point.sha256}
    if len(hashes) > 1:
        return _fail(f"settings of ours trained {len(hashes)} different sets of parameters: see sha256 in sweep.json")
    if hashes:
        ours = sum(point.job.peer is None for point in points)
        view.line(f"settings of zero that trained the same bits: {ours}, SHA-256 {hashes.pop()}")
    return 0 if failure is None else _fail(failure)


def frontier(points: list[Point]) -> list[Point]:
    """Those of ours beside which no other of ours is both smaller and faster, by time."""
    best: list[Point] = []
    ours = [point for point in points if point.job.peer is None and point.peak is not None]
    for point in sorted(ours, key=lambda point: (point.step_ms, point.peak or 0)):
        if not best or (point.peak or 0) < (best[-1].peak or 0):
            best.append(point)
    return best


def _run(job: Job, config: SweepConfig) -> list[Seen]:
    with tempfile.TemporaryDirectory(dir=config.out) as folder:
        told = replace(job, folder=folder)
        launch_ranks("zero.sweep_rank", [json.dumps(asdict(told))], config.ranks)
        return [Seen(**json.loads(told.said(rank).read_text())) for rank in range(config.ranks)]


def _point(job: Job, runs: list[list[Seen]]) -> Point:
    seconds = [median(map(max, zip(*(seen.seconds for seen in ranks), strict=True))) for ranks in runs]
    peaks = [max(seen.peak for seen in ranks if seen.peak is not None) for ranks in runs if ranks[0].peak is not None]
    sha256 = tuple(sorted({seen.sha256 for ranks in runs for seen in ranks if seen.sha256 is not None}))
    return Point(name_of(job), job, 1000 * median(seconds), round(median(peaks)) if peaks else None, sha256)


def _round(number: int, config: SweepConfig) -> str:
    return "" if config.rounds == 1 else f"round {number + 1} of {config.rounds}: "


def _held(point: Point) -> str:
    return "unknown memory" if point.peak is None else f"{megabytes(point.peak)} a rank"


def _report(points: list[Point], config: SweepConfig, view: View) -> None:
    best = frontier(points)
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
    view.table(title, ["setting", "step, ms", "MB of a rank, at its peak", ""], rows)
    written = {
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform()},
        "config": {**asdict(config), "out": str(config.out)},
        "points": [asdict(point) for point in points],
    }
    (config.out / "sweep.json").write_text(json.dumps(written, indent=2) + "\n")
    drawn = can_draw()
    if drawn:
        what = f"{config.preset} on {config.ranks} ranks, {config.batch} x {config.sequence} bytes a rank and step"
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
        draw_sweep(config.out / "sweep.png", what, dots)
    view.line(f"written to {config.out}: sweep.json{', sweep.png' if drawn else ''}")
    if not drawn:
        view.line(f"matplotlib is not installed: no sweep.png. To have it: {INSTALL_HINT}")


def _fail(line: str) -> int:
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return 1
