"""`benchmarks.gpu_short` writes each section as it is measured, whatever follows, and runs without a GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from benchmarks.gpu_short import __main__ as gpu_short  # noqa: E402
from benchmarks.gpu_short import clock  # noqa: E402
from benchmarks.gpu_short.job import SECTIONS, UNDER_WAY, WHOLE, Results, Row, ShortJob, file_of, outcome_of  # noqa: E402
from benchmarks.gpu_short.many_ranks import busy_of, by_name, shared_gpu  # noqa: E402
from benchmarks.gpu_short.page import FSDP2, Found, targets, text_of  # noqa: E402
from benchmarks.report import Report  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"a": 30.0, "b": 30.0, "c": 3.0, "d": 30.0, "e": 30.0}
FAKE = """
import sys, time, os
from benchmarks.gpu_short.job import ShortJob, run
from benchmarks.rank import end_with

def rows(what):
    def measure(job):
        yield {"row": 1}
        if what == "raises":
            raise KeyError("a bug")
        if what == "ends":
            os._exit(3)
        if what == "hangs":
            time.sleep(600)
        yield {"row": 2}
    return measure

end_with(int(sys.argv[2]))
run(ShortJob.from_json(sys.argv[1]), {name: rows(what) for name, what in zip("abcde", %r)}, "a GPU")
"""


def worker(*sections: str) -> list[str]:
    """Return the command of a worker whose sections do what their names say."""
    return [sys.executable, "-c", FAKE % (sections,)]


def job_in(folder: Path, sections: str = "abcde", **changes: Any) -> ShortJob:
    return replace(ShortJob(str(folder), sections, "cpu", True, command="python -m benchmarks.gpu_short"), **changes)


def read(folder: Path, name: str) -> tuple[list[Row], str]:
    """Return the rows of a section, and what became of it."""
    report = Report.read(file_of(str(folder), name))
    return [part for part in report.parts if "row" in part], str(outcome_of(report)["outcome"])


def test_a_section_that_fails_ends_or_hangs_keeps_its_rows_and_ends_no_other(tmp_path: Path) -> None:
    gpu_short.run(job_in(tmp_path), worker("works", "raises", "hangs", "ends", "works"), LIMITS)
    first, both = [{"row": 1}], [{"row": 1}, {"row": 2}]
    assert read(tmp_path, "a") == read(tmp_path, "e") == (both, WHOLE)
    assert read(tmp_path, "b") == (first, "KeyError: 'a bug'")
    assert read(tmp_path, "c") == (first, "cut off after 3 s")
    assert read(tmp_path, "d") == (first, "its process ended with 3")
    page = (tmp_path / "gpu-short.md").read_text()
    for outcome in (WHOLE, "KeyError: 'a bug'", "cut off after 3 s", "its process ended with 3"):
        assert f"| {outcome} |" in page
    assert "a bug" in (tmp_path / "gpu-short.log").read_text()


def test_results_of_an_earlier_run_are_not_shown_as_those_of_this_one(tmp_path: Path) -> None:
    gpu_short.run(job_in(tmp_path, "a"), worker(*["works"] * 5), LIMITS)
    says = "print('begin training'); print('end of it'); raise SystemExit(4)"  # as a library may
    gpu_short.run(job_in(tmp_path, "a"), [sys.executable, "-c", says], LIMITS)
    assert read(tmp_path, "a") == ([], "its process ended with 4")


def test_a_worker_that_never_begins_is_told_and_ends_no_run(tmp_path: Path) -> None:
    gpu_short.run(job_in(tmp_path, "ab"), [sys.executable, "-c", "raise SystemExit(4)"], LIMITS)
    for name in "ab":
        assert read(tmp_path, name) == ([], "its process ended with 4")


def test_what_was_measured_is_there_when_all_is_killed_in_the_middle(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from tests.test_gpu_short import *; "
    program += "gpu_short.run(job_in(Path(sys.argv[1])), worker('works', 'works', 'hangs', 'works', 'works'), LIMITS)"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    until = time.monotonic() + 60
    while not file_of(str(tmp_path), "c").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for name in "ab":
        assert read(tmp_path, name) == ([{"row": 1}, {"row": 2}], WHOLE)
    assert read(tmp_path, "c")[1] == UNDER_WAY
    assert f"| {WHOLE} |" in text_of(Found(tmp_path))


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_device_is_busy_where_at_least_one_kernel_runs() -> None:
    events: list[dict[str, Any]] = [
        {"name": "void first<float>(int)", "ts": 10.0, "dur": 5.0},
        {"name": "void first<int>(int)", "ts": 12.0, "dur": 1.0},  # inside the first
        {"name": "copy", "ts": 14.0, "dur": 3.0},  # two of three beyond it
        {"name": "copy", "ts": "30", "dur": "2"},
    ]
    assert busy_of(events) == (4, pytest.approx(9e-6, rel=1e-12))
    assert busy_of([]) == (0, 0.0)
    assert by_name(events) == {"void first": (2, pytest.approx(6e-6)), "copy": (2, pytest.approx(5e-6))}


def results(folder: Path, section: str, rows: list[Row], device: str = "a GPU") -> None:
    written = Results(job_in(folder), section, device)
    for row in rows:
        written.add(row)
    written.end()


def turn(system: str, seconds: float, tokens: int = 8192, loss: float = 1.0) -> Row:
    return {"tokens": tokens, "turn": 0, "system": system, "in_a_row": seconds, "loss": loss}


def test_targets_are_met_or_missed_by_what_was_measured(tmp_path: Path) -> None:
    names = {"plain": 1.0, "plain, again": 1.01, "DDP": 1.2, "FSDP2": 2.0, "zero 0": 1.3, "zero 1": 1.04, "zero 3": 1.9}
    results(tmp_path, "b", [turn(name, seconds) for name, seconds in names.items()])
    device = {"tokens": 2048, "busy": 0.2, "looks": 1, "peak": 10, "kept": 1, "ranks": 8}
    ours, theirs = {"on_device": "zero 3", "in_a_row": 0.3, "kernels": 4000}, {"on_device": FSDP2, "in_a_row": 0.4}
    results(tmp_path, "c", [{**device, **theirs, "kernels": 1}, {**device, **ours}])
    found = {what: (seen, met) for what, _, seen, met in targets(Found(tmp_path))}
    assert found == {
        "b, 8,192 tokens: plain again ÷ plain": ("1.010", True),
        "b, 8,192 tokens: zero 0 ÷ DDP": ("1.08", False),
        "b, 8,192 tokens: zero 0 ÷ plain": ("1.30", False),
        "b, 8,192 tokens: zero 1 ÷ DDP": ("0.87", True),
        "b, 8,192 tokens: zero 1 ÷ plain": ("1.04", True),
        "b, 8,192 tokens: zero 3 ÷ FSDP2": ("0.95", True),
        "b: the losses of two plain loops": ("equal", True),
        "c: kernels": ("4,000", False),
        "c: device ms": ("200.0", True),
        "c: time in a row, zero 3 ÷ FSDP2": ("0.75", True),
        "c: peak, zero 3 ÷ FSDP2": ("1.00", True),
    }


def test_the_stored_page_is_that_of_the_stored_results() -> None:
    results = ROOT / "benchmarks" / "results"
    assert (results / "gpu-short.md").read_text() == text_of(Found(results))


def test_what_the_cpu_took_in_the_place_of_a_gpu_is_no_target(tmp_path: Path) -> None:
    results(tmp_path, "b", [turn(name, 1.0) for name in ("plain", "plain, again", "DDP", "zero 1")], clock.NO_GPU)
    assert not list(targets(Found(tmp_path)))


# -- the command -------------------------------------------------------------------------------------------------------


def _run(*arguments: object) -> Any:
    application = typer.Typer()
    application.command()(gpu_short.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--sections", "ax", "--sections takes letters of 'abcde', not 'ax'"),
        ("--sections", "aa", "--sections takes letters of 'abcde', not 'aa'"),
        ("--world", "8,x", "--world takes numbers with commas between them, not '8,x'"),
        ("--world", "1", "--world takes numbers from 2 on, not '1'"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str, words: str, tmp_path: Path) -> None:
    done = _run("--device", "cpu", option, value, "--out", tmp_path)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", "").split())


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch.cuda, "is_available", lambda: False)
    done = _run("--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: there is no CUDA here")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


@pytest.mark.full
def test_tests_of_bits_that_are_not_there_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_short.many_ranks.PROGRAMS", ("none of this name",))
    with pytest.raises(RuntimeError, match="not found"):
        list(shared_gpu(ShortJob(str(tmp_path), "d", "cpu", quick=True)))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_of_it_runs_on_the_cpu(tmp_path: Path) -> None:
    done = _run("--device", "cpu", "--quick", "--world", "8,64", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = Found(tmp_path)
    assert {name: outcome_of(report)["outcome"] for name, report in found.reports.items()} == dict.fromkeys(
        SECTIONS, WHOLE
    )
    turns = found.rows("b", "turn")
    assert len({row["loss"] for row in turns}) == 1, "one rank's loss is that of the plain loop, to the bit"
    assert len(turns) == 9
    hosts = found.rows("c", "us_a_parameter")
    assert [(row["ranks"], row["system"]) for row in hosts] == [
        (ranks, system) for ranks in (8, 64) for system in ("plain", FSDP2, "zero 3")
    ]
    assert all(row["passed"] for row in found.rows("d", "test"))
    assert len(found.rows("e", "allocator")) == 5
