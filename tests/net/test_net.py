"""`python -m tests.net` names the differences between two sides, and refuses comparisons that it cannot make."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from .__main__ import main
from .compare import differences

HASH = "0123456789abcdef" * 4
SEEN: dict[str, Any] = {
    "hashed": {
        "at the start": {"rank 0": {"parameter a": HASH}, "rank 1": {"parameter a": HASH}},
        "after command 1, Step()": {"rank 1": {"parameter a": HASH, "state 0.b": HASH}},
    },
    "losses": [1.0, 0.5],
}


def test_there_is_a_line_for_each_check_that_differs_or_is_missing_or_fails_on_both_sides() -> None:
    of_state, of_list, failed = deepcopy(SEEN), SEEN | {"losses": [1.0, 0.25, 0.1]}, SEEN | {"error": "no"}
    of_state["hashed"]["after command 1, Step()"]["rank 1"]["state 0.b"] = HASH[::-1]
    old = {"same": SEEN, "a": SEEN, "b": SEEN, "c": SEEN, "d": {"error": "no"}, "e": SEEN}
    new = {"same": deepcopy(SEEN), "a": of_state, "b": of_list, "c": failed, "d": {"error": "no"}, "f": {}}
    place = "hashed, after command 1, Step(), rank 1, state 0.b"
    assert differences(old, new) == [
        f"a: {place}: 0123456789ab -> fedcba987654 (1 of 6 values differ: state 0.b)",
        "b: losses, 1: 0.5 -> 0.25 (2 of 6 values differ: 1, 2)",
        "c: error: nothing -> no (1 of 6 values differ: error)",
        "d: both sides fail: no",
        "e: hashed, at the start, rank 0, parameter a: 0123456789ab -> nothing (6 of 6 values differ: parameter a, "
        "state 0.b, 0, 1)",
        "f: nothing was recorded",
    ]


def test_what_is_no_commit_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-commit"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
