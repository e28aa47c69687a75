"""The zoo's table is whole, its patterns and the drawn mutants change what they say, and a crash is no kill."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ...mutants import sites
from ...zoo import live
from ...zoo.bug import bugs, functions, pattern_of
from ...zoo.judge import How, judge

SOURCE = """
import functools, torch
calls = []
class C:
    @property
    def p(self): return calls.append(1) or [self.q(n) for n in (1, 2)]
    @functools.lru_cache
    def q(self, n): return n
def f(a, b=2):
    calls.append(a)
    total = 0
    for n in (a, b):
        if n > 1 and b:
            total += n
    calls.append(b)
    return total
def documented(): raise ValueError("no")
def shapes(): return torch.ones(2) + torch.ones(3)
"""
CHANGES = {  # what f(3) returns then, and what it has called
    "": (5, [3, 2]),
    "drop append 0": (5, [2]),
    "swap a b 0": (5, [2, 2]),
    "constant total 7": (12, [3, 2]),
    "decide n None": (0, [3, 2]),
    "first_of b": (3, [3, 2]),
    "zero/made_up.py:10:4:drop": (5, [2]),
    "zero/made_up.py:11:12:constant": (6, [3, 2]),
    "zero/made_up.py:13:8:never": (0, [3, 2]),
    "zero/made_up.py:14:12:drop": (0, [3, 2]),
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "made_up.py").write_text(SOURCE)
    (tmp_path / "entered").write_bytes(b"\0")
    monkeypatch.setenv(live.NOTED, str(tmp_path / "entered"))
    monkeypatch.setattr(live, "note", live.note.__wrapped__)
    monkeypatch.setattr(sites, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "zero"))
    sys.modules.pop("made_up", None)
    return importlib.import_module("made_up")


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_made_and_noted(change: str, library: ModuleType, tmp_path: Path) -> None:
    if change.startswith("zero/"):
        sites.apply(change)
    elif change:
        live.rewrite("made_up.f", pattern_of(change))
    assert (library.f(3), library.calls) == CHANGES[change]
    assert (tmp_path / "entered").read_bytes() == (b"\1" if change else b"\0")


def test_a_function_is_replaced_wherever_it_is_known(library: ModuleType) -> None:
    live.replace("made_up.C.p", lambda real, self: [*real(self), 3])
    live.replace("made_up.C.q", lambda real, self, n: -real(self, n))
    assert library.C().p == [-1, -2, 3]
    for place in ("made_up.g", "made_up.C.r", "no_module.f", "made_up.calls"):
        with pytest.raises(live.StaleError):
            live.replace(place, lambda real: real)
    with pytest.raises(live.StaleError, match="2 times"):
        live.rewrite("made_up.f", pattern_of("drop append"))


def test_every_bug_has_a_pattern_or_a_function() -> None:
    known = functions()
    for each in bugs().values():
        assert bool(each.change) != (each.name in known), each.name


def test_assertions_and_documented_errors_are_kills_and_crashes_are_not(library: ModuleType) -> None:
    calls = (library.documented, library.shapes, lambda: library.missing, lambda: pytest.fail("not equal"))
    for call, how in zip(calls, (How.ERROR, How.OTHER, How.OTHER, How.ASSERTION), strict=True):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            call()
        assert judge(caught.value, Path(str(library.__file__)).parent.parent) is how
