"""The pages of benchmarks show the stored results, and their sums and checks are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from benchmarks import steps
from benchmarks.gpu_short import __main__ as gpu_short
from benchmarks.gpu_short import clock
from benchmarks.gpu_short.job import SECTIONS
from benchmarks.gpu_short.page import Found, tables
from benchmarks.rank import live_storages
from benchmarks.report import Report
from benchmarks.step_tables import Run, Summary, Turn, in_turn, summaries
from benchmarks.systems import DDP, FLOOR

from ...support.pictures import FOLDER
from .called import run

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
STORED = {"steps": (), "steps-bf16": ("--precision", "bf16"), "steps-dials": ("--dials",)}


def stored(name: str) -> list[Summary]:
    return [Summary(**part) for part in Report.read(RESULTS / f"{name}.json").parts]


# -- stored results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_the_page_shows_the_stored_results(name: str, tmp_path: Path) -> None:
    done = run(steps.main, *STORED[name], "--show", RESULTS / f"{name}.json", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    text = (RESULTS.parent / "README.md").read_text()
    if name != "steps-bf16":
        assert done.stdout.strip() in text
        return
    ratios = {(s.system, s.model): f"{s.of_ddp:.2f}" for s in stored(name)}
    words = " ".join(text.split())
    for model in ("compute", "wide", "deep", "embedding"):
        assert "{}, {}, {} and {}".format(*(ratios[f"zero {stage}", model] for stage in range(4))) in words, model


def test_the_ratios_of_readme_are_those_of_the_stored_results() -> None:
    found = {(s.system, s.model): s for s in stored("steps")}
    head, _, *lines = ("| GPT |" + (ROOT / "README.md").read_text().partition("| GPT |")[2]).splitlines()
    systems, *rows = [line.replace("*", "").strip("| ").split(" | ") for line in (head, *lines[: lines.index("")])]
    assert (len(systems), len(rows)) == (8, 3)
    for name, *ratios in rows:
        model = name.partition(",")[0]
        assert ratios == [f"{found[system, model].of_ddp:.2f}" for system in systems[1:]], name


def test_stored_results_of_a_gpu_are_shown_again() -> None:
    shown = run(gpu_short.main, "--out", RESULTS, "--sections", "")
    assert shown.exit_code == 0, shown.output
    assert all(table.title in shown.output for table in tables(Found(RESULTS)))


def test_stored_results_are_small_and_name_no_folder() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) <= 200_000
    texts = {path.name: path.read_text() for path in RESULTS.iterdir() if path.suffix != ".png"}
    assert texts.keys() == {
        *(f"gpu-short-{section}.json" for section in SECTIONS),
        *(f"{name}.json" for name in STORED),
    }
    assert not [name for name, text in texts.items() if FOLDER.search(text)]


def test_a_report_is_read_as_it_was_written_and_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--out", "/a folder/b", "--folder=../c", "--model", "deep", "--in-turn", "zero 2@/a/b"]
    monkeypatch.setattr(sys, "argv", ["steps.py", *words])
    parts = [{"a": 1, "b": None}, {"a": 0.1, "b": [1.5]}, {"c": "x"}, {"a": 2, "b": 1e-300}]
    report = Report.of_this_machine("benchmarks.steps", parts)
    assert report.command == "python -m benchmarks.steps --out DIR --folder=DIR --model deep --in-turn 'zero 2@DIR'"
    report.write(tmp_path / "new" / "steps.json")
    assert Report.read(tmp_path / "new" / "steps.json") == report


# -- sums and checks ---------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_round_or_of_steps_that_followed_each_other() -> None:
    times = {DDP: (1.0, 10.0, 3.0), "zero 2": (2.0, 5.0, 3.0), FLOOR: (1.0, 5.0)}
    runs = [
        Run(system, "deep", number, 2, seconds, 0.5, 1, 2, 3, 10 * number, 5)
        for system, rounds in times.items()
        for number, seconds in enumerate(rounds)
    ]
    ours = next(summary for summary in summaries(runs) if summary.system == "zero 2")
    assert (ours.seconds, ours.of_ddp, ours.of_floor, ours.peak, ours.rounds) == (3.0, 1.0, 1.5, 10, 3)
    turns = [Turn(0, "m", "a", [1.0, 2.0, 9.0], 0.5), Turn(0, "m", "b", [2.0, 4.0, 9.0], 0.5)]
    turns += [Turn(1, "m", "a", [5.0, 5.0, 5.0], 0.5), Turn(1, "m", "b", [5.0, 5.0, 5.0], 0.5)]
    assert [row[2:4] for row in in_turn(turns).rows] == [["1.000", "1.000–1.000"], ["1.500", "1.250–1.750"]]


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch.cuda, "is_available", lambda: False)
    done = run(gpu_short.main, "--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: there is no CUDA here")


def test_a_gradient_that_nobody_looked_at_is_found() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    before = live_storages().items()
    (parameter * 2).sum().backward()
    found = live_storages().items()  # fewer of earlier tests, if a garbage collection found them
    assert parameter.grad is not None
    assert found - before == {(parameter.grad.data_ptr(), 4000)}
    parameter.grad = None
    assert not live_storages().items() - before
