"""Each benchmark runs in its smallest form, checks what it times, and shows its file again; pages show stored files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

pytest.importorskip("matplotlib")
from benchmarks import steps
from benchmarks.gpu_short import __main__ as gpu_short
from benchmarks.gpu_short import clock
from benchmarks.gpu_short.job import SECTIONS, WHOLE, outcome_of
from benchmarks.gpu_short.page import Found, tables
from benchmarks.processes import RankError, run_ranks
from benchmarks.report import Report
from benchmarks.step_tables import Summary
from benchmarks.systems import DDP, FLOOR

pytestmark = pytest.mark.timeout(400)  # a fresh process for each rank imports torch, and a busy machine takes its time
ROOT = Path(__file__).resolve().parents[3]


def run(main: Any, *arguments: object) -> Result:
    application = typer.Typer()
    application.command()(main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


def parts_of(main: Any, file: Path, *arguments: object) -> list[dict[str, Any]]:
    done = run(main, *arguments, "--quick", "--markdown", "--out", file.parent)
    assert done.exit_code == 0, done.output
    assert run(main, "--show", file, "--markdown", "--out", file.parent / "again").stdout == done.stdout
    return list(Report.read(file).parts)


def test_a_rank_that_fails_is_named_with_its_last_lines() -> None:
    with pytest.raises(RankError, match=r"rank 0 ended with code 1:(.|\n)*TypeError"):
        run_ranks("step_rank", '{"no_such_field": 1}', 1)


def test_systems_train_side_by_side_are_drawn_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "QUICK", (1, 1, 1))
    options = [word for name in (FLOOR, DDP, "zero 2") for word in ("--system", name)]
    floor, ddp, ours = (
        Summary(**part) for part in parts_of(steps.main, tmp_path / "steps.json", "--model", "deep", *options)
    )
    assert [summary.system for summary in (floor, ddp, ours)] == [FLOOR, DDP, "zero 2"]
    assert floor.loss is None
    assert ddp.loss == ours.loss is not None
    assert ours.states < 0.51 * ddp.states + 1e5
    assert ours.peak > 0 < ours.proportional
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_all_sections_run_on_the_cpu_and_without_a_gpu_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(gpu_short.main, "--device", "cpu", "--quick", "--world", "8,64", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = Found(tmp_path)
    outcomes = {name: outcome_of(report)["outcome"] for name, report in found.reports.items()}
    assert outcomes == dict.fromkeys(SECTIONS, WHOLE)
    turns = found.rows("b", "turn")
    assert len({row["loss"] for row in turns}) == 1, "one rank's loss is that of the plain loop, to the bit"
    assert len(turns) == 9
    assert all(row["passed"] for row in found.rows("d", "test"))
    monkeypatch.setattr(clock.torch.cuda, "is_available", lambda: False)
    done = run(gpu_short.main, "--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: there is no CUDA here")


RESULTS = ROOT / "benchmarks" / "results"
FOLDER = re.compile(r"(^|[\s\"'=])[/~]\w")  # a path that begins at the root or in the home folder
STORED = {"steps": (), "steps-bf16": ("--precision", "bf16"), "steps-dials": ("--dials",)}


def stored(name: str) -> list[Summary]:
    return [Summary(**part) for part in Report.read(RESULTS / f"{name}.json").parts]


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


def test_stored_results_are_small_name_no_folder_and_are_shown_again() -> None:
    shown = run(gpu_short.main, "--out", RESULTS, "--sections", "")
    assert shown.exit_code == 0, shown.output
    assert all(table.title in shown.output for table in tables(Found(RESULTS)))
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
