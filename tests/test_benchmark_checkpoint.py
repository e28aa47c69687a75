"""`benchmarks.checkpoint` runs in its smallest form, and its ratios and targets are those of its page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.checkpoint_job import (
    COLD,
    DCP_THREAD,
    DISK,
    LOADS,
    MANY,
    PEAK_OF_LOAD,
    PEAK_OF_SAVE,
    SAVE,
    SAVES,
    TRAIN,
    WARM,
    WITHOUT,
    ZERO,
    ZERO_ASYNC,
    SaveSample,
    merged,
)
from benchmarks.checkpoint_tables import CheckpointResults, _part, every
from benchmarks.report import Report

pytestmark = pytest.mark.full

typer = pytest.importorskip("typer")
from typer.testing import CliRunner, Result  # noqa: E402

from benchmarks import checkpoint  # noqa: E402


def _run(*arguments: object) -> Result:
    application = typer.Typer()
    application.command()(checkpoint.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


@pytest.mark.long
@pytest.mark.timeout(400)  # DCP's processes import torch, and a busy machine takes its time
def test_saves_and_loads_are_timed_beside_peers_and_shown_again(tmp_path: Path) -> None:
    done = _run("--quick", "--folder", tmp_path, "--markdown", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    samples = [SaveSample(**part) for part in Report.read(tmp_path / "out" / "checkpoint.json").parts]
    measured = {(sample.what, sample.model) for sample in samples}
    first = next(iter(checkpoint.QUICK))
    assert measured >= {(what, model) for what in (SAVE, TRAIN, COLD, WARM) for model in checkpoint.QUICK}
    assert measured >= {(what, first) for what in (PEAK_OF_SAVE, PEAK_OF_LOAD, MANY)}
    for what, ways in ((SAVE, SAVES), (TRAIN, {*SAVES, *WITHOUT.values()}), (COLD, LOADS)):
        assert {sample.way for sample in samples if sample.what == what} >= set(ways)
    assert all(0 < s.values["call"] <= s.values["done"] < 60 for s in samples if s.what == SAVE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = _run("--show", tmp_path / "out" / "checkpoint.json", "--markdown", "--out", tmp_path / "again")
    assert f"| blocking save ÷ disk | {first} | ≤ 1.5 |" in done.stdout
    assert again.stdout == done.stdout


def test_a_save_is_as_slow_as_its_slowest_rank_and_its_cpu_is_that_of_all() -> None:
    ranks = [
        [SaveSample(SAVE, "m", 2, ZERO, 0, {"call": call, "done": done, "cpu": cpu, "nbytes": 10.0})]
        for call, done, cpu in ((1.0, 5.0, 0.5), (2.0, 4.0, 0.25))
    ]
    assert merged(ranks) == [SaveSample(SAVE, "m", 2, ZERO, 0, {"call": 2.0, "done": 5.0, "cpu": 0.75, "nbytes": 20.0})]


def test_targets_of_saves_are_ratios_within_a_round() -> None:
    def sample(way: str, number: int, call: float, done: float) -> SaveSample:
        values = {"call": call, "done": done, "cpu": 0.1, "files": 1.6e9, "nbytes": 1e9}
        return SaveSample(SAVE, "tensors-7", 2, way, number, values)

    samples = [
        sample(way, number, times * scale, times * scale)
        for number, scale in enumerate((1.0, 10.0, 2.0))
        for way, times in ((DISK, 1.0), (ZERO, 2.0), ("DCP", 100.0), (ZERO_ASYNC, 0.5), (DCP_THREAD, 5.0))
    ]
    *_, targets = every(CheckpointResults(samples))
    assert targets.rows == [
        ["blocking save ÷ DCP's", "tensors-7", "≤ 0.03", "0.020", "yes"],
        ["files ÷ payload", "tensors-7", "≤ 1.5", "1.60", "no"],
        ["async call ÷ DCP's", "tensors-7", "≤ 0.02", "0.10", "no"],
    ]


def test_what_was_lost_beside_a_way_that_lost_nothing_is_no_target_met() -> None:
    assert _part(2.0, 4.0) == 0.5
    assert _part(2.0, -0.1) == _part(2.0, 0.0) == math.inf
    assert _part(-1.0, -0.1) == 0.0
