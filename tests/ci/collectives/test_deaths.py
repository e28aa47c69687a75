"""Processes that die, stop, fail or leave are named by every other rank, with the collective, in time.

`python -m tests.kills` does the same at random, 200 times.
"""

from __future__ import annotations

import pytest

from ...kills import Case, End, run

KINDS = ["reduce_scatter", "all_gather", "exchange", "meet", "broadcast"]
CASES = [
    *(Case("shared", kind, 3, 1, stays=True) for kind in KINDS[::2]),
    *(Case("pairwise", kind, 3, 2) for kind in KINDS[::4]),
    *(Case("ring", kind, 3, 2) for kind in KINDS[:2]),
    *(Case("hierarchical", kind, 4, 3) for kind in KINDS[1::2]),
    *(Case("all_to_all", kind, 3, 1) for kind in KINDS[:2]),
    *(Case("fold", "reduce_scatter", 4, victim) for victim in (0, 3)),
    Case("shared", "reduce_scatter", 3, 0, End.LEFT),
    Case("ring", "reduce_scatter", 3, 0, End.RAISED),
    Case("all_to_all", "reduce_scatter", 3, 1, End.RAISED),
    Case("shared", "reduce_scatter", 3, 2, End.STOPPED, limit=3.0, stays=True),
    Case("pairwise", "exchange", 3, 2, End.STOPPED, limit=3.0, stays=True),
    Case("hierarchical", "all_gather", 4, 0, End.STOPPED, limit=3.0, stays=True),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.algorithm}-{c.collective}-rank {c.victim} of {c.world_size}-{c.end.value}"
)
def test_every_other_rank_names_the_rank_that_is_gone_and_the_collective(case: Case) -> None:
    run(case)
