"""On processes a rank of stage 3 holds its shards, the root, two units and three buckets, and no more."""

from __future__ import annotations

import pytest

from collectives.messages import REPORT_BYTES

from ... import peaks
from ...peaks import BLOCKS
from ...support.pool import GlooPool


@pytest.mark.law("memory")
@pytest.mark.parametrize(
    ("ranks", "collective"), [((0, 1), "auto"), ((0, 1, 2, 3), "pairwise"), ((0, 1), "all_to_all")]
)
def test_a_rank_holds_its_shards_the_root_two_units_and_three_buckets_at_most(
    gloo: GlooPool, ranks: tuple[int, ...], collective: str
) -> None:
    """Ranks that share memory gather nothing: all of them can read every slice."""
    cap = 100 if collective != "auto" else 0.3  # between a unit and the model, of which no unit has to be gathered
    for found in gloo.run(peaks.measure, 64, 3, cap, collective, ranks=ranks, limit=120):
        share, padding = found.whole / len(ranks), 64 * (BLOCKS + 2) * 6
        for kind, factor in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert abs(found.between[kind] - factor * share) <= padding, kind
        gathered = found.root + 2 * found.unit
        assert found.gathered == (0 if collective == "auto" else gathered)
        if collective == "auto":
            assert found.unit < found.bucket <= cap * 2**20
        else:
            assert found.bucket <= found.unit
        assert found.scratch <= 3 * found.bucket
        own = found.unit / len(ranks) if collective == "all_to_all" else 0  # a rank also sends its own slice to itself
        words = REPORT_BYTES * (len(ranks) - 1)  # buffers for the failure reports of other ranks
        assert found.above <= gathered + 3 * found.bucket + own + padding + words
