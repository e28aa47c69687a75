"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured
from .support.rows import only

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((15_463, 616, 381), (0, 0, 0), (5_664, 270, 140), (405, 4, 2)),
    (1, 1): ((13_180, 524, 336), (0, 0, 0), (6_276, 318, 171), (283, 1, -1)),
    (1, 2): ((13_186, 524, 337), (0, 0, 0), (5_815, 290, 171), (283, 1, -1)),
    (1, 3): ((14_989, 621, 379), (1_953, 103, 41), (5_524, 270, 167), (400, 1, 3)),
    (8, 0): ((72_902, 2_452, 2_629), (0, 0, 0), (5_068, 238, 122), (363, 4, 0)),
    (8, 1): ((58_089, 1_953, 2_070), (0, 0, 0), (5_694, 285, 157), (232, 1, -3)),
    (8, 2): ((58_161, 1_959, 2_073), (0, 0, 0), (5_469, 269, 163), (232, 1, -3)),
    (8, 3): ((58_644, 2_001, 2_085), (3_591.5, 188.75, 80.75), (7_307, 359.25, 228.25), (837, 19, 22)),
}


ROWS = tuple(only(FIGURES, (1, 2), (8, 3)))


@VERSIONS
@pytest.mark.parametrize(("world", "stage"), ROWS)
def test_a_step_runs_at_most_so_much_python_beyond_the_plain_loop(world: int, stage: int) -> None:
    above = excess(FIGURES[world, stage], measured(ROWS)[world, stage])
    assert not above, "\n".join([f"stage {stage} as the last rank of {world}:", *above])
