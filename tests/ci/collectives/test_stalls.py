"""Processes whose ranks part, stop or end: each is named in time, also after the limit of users, and a late one is not.

Collectives run on a stream of each rank, as on a GPU, and messages go over gloo (`tests.ledger`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ...ledger import DIVERGENCES, Case, run, run_late

CASE = Case("", 3, 3, 1, 2, 1, rounds=2, processes=True)


@pytest.mark.parametrize("what", DIVERGENCES)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_names_the_one_that_parts_within_the_limit_and_two_seconds(what: str, stage: int) -> None:
    """Ranks run units at stage 3 alone, so there is no other order and no other unit at stage 1."""
    if stage == 3 or what not in ("order", "unit"):
        run(replace(CASE, what=what, stage=stage))


@pytest.mark.parametrize("what", ["lost", "stops"])
def test_so_they_do_if_it_holds_the_board(what: str) -> None:
    run(replace(CASE, what=what, victim=0))


def test_so_they_do_with_the_limit_of_users() -> None:
    run(replace(CASE, what="unit", limit=10.0))


def test_a_rank_that_is_late_by_three_limits_changes_no_bit() -> None:
    run_late(replace(CASE, what="late"))


WAITS = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from collectives.launches import sentinel
store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
sentinel.LEFT.alone(lambda: store.wait(["never"], timedelta(seconds=float(sys.argv[1]))))
"""


def test_a_process_that_ends_while_a_call_has_not_returned_ends_as_it_would() -> None:
    """Torch ends a process by a signal if a thread comes back from a call into an interpreter that has ended."""
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", WAITS, "2.0"], check=False, timeout=60)
    assert ended.returncode == 0
    assert time.monotonic() - begin > 2.0, "it was waited for"
