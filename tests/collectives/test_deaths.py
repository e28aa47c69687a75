"""Real processes that die, stop, fail or exit in the middle of a collective.

The other ranks raise in time, and name the rank and the place. `python -m tests.kills` does the same at random, 200
times.
"""

from __future__ import annotations

import gc
import resource
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from collectives import CollectiveError, Kind, Pairwise, Tag
from collectives.backends.gloo import connect
from zero import ZeroOptimizer

from ..kills import ALGORITHMS, Case, End, Group, drawn, enter, run

RAISED, LEFT = End.RAISED, End.LEFT
KINDS = ["reduce_scatter", "all_gather", "exchange", "meet", "broadcast"]
NETWORKED = ["pairwise", "ring", "hierarchical"]
CASES = [
    *(Case("shared", kind, 3, 1, stays=True) for kind in KINDS),
    *(Case(algorithm, kind, 3, 2) for algorithm in ("pairwise", "ring") for kind in KINDS),
    *(Case("hierarchical", kind, 4, 3) for kind in KINDS),
    *(Case(algorithm, "reduce_scatter", 3, 0, end) for algorithm in ("shared", *NETWORKED) for end in (RAISED, LEFT)),
    *(Case("shared", kind, 3, 2, End.STOPPED, limit=3.0, stays=True) for kind in KINDS[:2]),
    *(Case("pairwise", kind, 3, 2, End.STOPPED, limit=3.0, stays=True) for kind in KINDS[::2]),
    *(Case("hierarchical", kind, 4, 0, End.STOPPED, limit=3.0, stays=True) for kind in KINDS[:2]),
    *(Case("all_to_all", kind, 3, 1) for kind in KINDS[:2]),
    Case("all_to_all", "reduce_scatter", 3, 1, End.RAISED),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.algorithm}-{c.collective}-rank {c.victim} of {c.world_size}-{c.end.value}"
)
@pytest.mark.by_default("shared-reduce_scatter-rank 1 of 3-killed", "pairwise-all_gather-rank 2 of 3-killed")
def test_every_other_rank_names_the_rank_that_is_gone_and_the_collective(case: Case) -> None:
    run(case)


def test_random_kills_strike_every_algorithm_in_every_collective() -> None:
    cases = [drawn(seed) for seed in range(200)]
    struck = {(case.algorithm, case.collective) for case in cases}
    assert struck == set(product(ALGORITHMS, KINDS))
    assert {case.victim for case in cases} == {0, 1, 2, 3}


def different_calls(rank: int, port: int, pipe: Connection, stage: int) -> None:
    enter(rank, 2, port, 60.0)
    model = nn.Linear(5, 3)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, module=model, stage=stage, lr=0.1)
    chosen = optimizer._transport.name
    model(torch.ones(1, 5)).sum().backward()
    try:
        optimizer.step() if rank == 0 else optimizer.consolidate_state_dict()
    except RuntimeError as error:
        pipe.send((chosen, str(error)))
    pipe.poll(None)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.full
def test_ranks_in_different_calls_learn_of_both_through_shared_memory(stage: int) -> None:
    group = Group(different_calls, 2, stage)
    try:
        for rank in range(2):
            chosen, error = group.hear(rank)
            assert chosen == "shared memory"
            assert "rank 0 is in step()" in error
            assert "rank 1 is in consolidate_state_dict(to=0)" in error
    finally:
        group.end()


def different_sizes(rank: int, port: int, pipe: Connection) -> None:
    """Let two ranks enter collectives of different sizes and drop the transport. Then use the group again."""
    enter(rank, 2, port, 60.0)
    numel, transport = 40 + 8 * rank, connect().fork()
    out, tag = torch.empty(numel // 2), Tag(Kind.REDUCE_SCATTER, f"bucket {rank}")
    try:
        Pairwise(transport).reduce_scatter(torch.ones(numel), [0, numel // 2, numel], out, start=None, tag=tag).wait()
    except CollectiveError as error:
        pipe.send(str(error))
    del transport
    gc.collect()
    pipe.send(connect().fork().exchange(bytes([rank]), Tag(Kind.EXCHANGE, "the next")))
    pipe.poll(None)


def test_different_sizes_over_gloo_are_an_error_on_both_ranks_and_the_group_stays_whole() -> None:
    group = Group(different_sizes, 2)
    try:
        for rank in range(2):
            error = group.hear(rank)
            assert "is in bucket 0" in error
            assert "is in bucket 1" in error
        for rank in range(2):
            assert group.hear(rank) == [b"\0", b"\1"]
    finally:
        group.end()


def little_address_space(rank: int, port: int, pipe: Connection, collective: str) -> None:
    enter(rank, 2, port, 60.0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    model = nn.Linear(5, 3)
    try:
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, collective=collective)
    except RuntimeError as error:
        pipe.send(str(error))
    else:
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        pipe.send(optimizer._transport.name)
    pipe.poll(None)


@pytest.mark.parametrize(
    ("collective", "answer"), [("auto", "gloo"), ("shared", "rank 1 cannot share memory: OSError")]
)
@pytest.mark.full
def test_a_rank_with_little_address_space_shares_no_memory(collective: str, answer: str) -> None:
    group = Group(little_address_space, 2, collective)
    try:
        for rank in range(2):
            assert answer in group.hear(rank)
    finally:
        group.end()
