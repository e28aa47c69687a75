"""Processes that part, end, stop, fail or leave are named by every other rank in time, and a late one is not.

Where ranks part, collectives run on a stream of each rank, as on a GPU, and messages go over gloo (`tests.ledger`).
`python -m tests.kills` lets processes die at random, 200 times. Hosts are pretended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from collectives import topology

from ...dials.loops import step
from ...dials.record import config_with
from ...kills import Case as Death
from ...kills import End
from ...kills import run as run_death
from ...ledger import DIVERGENCES, LATE, Case, run, run_late
from ...support.machine.program import Backward, Config
from ...support.machine.run import Played, play
from ...support.machine.run import run as run_program
from ...support.pool import GlooPool
from ...support.sockets import on_hosts

CASE = Case("", 3, 3, 1, 2, 1, rounds=2, processes=True)


@pytest.mark.parametrize("what", DIVERGENCES)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_names_the_one_that_parts_within_the_limit_and_two_seconds(what: str, stage: int) -> None:
    """Ranks run units at stage 3 alone, so there is no other order and no other unit at stage 1."""
    if stage == 3 or what not in ("order", "unit"):
        run(replace(CASE, what=what, stage=stage))


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, what="lost", victim=0),  # it holds the store
        replace(CASE, what="unit", limit=10.0),  # that of users
        replace(CASE, what="stops", patience=8.0),  # it is late until the time limit of the group
    ],
    ids=lambda case: case.what,
)
def test_so_they_do_with_other_limits_and_if_it_holds_the_store(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("what", LATE)
def test_a_late_rank_changes_no_bit(what: str) -> None:
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


@pytest.mark.parametrize(("abort", "wait"), [(60, 60), (60, 1), (2, 1)], ids=str)
def test_an_abort_that_hangs_ends_the_process_with_the_verdict(abort: int, wait: int) -> None:
    """If it comes back, a process that ends meanwhile waits for it: torch ends a process by a signal if a thread comes
    back from a call into an interpreter that has ended."""
    begin, command = time.monotonic(), [sys.executable, "-c", HANGS, str(abort), str(wait)]
    ended = subprocess.run(command, check=False, timeout=50, capture_output=True, text=True)
    if abort == 2:
        assert (ended.returncode, ended.stdout) == (0, "ends\n")
        return
    assert ended.returncode == 1
    assert time.monotonic() - begin > 3.0
    assert "rank 0: rank 1 is lost" in ended.stderr.splitlines()[-1]
    assert "step() [meet, round 0, index 0]; the abort of its collectives has not returned" in ended.stderr


KINDS = ["reduce_scatter", "all_gather", "exchange", "meet", "broadcast"]
CASES = [
    *(Death("shared", kind, 3, 1, stays=True) for kind in KINDS[::2]),
    *(Death("pairwise", kind, 3, 2) for kind in KINDS[::4]),
    *(Death("ring", kind, 3, 2) for kind in KINDS[:2]),
    *(Death("hierarchical", kind, 4, 3) for kind in KINDS[1::2]),
    *(Death("all_to_all", kind, 3, 1) for kind in KINDS[:2]),
    *(Death("fold", "reduce_scatter", 4, victim) for victim in (0, 3)),
    Death("shared", "reduce_scatter", 3, 0, End.LEFT),
    Death("ring", "reduce_scatter", 3, 0, End.RAISED),
    Death("all_to_all", "reduce_scatter", 3, 1, End.RAISED),
    Death("shared", "reduce_scatter", 3, 2, End.STOPPED, limit=3.0, stays=True),
    Death("hierarchical", "all_gather", 4, 0, End.STOPPED, limit=3.0, stays=True),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.algorithm}-{c.collective}-rank {c.victim} of {c.world_size}-{c.end.value}"
)
def test_every_other_rank_names_the_rank_that_is_gone_and_the_collective(case: Death) -> None:
    run_death(case)


LOOP = [*step(1, Backward(2), Backward(3)), Backward(4, sync=False), *step(5)]
WAYS = [(collective, stage, hosts) for collective, stage in (("fold", 1), ("auto", 0), ("auto", 2), ("auto", 3))
        for hosts in ([0, 0, 1, 1], [0, 0, 0, 0])]  # fmt: skip


def on_pretended_hosts(group: dist.ProcessGroup, rank: int, config: Config, hosts: list[int]) -> Any:
    """Run the program on a rank. "auto" takes gloo's own collectives for NCCL's."""
    with pytest.MonkeyPatch.context() as patch:
        on_hosts(patch, hosts)
        patch.setattr(topology, "_all_have_nccl", lambda *_: config.setting.collective == "auto")
        return play(config, LOOP, group)


@pytest.mark.parametrize(("collective", "stage", "hosts"), WAYS, ids=str)
def test_programs_on_hosts_of_two_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, collective: str, stage: int, hosts: list[int]
) -> None:
    """And so does a fold that was asked for on one host."""
    config = config_with({"stage": stage, "world_size": 4, "collective": collective})
    run_program(config, *LOOP, backend=Played(gloo.run(on_pretended_hosts, config, hosts, ranks=range(4))))
