"""`zero sweep`: which settings run, which of them are on the line, and what is left where something goes wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero import sweep
from zero.config import SweepConfig
from zero.launch import RankError
from zero.sweep import Point, frontier, jobs, name_of, run
from zero.sweep_rank import Job, Seen

JOB = Job("", "tiny", 1, 16, 1, 0, 1, 25.0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around us."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def names(ranks: int, **flags: Any) -> list[str]:
    return [name_of(job) for job in jobs(SweepConfig(ranks=ranks, **flags))]


def test_every_setting_that_differs_runs_once() -> None:
    disk = ["", ", states on disk"]
    assert names(1, peers=False) == [
        "zero 0",
        *(f"zero {stage}, F=1{where}" for stage in (1, 2) for where in disk),
        *(f"zero 3, F=1{where}" for where in [*disk, ", all on disk"]),
    ]
    assert names(4, stage=[3], peers=False) == [
        *(f"zero 3, F=1{where}" for where in [*disk, ", all on disk"]),
        *(f"zero 3, F=2{where}" for where in [*disk, ", all on disk", ", kept"]),
        *(f"zero 3, F=4{where}" for where in [*disk, ", all on disk", ", kept", ", kept by 2"]),
    ]
    assert names(4, stage=[0]) == [
        *(
            "DDP",
            "ZeroRedundancyOptimizer",
            "FSDP2, hybrid 2",
            "FSDP2, hybrid 2, kept",
            "FSDP2",
            "FSDP2, kept",
            "zero 0",
        )
    ]
    for ranks in range(1, 9):
        found = names(ranks)
        assert len(set(found)) == len(found)


sizes = st.integers(1, 5)


@given(st.lists(st.tuples(sizes, sizes, st.booleans())))
def test_a_setting_is_on_the_line_unless_another_of_ours_is_smaller_and_faster(
    found: list[tuple[int, int, bool]],
) -> None:
    points = [
        Point(str(number), replace(JOB, peer=None if ours else "DDP"), float(time), size, ())
        for number, (time, size, ours) in enumerate(found)
    ]
    best = frontier(points)
    for point in points:
        other = [o for o in best if (o.step_ms, o.peak) != (point.step_ms, point.peak)]
        beaten = any(o.step_ms <= point.step_ms and (o.peak or 0) <= (point.peak or 0) for o in other)
        if point.job.peer is not None:
            assert point not in best
        elif point in best:
            assert not beaten
        else:
            assert beaten or any((o.step_ms, o.peak) == (point.step_ms, point.peak) for o in best)


def played(monkeypatch: pytest.MonkeyPatch, sha256: str | None = None, fails_at: int | None = None) -> list[Job]:
    """Ranks leave what they would; those of one run fail. Returns the jobs that were run."""
    told: list[Job] = []

    def launch(module: str, arguments: list[str], ranks: int) -> None:
        job = Job(**json.loads(arguments[0]))
        told.append(job)
        if len(told) - 1 == fails_at:
            raise RankError(1, "no room", "")
        for rank in range(ranks):
            kept = sha256 if sha256 is not None else str(job.offload)
            seen = Seen([0.1 + rank, 0.3], 1_000_000 * (rank + 1), kept if job.peer is None else None)
            job.said(rank).write_text(json.dumps(asdict(seen)))

    monkeypatch.setattr(sweep, "launch_ranks", launch)
    return told


def test_a_run_is_as_slow_and_as_large_as_its_slowest_and_largest_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = played(monkeypatch, "abc")
    assert run(SweepConfig(stage=[0, 1], rounds=2, out=tmp_path)) == 0
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["name"] for point in written["points"]] == names(2, stage=[0, 1])
    for point in written["points"]:
        assert (point["step_ms"], point["peak"]) == (pytest.approx(700.0), 2_000_000)
    assert len(told) == 2 * len(written["points"])
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "sweep.png"}, "no folder of a run is left"
    said = capsys.readouterr().out
    assert "round 2 of 2: zero 1, F=2, states on disk: 700.0 ms, 2.0 MB a rank\n" in said
    assert "settings of zero that trained the same bits: 5, SHA-256 abc\n" in said


def test_other_bits_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch)
    assert run(SweepConfig(stage=[1], out=tmp_path)) == 1
    assert "settings of ours trained 2 different sets of parameters" in capsys.readouterr().err
    assert "same bits" not in capsys.readouterr().out


def test_what_was_measured_before_an_error_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "abc", fails_at=3)
    assert run(SweepConfig(stage=[1], peers=False, out=tmp_path)) == 1
    assert capsys.readouterr().err == "error: zero 1, F=2, states on disk: rank 1: no room\n"
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["name"] for point in written["points"]] == names(2, stage=[1], peers=False)[:3]


def test_an_interrupt_and_a_wrong_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "launch_ranks", interrupted)
    assert run(SweepConfig(out=tmp_path)) == 130
    (tmp_path / "file").touch()
    assert run(SweepConfig(out=tmp_path / "file")) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(SweepConfig(out=tmp_path)) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "interrupted"
    assert said[1].startswith(f"error: --out {tmp_path / 'file'}: cannot write there")
    assert said[2] == "error: zero sweep starts ranks of its own: call it in one process, without torchrun"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ranks": 0}, "--ranks is 0: it must be at least 1"),
        ({"stage": [1, 4]}, "--stage is 4: it must be from 0 to 3"),
        ({"preset": "huge"}, "--preset is huge: it must be one of tiny, small, medium"),
        ({"bucket_cap_mb": 0}, "--bucket-cap-mb is 0: it must be above 0 and finite"),
        ({"seed": -1}, "--seed is -1: it must be from 0"),
    ],
)
def test_a_flag_that_cannot_be_is_told(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SweepConfig(**flags)


def test_real_ranks_train_one_set_of_bits_beside_torch_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SweepConfig(preset="tiny", stage=[0], steps=1, sequence=16, out=tmp_path)) == 0
    assert "settings of zero that trained the same bits: 1, " in capsys.readouterr().out
    points = json.loads((tmp_path / "sweep.json").read_text())["points"]
    assert [point["name"] for point in points] == ["DDP", "ZeroRedundancyOptimizer", "FSDP2", "FSDP2, kept", "zero 0"]
    for point in points:
        assert point["step_ms"] > 0


@pytest.mark.slow
def test_every_setting_on_real_ranks_trains_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SweepConfig(preset="tiny", ranks=4, peers=False, steps=1, sequence=16, out=tmp_path)) == 0
    assert "settings of zero that trained the same bits: 25, " in capsys.readouterr().out
