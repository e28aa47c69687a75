"""A process that dies in the middle of a collective is named by every other rank, with the collective, in time."""

from __future__ import annotations

from ..kills import Case, run


def test_every_other_rank_names_the_rank_that_is_gone_and_the_collective() -> None:
    run(Case("pairwise", "all_gather", 3, 2))
