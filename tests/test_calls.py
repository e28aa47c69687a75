"""`benchmarks.calls` counts every call of a system's own functions once, under the event that causes it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import call_counter
from benchmarks.call_counter import BUCKET, EVENTS, PARAMETER, STEP, CallCounter
from benchmarks.report import Report

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="calls are counted on Python 3.11"),
]


def _three() -> Iterator[int]:
    yield from range(3)


def _bucket() -> None:
    _parameter()


def _parameter() -> list[int]:
    return [number for number in (1, 2)]  # noqa: C416  # a comprehension to be counted


def _raises() -> None:
    raise KeyError


def _step() -> None:
    _bucket()
    _parameter()
    list(_three())
    with pytest.raises(KeyError):
        _raises()
    _bucket()


def test_each_call_is_counted_once_under_the_innermost_event(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    monkeypatch.setattr(call_counter, "EVENTS", {f"{here}:_bucket": BUCKET, f"{here}:_parameter": PARAMETER})
    counter = CallCounter([here])
    with counter.counting():
        _step()
    _step()
    assert counter.calls == {
        (STEP, "function", f"{here}:_step"): 1,
        (BUCKET, "function", f"{here}:_bucket"): 2,
        (PARAMETER, "function", f"{here}:_parameter"): 3,
        (PARAMETER, "comprehension", f"{here}:_parameter.<locals>.<listcomp>"): 3,
        (STEP, "generator", f"{here}:_three"): 4,
        (STEP, "function", f"{here}:_raises"): 1,
    }
    without = CallCounter([here], without=[here])
    with without.counting():
        _step()
    assert not without.calls


@pytest.mark.parametrize("begin", EVENTS)
def test_every_function_that_stands_for_an_event_is_there(begin: str) -> None:
    name, _, function = begin.partition(":")
    found = importlib.import_module(name.rstrip("."))
    for part in function.split(".") if function else ():
        found = inspect.getattr_static(found, part)


def test_calls_of_a_small_model_are_counted_and_shown(tmp_path: Path) -> None:
    typer = pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from benchmarks import calls

    application = typer.Typer()
    application.command()(calls.main)
    options = ["--model", "gpt-2x16", "--system", "zero 2", "--system", "DDP", "--functions", "3", "--markdown"]
    done = CliRunner().invoke(application, [*options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    parts = Report.read(tmp_path / "calls.json").parts
    arrivals = [part for part in parts if part["function"] == "zero.gradients.hooks:_Arrival.__call__"]
    parameters = 2 * 12 + 3
    assert [(part["event"], part["calls"]) for part in arrivals] == [(PARAMETER, parameters)]
    assert {part["system"] for part in parts} == {"zero 2", "DDP"}
    assert not any(part["function"].startswith("zero.commands") for part in parts)
    assert f"gpt-2x16, {parameters} parameters" in done.stdout
    assert "| zero.gradients.hooks:_Arrival.__call__ | parameter | function | 27 |" in done.stdout
    wrong = CliRunner().invoke(application, ["--model", "no such model", "--out", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "'no such model' is no model" in wrong.output
