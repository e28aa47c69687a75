"""Bugs of the zoo and drawn mutants change what they say, and a crash is no kill."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ...mutants import sites
from ...zoo import judge, live

SOURCE = """
import torch
calls = []
def f(a, b=2):
    calls.append(a)
    total = 0
    for n in (a, b):
        if n > 1 and b:
            total += n
    calls.append(b)
    return total
def documented():
    raise ValueError("no")
def shapes(): return torch.ones(2) + torch.ones(3)
"""
CHANGES: dict[str | tuple[str, str], tuple[int, list[int]]] = {  # what f(3) returns then, and what it has called
    "": (5, [3, 2]),
    ("calls.append(a)", "pass"): (5, [2]),
    ("", "a = b"): (4, [2, 2]),
    "zero/made_up.py:5:4:drop": (5, [2]),
    "zero/made_up.py:6:12:constant": (6, [3, 2]),
    "zero/made_up.py:8:8:never": (0, [3, 2]),
    "zero/made_up.py:8:11:compare": (5, [3, 2]),
    "zero/made_up.py:9:12:drop": (0, [3, 2]),
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "made_up.py").write_text(SOURCE)
    (tmp_path / "entered").write_bytes(b"\0")
    monkeypatch.setenv(live.NOTED, str(tmp_path / "entered"))
    monkeypatch.setattr(live, "note", live.note.__wrapped__)
    monkeypatch.setattr(sites, "ROOT", tmp_path)
    monkeypatch.setattr(judge, "INSIDE", (str(tmp_path / "zero"),))
    monkeypatch.syspath_prepend(str(tmp_path / "zero"))
    sys.modules.pop("made_up", None)
    return importlib.import_module("made_up")


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_made_and_noted(change: str | tuple[str, str], library: ModuleType, tmp_path: Path) -> None:
    if isinstance(change, tuple):
        live.rewrite("made_up.f", *change)
    elif change:
        sites.apply(change)
    assert (library.f(3), library.calls) == CHANGES[change]
    assert (tmp_path / "entered").read_bytes() == (b"\1" if change else b"\0")


def test_assertions_and_documented_errors_are_kills_and_crashes_are_not(library: ModuleType) -> None:
    calls = (library.documented, library.shapes, lambda: library.missing, lambda: pytest.fail("not equal"))
    for call, is_kill in zip(calls, (True, False, False, True), strict=True):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            call()
        assert judge.catches(caught.value) is is_kill
