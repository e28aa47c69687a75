"""On processes, each two values of stage, ranks, buckets, habit and collective give plain bits; peaks at stage 3."""

from __future__ import annotations

import pytest

from collectives.messages import REPORT_BYTES

from ... import peaks
from ...contract.on_processes import whole_program
from ...contract.space import FEW, allowed, named, program_of
from ...peaks import BLOCKS
from ...support.pairs import Row, pair_rows
from ...support.plain import assert_same_states
from ...support.pool import GlooPool
from ...support.programs import compare

ROWS = pair_rows(
    {
        **{key: values[:1] for key, values in FEW.items()},
        "stage": (0, 1, 2, 3),
        "ranks": (2, 3, 4),
        "cap": (1e-6, 25.0),
        "optimizer": ("adamw", "adamw fused"),
        "habit": ("clips", "no sync", "fewer", "freezes"),
        "numbers": ("", "bf16"),
        "collective": ("auto", "pairwise", "all_to_all"),
    },
    allowed,
)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_programs_give_the_bits_of_the_plain_loop(gloo: GlooPool, row: Row) -> None:
    program = program_of(row)
    results = gloo.run(whole_program, program, ranks=range(program.world_size))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


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
