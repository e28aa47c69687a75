"""`zero sweep`: which settings run, which of them are on the line, and what remains after an error."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks
from zero.commands import console
from zero.commands.runner import RankError
from zero.commands.sweep import command as sweep
from zero.commands.sweep import rank as sweep_rank
from zero.commands.sweep.command import Point, frontier, jobs, name_of, run
from zero.commands.sweep.rank import RankResult, RunSpec, _sampled, result_path
from zero.commands.train.settings import SweepConfig

pytestmark = pytest.mark.full

JOB = RunSpec("tiny", 1, 16, 1, 0, 1, 25.0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher."""
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
    stays = {1: [""], 2: ["", ", kept"], 4: ["", ", kept", ", kept by 2"]}
    assert names(4, stage=[3], peers=False) == [
        f"zero 3, F={factor}{kept}{where}"
        for factor in stays
        for kept in stays[factor]
        for where in [*disk, ", all on disk"]
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


def played(
    monkeypatch: pytest.MonkeyPatch, sha256: str | None = None, fails: Mapping[int, BaseException] | None = None
) -> list[RunSpec]:
    """Replace the launch of ranks: only their results are written. Return the jobs that ran.

    ``fails``: the error that a run raises instead, by the number of the run.
    """
    told: list[RunSpec] = []

    def launch(module: str, settings: dict[str, Any], ranks: int) -> None:
        job = RunSpec(**settings["job"])
        told.append(job)
        if fails is not None and len(told) - 1 in fails:
            raise fails[len(told) - 1]
        for rank in range(ranks):
            kept = sha256 if sha256 is not None else str(job.offload)
            seen = RankResult([0.1 + rank, 0.3], 1_000_000 * (rank + 1), kept if job.peer is None else None)
            result_path(Path(settings["folder"]), rank).write_text(json.dumps(asdict(seen)))

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
        assert "folder" not in point["job"], "it was there for the run alone"
    assert len(told) == 2 * len(written["points"])
    assert written["failures"] == {}
    assert str(tmp_path) not in (tmp_path / "sweep.json").read_text()
    output = capsys.readouterr().out
    assert "round 2 of 2: zero 1, F=2, states on disk: 700.0 ms, 2.0 MB a rank\n" in output
    assert "settings of zero that trained the same bits: 5, SHA-256 abc\n" in output


def test_a_sweep_leaves_its_numbers_and_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    played(monkeypatch, "abc")
    assert run(SweepConfig(stage=[1], out=tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "sweep.png"}, "no folder of a run is left"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_stored_sweep_is_drawn_with_room_for_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from ..pictures import misfits

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda figure, path, **_: drawn.append((path, figure)))
    shutil.copy(Path(benchmarks.__file__ or "").parent / "results" / "sweep.json", tmp_path)
    assert sweep.draw(tmp_path) == ["sweep.png"]
    ((path, picture),) = drawn
    assert path == tmp_path / "sweep.png"
    assert misfits(picture) == []
    (panel,) = picture.axes
    best = ["zero 3, F=2, kept", "zero 3, F=2, kept, states on disk", "zero 3, F=2, all on disk"]
    peers = ["DDP", "ZeroRedundancyOptimizer", "FSDP2", "FSDP2, kept"]
    assert sorted(text.get_text() for text in panel.texts) == sorted(best + peers)


def test_without_matplotlib_the_numbers_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "abc")
    monkeypatch.setattr(sweep, "can_draw", lambda: False)
    assert run(SweepConfig(stage=[1], out=tmp_path)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    output = capsys.readouterr().out
    assert f"written to {tmp_path}: sweep.json\n" in output
    assert f"no sweep.png. To have it: {console.INSTALL_HINT}\n" in output


def test_on_a_terminal_a_sweep_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    played(monkeypatch, "abc")
    monkeypatch.setenv("TERM", "xterm")
    terminal = SimpleNamespace(isatty=lambda: True, write=sys.stdout.write, flush=sys.stdout.flush)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run(SweepConfig(stage=[0], out=tmp_path)) == 0
    output = capsys.readouterr().out
    assert "zero 0: 700.0 ms" in output
    assert not re.search(r"\d/\d", output)


def test_other_bits_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch)
    assert run(SweepConfig(stage=[1], out=tmp_path)) == 1
    output = capsys.readouterr()
    assert "settings of ours trained 2 different sets of parameters" in output.err
    assert "same bits" not in output.out


def test_a_setting_that_fails_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_, last = expected = names(2, stage=[1], peers=False)
    error = RankError(1, "no\nroom", "")
    told = played(monkeypatch, "abc", {0: error, 2 * len(expected) - 2: OSError(28, "No space left on device")})
    assert run(SweepConfig(stage=[1], peers=False, rounds=3, out=tmp_path)) == 1
    assert len(told) == 3 * len(expected) - 2 - 1, "what failed in one round is not tried in later ones"
    output = capsys.readouterr()
    assert output.err == f"error: 2 settings failed: {first}; {last}\n"
    assert f"round 1 of 3: {first}: failed: rank 1: no room\n" in output.out
    assert f"round 2 of 3: {last}: failed: [Errno 28] No space left on device\n" in output.out
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written["failures"] == {first: "rank 1: no room", last: "[Errno 28] No space left on device"}
    assert [point["name"] for point in written["points"]] == expected[1:], "what it measured in the first round stays"


def test_where_every_setting_fails_their_errors_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "abc", {0: RankError(0, "no room", "")})
    assert run(SweepConfig(stage=[0], peers=False, out=tmp_path)) == 1
    assert capsys.readouterr().err == "error: 1 setting failed: zero 0\n"
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert (written["points"], written["failures"]) == ([], {"zero 0": "rank 0: no room"})


def test_what_was_measured_before_an_interrupt_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "abc", {3: KeyboardInterrupt()})
    assert run(SweepConfig(stage=[1], peers=False, out=tmp_path)) == 130
    output = capsys.readouterr()
    assert output.err == "interrupted\n"
    assert f"written to {tmp_path}: sweep.json" in output.out
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["name"] for point in written["points"]] == names(2, stage=[1], peers=False)[:3]


def test_a_place_that_cannot_be_written_and_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = played(monkeypatch, "abc")
    (tmp_path / "file").touch()
    assert run(SweepConfig(out=tmp_path / "file")) == 2

    def read_only(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", read_only)
        assert run(SweepConfig(out=tmp_path / "read-only")) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(SweepConfig(out=tmp_path)) == 2
    assert not told
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: --out {tmp_path / 'file'}: cannot write there (")
    assert lines[1].startswith(f"error: --out {tmp_path / 'read-only'}: cannot write there (Permission denied)")
    assert lines[2] == "error: zero sweep starts ranks of its own: call it in one process, without torchrun"


def test_a_report_that_cannot_be_written_is_one_line_below_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "abc")
    (tmp_path / "sweep.json").mkdir()
    assert run(SweepConfig(stage=[0], peers=False, out=tmp_path)) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"error: --out {tmp_path}: cannot write there (Is a directory)")
    assert len(output.err.splitlines()) == 1
    assert "no other of zero's is both smaller and faster" in output.out


def test_what_is_held_for_a_moment_is_in_the_peak_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 5
    monkeypatch.setattr(sweep_rank, "proportional_set_size", lambda: held)
    with _sampled() as sizes:
        held = 37
        seen = len(sizes)
        while len(sizes) < seen + 2:  # the first of them may have read the size before
            time.sleep(sweep_rank.SAMPLING_INTERVAL)
        held = 11
    assert max(sizes) == 37
    assert sizes[0] == 5, "the first sample is of the start"
    assert sizes[-1] == 11, "the last sample is of the end"


def test_even_a_block_that_takes_no_time_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_rank, "SAMPLING_INTERVAL", 1000.0)
    monkeypatch.setattr(sweep_rank, "proportional_set_size", lambda: 7)
    with _sampled() as sizes:
        assert sizes == [7]
    assert sizes == [7, 7]
    monkeypatch.setattr(sweep_rank, "proportional_set_size", lambda: None)
    with _sampled() as sizes:
        pass
    assert sizes == []


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


@pytest.mark.timeout(600)  # each system starts two processes
@pytest.mark.parametrize("peers", [False, pytest.param(True, marks=pytest.mark.long)], ids=["alone", "beside torch"])
def test_real_ranks_train_one_set_of_bits(peers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SweepConfig(preset="tiny", stage=[0], peers=peers, steps=1, sequence=16, out=tmp_path)) == 0
    assert "settings of zero that trained the same bits: 1, " in capsys.readouterr().out
    points = json.loads((tmp_path / "sweep.json").read_text())["points"]
    torch_s_own = ["DDP", "ZeroRedundancyOptimizer", "FSDP2", "FSDP2, kept"] if peers else []
    assert [point["name"] for point in points] == [*torch_s_own, "zero 0"]
    for point in points:
        assert point["step_ms"] > 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)  # each setting starts four processes
def test_every_setting_on_real_ranks_trains_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SweepConfig(preset="tiny", ranks=4, peers=False, steps=1, sequence=16, out=tmp_path)) == 0
    assert "settings of zero that trained the same bits: 31, " in capsys.readouterr().out
