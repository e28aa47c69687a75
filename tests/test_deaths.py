"""Real processes that die, stop, fail or leave in the middle of a collective: the others say who and where, in time.

`python -m tests.kills` does the same at random, 200 times.
"""

from __future__ import annotations

from itertools import product

import pytest

from .kills import Case, End, drawn, run

KINDS = ["reduce_scatter", "all_gather", "exchange", "meet"]
CASES = [
    *(Case("shared", kind, 3, 1) for kind in KINDS),
    *(Case(algorithm, "reduce_scatter", 3, 2) for algorithm in ("pairwise", "ring")),
    *(Case("hierarchical", kind, 4, 3) for kind in KINDS[:2]),
    *(Case("shared", "reduce_scatter", 3, 0, end) for end in (End.RAISED, End.LEFT)),
    *(Case("shared", kind, 3, 2, End.STOPPED, limit=1.0) for kind in KINDS[:2]),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.algorithm}-{c.collective}-rank {c.victim} of {c.world_size}-{c.end.value}"
)
def test_every_other_rank_names_the_rank_that_is_gone_and_the_collective(case: Case) -> None:
    run(case)


def test_random_kills_strike_every_algorithm_in_every_collective() -> None:
    cases = [drawn(seed) for seed in range(200)]
    struck = {(case.algorithm, case.collective) for case in cases}
    assert struck == set(product(("shared", "pairwise", "ring", "hierarchical"), KINDS))
    assert {case.victim for case in cases} == {0, 1, 2, 3}
