"""Plans are near what was measured: published runs, nearer than null models; own steps on one GPU; the host's calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from benchmarks.plan import fit as plan_fit
from benchmarks.plan import scores as score
from benchmarks.plan.own import FSDP2, PLAIN, fsdp2_host, own_runs, rows_of, todays_calls
from benchmarks.plan.rows import RowCounter, RowPlan, plan_rows
from benchmarks.plan.systems import SYSTEMS
from zero.planning.hardware import presets
from zero.planning.seconds.compute import CONSTANTS


@functools.cache
def planned() -> tuple[list[dict[str, str]], list[RowPlan]]:
    rows = score.points("fit")
    return rows, plan_rows(rows)


def timed() -> tuple[list[dict[str, str]], list[RowPlan]]:
    pairs = [(row, plan) for row, plan in zip(*planned(), strict=True) if score.is_timed(row)]
    return [row for row, _ in pairs], [plan for _, plan in pairs]


def are_near(rows: list[dict[str, str]], speeds: Sequence[float | None], **bounds: float) -> None:
    """Compare the errors of tokens a second with a bound of their mean, their median and their 90th percentile."""
    found = dict(zip(("mean", "median", "high"), score.summary(score.errors(rows, speeds)), strict=True))
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}


def test_speeds_are_near_the_measured_ones_and_nearer_than_those_of_every_null_model() -> None:
    rows, plans = timed()
    speeds = [plan.tokens_s_gpu for plan in plans]
    are_near(rows, speeds, mean=0.05, median=0.025, high=0.15)
    for null in score.NULLS.values():
        alone = null(rows)  # None where it is told the speed
        asked = [(row, speed) for row, speed, other in zip(rows, speeds, alone, strict=True) if other is not None]
        found = score.summary(score.errors([row for row, _ in asked], [speed for _, speed in asked]))
        assert found[0] < score.summary(score.errors(rows, alone))[0]
    right, total = score.ordered(rows, speeds)
    assert right >= 0.9 * total > 0
    assert 0.7 <= score.inside_band(rows, plans) <= 0.95


def test_what_fits_is_right_and_every_row_has_numbers() -> None:
    """98 % of the runs that say, and more than by model states alone."""
    rows, plans = planned()
    for row, plan in zip(rows, plans, strict=True):
        assert not plan.error, (row["id"], plan.error)
        assert (plan.band_low or 0) < (plan.tokens_s_gpu or 0) < (plan.band_high or 0), row["id"]
        assert plan.fits is (plan.margin_gib is not None and plan.margin_gib >= 0)
    found = score.confusion(rows, [plan.fits for plan in plans])
    states = score.confusion(rows, [score.states_fit(row) for row in rows])
    right = found["right fits"] + found["right no"]
    assert right >= 0.98 * sum(found.values())
    assert right > states["right fits"] + states["right no"]


def test_series_that_are_left_out_of_the_fit_are_near_the_measured_ones() -> None:
    rows, _ = timed()
    counter = RowCounter()
    counted, measured = [counter.count(row) for row in rows], np.array([float(row["step_s"]) for row in rows])
    left_out = plan_fit.leave_one_out(counted, measured, [row["series"] for row in rows], CONSTANTS)
    speeds = [row.setting.tokens / seconds for row, seconds in zip(counted, left_out, strict=True)]
    are_near(rows, speeds, mean=0.07, median=0.04, high=0.15)
    assert all(low <= CONSTANTS[name] <= high for name, (low, high) in plan_fit.FITTED.items())


def test_what_the_paper_on_fsdp_claims_is_planned() -> None:
    """Nothing is fitted to it. Two claims are missed by a hair, and zero/planning/README.md says so."""
    found = score.seeds()
    assert len(found) == 7
    missed = [claim for claim, _, agrees in found if not agrees]
    assert missed == ["175B: 186 TFLOP/s a GPU", "11.3B: 512 GPUs at 0.93 of 8, each"]


def digits(value: float, count: int = 3) -> float:
    return float(f"{value:.{count}g}")


def test_the_hosts_calls_are_those_of_the_stored_results() -> None:
    """To three digits. A later measurement changes the files and, with this test, the constants."""
    measured = {name: digits(seconds) for name, seconds in asdict(todays_calls()).items()}
    assert {name: digits(seconds) for name, seconds in asdict(presets().calls).items()} == measured
    assert tuple(map(digits, fsdp2_host())) == SYSTEMS["fsdp2"].host
    plain = rows_of("gpu-short-c", "us_a_parameter", "system")[8, PLAIN]
    assert digits(plain["backward"] / plain["forward"]) == CONSTANTS["host_backward"]


def test_steps_are_planned_near_the_measured_ones() -> None:
    """FSDP2's at 8,192 tokens is the worst: a host that is behind in a forward catches up in the backward before, since
    no step of that loop waits for the device. The plan begins each step with both at once.

    With 2,048 tokens the host bounds a step: its calls were measured in a step of one bucket, and these steps have 14.
    """
    runs = list(own_runs())
    for name, most in ((PLAIN, 0.05), (FSDP2, 0.13), ("FSDP2, rank 7 of 8", 0.1), ("zero 3, rank 7 of 8", 0.1)):
        errors = [run.error for run in runs if run.name == name]
        assert errors
        assert max(map(abs, errors)) <= most, name
    for tokens, count, low, high in ((8192, 5, -0.03, 0.03), (2048, 6, -0.25, 0.0)):
        errors = [run.error for run in runs if run.name.startswith("zero") and run.tokens == tokens]
        assert len(errors) == count
        assert low <= min(errors) <= max(errors) <= high
