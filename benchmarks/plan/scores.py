"""Scores of plans of published runs, beside null models.

    N1    the median share of the peak of each GPU family, known from the runs themselves
    N2    tokens a second and GPU of the smallest run of a series, for all of it (series of two runs and more)
    M0    memory: 16 bytes a parameter over the ranks that share it, and nothing else

Knows: the table of runs, scores. Does not know: equations.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from zero.planning.seconds.compute import CONSTANTS

from .rows import RowCounter, RowPlan, plan_row
from .setting import Columns

POINTS = Path(__file__).with_name("points.csv")
DIFFERENT = 0.05  # settings whose measured speeds are nearer than this have no order


def points(split: str) -> list[dict[str, str]]:
    """Return the rows of a split of the table."""
    with POINTS.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


def is_timed(row: Columns) -> bool:
    return "time" in row["scores"]


def errors(rows: Sequence[Columns], speeds: Sequence[float | None]) -> list[float]:
    """Return the absolute error of each speed that there is, as a share of the measured one."""
    return [
        abs(speed / float(row["tokens_s_gpu"]) - 1)
        for row, speed in zip(rows, speeds, strict=True)
        if speed is not None
    ]


def summary(found: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, median and 90th percentile."""
    return float(np.mean(found)), float(np.median(found)), float(np.quantile(found, 0.9))


# -- null models ------------------------------------------------------------------------------------------------------


def flops_of_token(row: Columns) -> float:
    """Return 6 P + 12 L h s, in which nothing is recomputed."""
    sizes = float(row["layers"]) * float(row["hidden"]) * float(row["seq"])
    return 6 * float(row["params"]) + 12 * sizes


def constant_share(rows: Sequence[Columns]) -> list[float | None]:
    """Return the speeds of N1."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row["gpu"][0]].append(_share(row))
    return [
        statistics.median(found[row["gpu"][0]]) * float(row["peak_tflops"]) * 1e12 / flops_of_token(row) for row in rows
    ]


def _share(row: Columns) -> float:
    return float(row["tokens_s_gpu"]) * flops_of_token(row) / (float(row["peak_tflops"]) * 1e12)


def constant_speed(rows: Sequence[Columns]) -> list[float | None]:
    """Return the speeds of N2. None for the smallest run of a series, which it is told."""
    smallest: dict[str, Columns] = {}
    for row in sorted(rows, key=lambda row: float(row["gpus"])):
        smallest.setdefault(row["series"], row)
    told = [smallest[row["series"]] for row in rows]
    return [None if row is first else float(first["tokens_s_gpu"]) for row, first in zip(rows, told, strict=True)]


NULLS: Mapping[str, Callable[[Sequence[Columns]], list[float | None]]] = {
    "N1": constant_share,
    "N2": constant_speed,
}


def states_fit(row: Columns) -> bool:
    """Return whether the states fit (M0)."""
    factor = float(row["shard_factor"] or 1) if row["sharding"].startswith("zero") else 1.0
    return 16 * float(row["params"]) / factor <= float(row["gpu_mem_gib"]) * 2**30


# -- scores -----------------------------------------------------------------------------------------------------------


def ordered(rows: Sequence[Columns], speeds: Sequence[float | None]) -> tuple[int, int]:
    """Return how many pairs of runs of one model on equal clusters are in the right order, and how many there are."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, speed in zip(rows, speeds, strict=True):
        if row["tokens_s_gpu"] and speed is not None:
            groups[row["model"], row["gpu"], row["gpus"]].append((float(row["tokens_s_gpu"]), speed))
    right = total = 0
    for group in groups.values():
        for (one, planned_one), (other, planned_other) in combinations(group, 2):
            if abs(one / other - 1) >= DIFFERENT:
                total += 1
                right += (one > other) == (planned_one > planned_other)
    return right, total


def confusion(rows: Sequence[Columns], fits: Sequence[bool | None]) -> dict[str, int]:
    """Return how many runs "fit" and do not, planned and measured: "false fits" ran out of memory."""
    found = dict.fromkeys(("right fits", "right no", "false fits", "false no"), 0)
    for row, planned in zip(rows, fits, strict=True):
        if "oom" in row["scores"] and planned is not None:
            ran = row["outcome"] == "ok"
            found[("right " if ran == planned else "false ") + ("fits" if planned else "no")] += 1
    return found


def inside_band(rows: Sequence[Columns], plans: Sequence[RowPlan]) -> float:
    """Return the share of runs whose speed is inside the band."""
    found = [
        plan.band_low <= float(row["tokens_s_gpu"]) <= plan.band_high
        for row, plan in zip(rows, plans, strict=True)
        if plan.band_low is not None and plan.band_high is not None
    ]
    return sum(found) / len(found)


# -- the figures of the FSDP paper ------------------------------------------------------------------------------------


def hardware_tflops(row: Columns, tokens_s_gpu: float) -> float:
    """Return TFLOP/s in which what is recomputed counts: Zhao et al., "PyTorch FSDP" (2023), section 5.4."""
    layers, hidden, vocabulary = (float(row[key]) for key in ("layers", "hidden", "vocab"))
    inside = 1 + float(row["seq"]) / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * layers * hidden**2 * inside * tokens_s_gpu / 1e12


def seeds() -> list[tuple[str, str, bool]]:
    """Return (claim of the paper, what is planned, whether they agree). Nothing is fitted to them."""
    rows = {row["id"]: row for row in points("seed")}
    counter, constants = RowCounter(), CONSTANTS

    def plan(name: str, **changed: str) -> RowPlan:
        found = plan_row({**rows[name], **changed}, counter, constants)
        if found.error:
            raise ValueError(f"{name}: {found.error}")
        return found

    table = []
    for number, paper in ((1, 173.0), (2, 186.0)):
        name = f"fsdp-paper-175B/{number}"
        planned = hardware_tflops(rows[name], plan(name).tokens_s_gpu or 0.0)
        table.append((f"175B: {paper:.0f} TFLOP/s a GPU", f"{planned:.0f}", abs(planned / paper - 1) <= 0.15))
    scaling = [
        plan("fsdp-paper-t5-11B-scaling/1", gpus=gpus, shard_factor=gpus).tokens_s_gpu or 0.0 for gpus in ("512", "8")
    ]
    kept = scaling[0] / scaling[1]
    table.append(("11.3B: 512 GPUs at 0.93 of 8, each", f"{kept:.2f}", abs(kept - 0.93) <= 0.05))
    for size, sharded, whole in (("611M", 1, 2), ("2.28B", 3, 4)):
        speeds = [plan(f"fsdp-paper-t5/{number}").tokens_s_gpu or 0.0 for number in (sharded, whole)]
        ratio = speeds[0] / speeds[1]
        table.append((f"{size}: sharded at least as fast as replicated", f"{ratio:.3f} of it", ratio >= 1))
    for size, number, fits in (("2.28B", 4, True), ("11.3B", 7, False)):
        found = plan(f"fsdp-paper-t5/{number}")
        claim = f"{size} replicated {'fits' if fits else 'does not fit'}"
        table.append((claim, f"{found.mem_gib:.0f} of 80 GiB", found.fits == fits))
    return table
