"""`python -m tests.net` names the differences between two sides, and refuses comparisons that it cannot make."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from .__main__ import main
from .compare import difference, differences
from .trained import RUNS

HASH = "0123456789abcdef" * 4
PROGRAM: dict[str, Any] = {
    "hashed": {
        "at the start": {"rank 0": {"parameter a": HASH}, "rank 1": {"parameter a": HASH}},
        "after command 1, Step()": {
            "rank 0": {"parameter a": HASH},
            "rank 1": {"parameter a": HASH, "state 0.b": HASH},
        },
    },
    "undisturbed": {"at the start": {"rank 0": {"traffic payload_sent": "12", "describe line 1": "stage 2"}}},
}
TRAINED: dict[str, Any] = {"losses": [1.0, 0.5], "ranks": [{"payload_sent": 3}, {"payload_sent": 3}]}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("hashed", "after command 1, Step()", "rank 1", "state 0.b"), HASH[::-1], "0123456789ab -> fedcba987654"),
        (("undisturbed", "at the start", "rank 0", "traffic payload_sent"), "13", "12 -> 13"),
        (("undisturbed", "at the start", "rank 0", "describe line 2"), "more", "nothing -> more"),
        (("error",), "ValueError: no", "nothing -> ValueError: no"),
    ],
)
def test_the_first_value_that_differs_is_named(path: tuple[str, ...], value: str, said: str) -> None:
    changed = deepcopy(PROGRAM)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert difference(PROGRAM, changed) == f"{', '.join(path)}: {said} (1 of 7 values differ: {path[-1]})"
    assert difference(PROGRAM, deepcopy(PROGRAM)) == ""


def test_there_is_a_line_for_each_check_that_differs_or_is_missing_or_fails_on_both_sides() -> None:
    sent_more = TRAINED | {"ranks": [{"payload_sent": 3}, {"payload_sent": 4}]}
    old = {"a": TRAINED, "b": TRAINED, "c": {"error": "no"}, "d": TRAINED}
    assert differences(old, {"a": TRAINED, "b": sent_more, "c": {"error": "no"}, "e": {}}) == [
        "b: ranks, 1, payload_sent: 3 -> 4 (1 of 4 values differ: payload_sent)",
        "c: both sides fail: no",
        "d: losses, 0: 1.0 -> nothing (4 of 4 values differ: 0, 1, payload_sent)",
        "e: nothing was recorded",
    ]


def test_what_is_no_commit_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-commit"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_there_is_a_run_of_every_stage_and_no_run_twice() -> None:
    assert len(set(RUNS)) == len(RUNS)
    assert all(any(f"--stage={stage}" in run for run in RUNS) for stage in range(4))
