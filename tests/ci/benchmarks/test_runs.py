"""Each benchmark runs in its smallest form, checks what it times, and shows the same again from its file."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from benchmarks import checkpoint, network, rounding, steps, two_hosts
from benchmarks import collectives as one_host
from benchmarks.checkpoint_rank import COLD, LOADS, SAVE, SAVES, TRAIN, WARM, WITHOUT, SaveSample
from benchmarks.collective_cases import GLOO, IN_COMMON, RELEASED, ROOFLINE
from benchmarks.gpu_short import __main__ as gpu_short
from benchmarks.gpu_short.job import SECTIONS, WHOLE, ShortJob, file_of, outcome_of
from benchmarks.gpu_short.page import Found
from benchmarks.processes import RankError, run_ranks
from benchmarks.report import Report
from benchmarks.step_tables import Summary, Turn
from benchmarks.systems import DDP, FLOOR

from .called import run

ROOT = Path(__file__).resolve().parents[3]


def test_a_rank_that_fails_is_named_with_its_last_lines() -> None:
    with pytest.raises(RankError, match=r"rank 0 ended with code 1:(.|\n)*TypeError"):
        run_ranks("step_rank", '{"no_such_field": 1}', 1)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_every_algorithm_is_timed_checked_and_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = replace(one_host.QUICK, sizes=[4096], seconds=0.01, least=1, most=2)
    monkeypatch.setattr(one_host, "QUICK", least)
    done = run(one_host.main, "--ranks", 2, "--quick", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    parts = Report.read(tmp_path / "collectives.json").parts
    everywhere = {"shared", "pairwise", "ring", GLOO, ROOFLINE}
    assert {(part["operation"], part["algorithm"]) for part in parts} == {
        *(("reduce-scatter", name) for name in everywhere),
        *(("all-gather", name) for name in everywhere | {IN_COMMON, RELEASED}),
    }
    assert all(0 < part["low"] <= part["median"] <= part["high"] < 60 for part in parts)
    again = run(one_host.main, "--show", tmp_path / "collectives.json", "--markdown")
    assert "| 4 KiB |" in done.stdout
    assert again.stdout == done.stdout


@pytest.mark.timeout(400)
def test_between_hosts_bytes_are_counted_or_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = replace(two_hosts.QUICK, sizes=[1 << 20], seconds=0.01, least=1, most=1)
    monkeypatch.setattr(two_hosts, "QUICK", least)
    done = run(two_hosts.main, "--ranks", 1, "--quick", "--markdown", "--out", tmp_path)
    if done.exit_code:  # no root, no `ip` or `tc`, or no right to make namespaces
        assert done.stderr.startswith("error: ")
        assert network.missing() or "`ip " in done.stderr
        return
    parts = Report.read(tmp_path / "hosts2.json").parts
    left = {part["measured"]["algorithm"]: part["measured"]["left"] for part in parts}
    assert all(len(of) == 2 for of in left.values())
    assert all(1 <= nbytes / (1 << 19) < 1.1 for nbytes in left["pairwise"]), "half of the buffer leaves each host"
    assert not [name for name in network._names() if name.startswith(f"{network.PREFIX}-{os.getpid()}-")]


@pytest.mark.timeout(400)  # a fresh process for each rank imports torch, and a busy machine takes its time
def test_systems_train_side_by_side_are_drawn_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "QUICK", (1, 1, 1))
    options = [word for name in (FLOOR, DDP, "zero 2") for word in ("--system", name)]
    done = run(steps.main, "--quick", "--model", "deep", *options, "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    floor, ddp, ours = (Summary(**part) for part in Report.read(tmp_path / "steps.json").parts)
    assert [summary.system for summary in (floor, ddp, ours)] == [FLOOR, DDP, "zero 2"]
    assert floor.loss is None
    assert ddp.loss == ours.loss is not None
    assert ours.states < 0.51 * ddp.states + 1e5
    assert ours.peak > 0 < ours.proportional
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    again = run(steps.main, "--show", tmp_path / "steps.json", "--markdown", "--out", tmp_path / "again")
    assert again.stdout == done.stdout
    wrong = run(steps.main, "--system", "no such thing", "--out", tmp_path)
    assert wrong.exit_code == 2
    assert "'no such thing' is no" in wrong.output


@pytest.mark.timeout(400)
def test_a_system_steps_in_turn_with_that_of_another_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "QUICK_IN_TURN", (1, 0, 2))
    (tmp_path / "other").mkdir()
    for package in ("zero", "collectives"):
        (tmp_path / "other" / package).symlink_to(ROOT / package)
    options = ("--in-turn", "zero 3", "--in-turn", f"zero 3@{tmp_path / 'other'}")
    done = run(steps.main, "--quick", "--model", "tensors-16", *options, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    one, other = (Turn(**part) for part in Report.read(tmp_path / "steps-in-turn.json").parts)
    assert (one.system, other.system) == ("zero 3", "zero 3@other")
    assert (len(one.seconds), len(other.seconds)) == (2, 2)
    assert one.loss == other.loss


@pytest.mark.timeout(400)  # DCP's processes import torch, and a busy machine takes its time
def test_saves_and_loads_are_timed_beside_peers_and_shown_again(tmp_path: Path) -> None:
    done = run(checkpoint.main, "--quick", "--folder", tmp_path, "--markdown", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    samples = [SaveSample(**part) for part in Report.read(tmp_path / "out" / "checkpoint.json").parts]
    assert {sample.what for sample in samples} == {SAVE, TRAIN, COLD, WARM}
    for what, ways in ((SAVE, SAVES), (TRAIN, {*SAVES, *WITHOUT.values()}), (COLD, LOADS)):
        assert {sample.way for sample in samples if sample.what == what} >= set(ways)
    assert all(0 < s.values["call"] <= s.values["done"] < 60 for s in samples if s.what == SAVE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = run(checkpoint.main, "--show", tmp_path / "out" / "checkpoint.json", "--markdown")
    assert again.stdout == done.stdout


# -- one GPU -----------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from benchmarks.gpu_short.job import ShortJob, run
from benchmarks.rank import end_with

def section(ends):
    def measure(job):
        yield {"row": 1}
        eval(ends)
        yield {"row": 2}
    return measure

end_with(int(sys.argv[2]))
what = {"a": "None", "b": "{}['a bug']", "c": "time.sleep(600)", "d": "os._exit(3)", "e": "None"}
run(ShortJob.from_json(sys.argv[1]), {name: section(ends) for name, ends in what.items()}, "a GPU")
"""
OUTCOMES = {"a": WHOLE, "b": "KeyError: 'a bug'", "c": "cut off after 3 s", "d": "its process ended with 3", "e": WHOLE}


def test_a_section_that_fails_ends_or_hangs_keeps_its_rows_and_ends_no_other(tmp_path: Path) -> None:
    job = ShortJob(str(tmp_path), "abcde", "cpu", True, command="python -m benchmarks.gpu_short")
    begin = time.monotonic()
    gpu_short.run(job, [sys.executable, "-c", WORKER], {name: 3.0 if name == "c" else 30.0 for name in OUTCOMES})
    assert time.monotonic() - begin < 600, "the one that hangs was cut off"
    for name, outcome in OUTCOMES.items():
        report = Report.read(file_of(str(tmp_path), name))
        rows = [{"row": 1}, {"row": 2}][: 2 if outcome == WHOLE else 1]
        assert [part for part in report.parts if "row" in part] == rows
        assert outcome_of(report)["outcome"] == outcome
    assert "| its process ended with 3 |" in (tmp_path / "gpu-short.md").read_text()


@pytest.mark.timeout(400)
def test_all_sections_run_on_the_cpu(tmp_path: Path) -> None:
    done = run(gpu_short.main, "--device", "cpu", "--quick", "--world", "8,64", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = Found(tmp_path)
    assert {name: outcome_of(report)["outcome"] for name, report in found.reports.items()} == dict.fromkeys(
        SECTIONS, WHOLE
    )
    turns = found.rows("b", "turn")
    assert len({row["loss"] for row in turns}) == 1, "one rank's loss is that of the plain loop, to the bit"
    assert len(turns) == 9
    assert [row["ranks"] for row in found.rows("c", "us_a_parameter")] == [8] * 6 + [64] * 6
    assert all(row["passed"] for row in found.rows("d", "test"))
    assert len(found.rows("e", "allocator")) == 5


def test_the_loss_of_each_way_to_round_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rounding.main(["--steps", "2", "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:22].strip() for line in lines] == list(rounding.LOOPS)
