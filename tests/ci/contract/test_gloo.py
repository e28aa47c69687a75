"""On processes, each two values of stage, ranks, buckets, habit, precision and collective give plain bits."""

from __future__ import annotations

import pytest

from ...contract.on_processes import whole_program
from ...contract.space import FEW, allowed, named, program_of
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
