"""Processes whose ranks part or end: each is named in time, also after the limit of users, and a late one is not.

Collectives run on a stream of each rank, as on a GPU, and messages go over gloo (`tests.ledger`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ...ledger import DIVERGENCES, LATE, Case, run, run_late

CASE = Case("", 3, 3, 1, 2, 1, rounds=2, processes=True)


@pytest.mark.parametrize("what", DIVERGENCES)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_names_the_one_that_parts_within_the_limit_and_two_seconds(what: str, stage: int) -> None:
    """Ranks run units at stage 3 alone, so there is no other order and no other unit at stage 1."""
    if stage == 3 or what not in ("order", "unit"):
        run(replace(CASE, what=what, stage=stage))


def test_so_they_do_if_it_holds_the_store() -> None:
    run(replace(CASE, what="lost", victim=0))


def test_so_they_do_with_the_limit_of_users() -> None:
    run(replace(CASE, what="unit", limit=10.0))


def test_a_rank_that_stops_is_late_until_the_time_limit_of_the_group() -> None:
    run(replace(CASE, what="stops", patience=8.0))


@pytest.mark.parametrize("what", LATE)
def test_a_late_rank_changes_no_bit(what: str) -> None:
    """It is late by three limits, or its thread holds the interpreter for 12 seconds."""
    run_late(replace(CASE, what=what, limit=3.0 if what == "holds" else 0.5))


HANGS = """
import sys, time
from argparse import Namespace
from torch.distributed import HashStore
from collectives import Kind, Tag
from collectives.launches import sentinel
from collectives.launches.ledger import Launches
sentinel.ABORT = 3.0
backend = Namespace(stall_limit=0.2, timeout=60.0)
links = Namespace(rank=0, ranks=(0, 1), number=7, backend=backend, closed=lambda: [1],
                  abort=lambda reason: time.sleep(float(sys.argv[1])))
launches = Launches(links, 2)
post = sentinel.Post(launches, HashStore())
post._store.set("zero 7 1", "-")
post.open()
sentinel.SENTINEL.watch(post)
with launches.waiting(Tag(Kind.MEET, "step()"), meets=True):
    time.sleep(float(sys.argv[2]))
print("ends")
"""


@pytest.mark.parametrize("wait", [60.0, 1.0], ids=["it waits", "it ends"])
def test_an_abort_that_hangs_ends_the_process_with_the_verdict(wait: float) -> None:
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, "60", str(wait)], check=False, timeout=50, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert time.monotonic() - begin > 3.0
    assert "rank 0: rank 1 is lost" in ended.stderr.splitlines()[-1]
    assert "step() [meet, round 0, index 0]; the abort of its collectives has not returned" in ended.stderr


def test_a_process_that_ends_while_its_group_is_aborted_waits_for_that() -> None:
    """Torch ends a process by a signal if a thread comes back from a call into an interpreter that has ended."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, "2", "1"], check=False, timeout=50, capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert ended.stdout == "ends\n"
