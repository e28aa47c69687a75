"""`python -m benchmarks.plan_here`: runs of this machine beside their plans."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import plan_here
from benchmarks.report import Report
from benchmarks.step_job import Run
from zero.commands.sweep.command import Point, jobs, name_of
from zero.commands.train.settings import SweepConfig
from zero.planning.hardware import presets

HARDWARE = presets()


def sweep(path: Path, seconds: float, ranks: int = 2) -> list[str]:
    """Write the sweep.json of settings that took so long and up to 2 % longer. Return their names."""
    config = SweepConfig(preset="tiny", sequence=32, ranks=ranks)
    points = [
        Point(name_of(job), job, 1e3 * seconds + 0.02 * number, 10**7, ("",)) for number, job in enumerate(jobs(config))
    ]
    asked = {"preset": "tiny", "batch": 1, "sequence": 32, "ranks": ranks}
    written = {"config": asked, "points": [asdict(point) for point in points]}
    path.write_text(json.dumps(written))
    return [point.name for point in points if point.job.peer is None]


def test_every_setting_of_a_sweep_is_planned_and_no_peer(tmp_path: Path) -> None:
    names = sweep(tmp_path / "sweep.json", 0.05)
    scored = list(plan_here.of_sweep(tmp_path / "sweep.json", HARDWARE))
    assert [each.name for each in scored] == names
    assert len({each.planned for each in scored}) > 5
    for each in scored:
        assert each.error == pytest.approx(each.planned / each.measured - 1)
        assert 0.05 <= each.measured < 0.051
        assert each.memory is not None
        assert each.memory_error == pytest.approx(each.memory[1] / 1e7 - 1)


def test_runs_are_planned_on_as_many_ranks_as_they_had(tmp_path: Path) -> None:
    found = list[int]()
    for ranks in (2, 4):
        sweep(tmp_path / "sweep.json", 0.05, ranks)
        scored = {each.name: each.memory for each in plan_here.of_sweep(tmp_path / "sweep.json", HARDWARE)}
        memory = scored[f"zero 3, F={ranks}"]
        assert memory is not None
        found.append(memory[1])
    assert found[1] < found[0]


def test_our_stages_of_the_steps_are_planned_in_the_median_of_their_rounds(tmp_path: Path) -> None:
    runs = [
        Run(system, "wide", 2, 0, 0, 0, 0, 0, seconds=seconds, loss=0.0, bus=0.0)
        for system in ("zero 1", "zero 3", "zero 3, for-loop", "DDP")
        for seconds in (1.0, 2.0, 9.0)
    ]
    Report("a test", "", {}, {}, [asdict(run) for run in runs]).write(tmp_path / "steps.json")
    scored = list(plan_here.of_steps(tmp_path / "steps.json", HARDWARE))
    assert [(each.name, each.measured) for each in scored] == [("wide, zero 1", 2.0), ("wide, zero 3", 2.0)]
    assert all(0.01 < each.planned < 10 for each in scored)


def test_the_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scored = [plan_here.Scored("a", 1.0, 1.1), plan_here.Scored("b", 2.0, 1.8), plan_here.Scored("c", 3.0, 3.9)]
    assert plan_here.correlation(scored) == pytest.approx(1.0)
    assert plan_here.correlation([scored[0], *reversed(scored[1:])]) == pytest.approx(1.0)
    swapped = [plan_here.Scored("a", 1.0, 3.0), plan_here.Scored("b", 2.0, 2.0), plan_here.Scored("c", 3.0, 1.0)]
    assert plan_here.correlation(swapped) == pytest.approx(-1.0)
    plan_here.show("three", scored)
    assert "mean 16.7%, median 10.0%" in capsys.readouterr().out
    sweep(tmp_path / "sweep.json", 0.05)
    hardware = tmp_path / "hardware.json"
    hardware.write_text(json.dumps({"format": 1, "date": "a day", "machine": "a machine"}))
    given = [f"--hardware={hardware}", f"--sweep={tmp_path / 'sweep.json'}"]
    monkeypatch.setattr(sys, "argv", ["plan_here", *given])
    plan_here.main()
    printed = capsys.readouterr().out
    assert "hardware: a machine, a day" in printed
    assert "error of a rank's memory: " in printed
