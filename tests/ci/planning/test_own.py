"""The host's calls are those that were measured, and the library's own steps on one GPU are planned near them."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.plan.own import FSDP2, PLAIN, fsdp2_host, own_runs, rows_of, todays_calls
from benchmarks.plan.systems import SYSTEMS
from zero.planning.hardware import presets
from zero.planning.seconds.compute import CONSTANTS


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
