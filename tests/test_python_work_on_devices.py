"""On its paths for devices a step of `zero` runs no more Python beyond the plain loop than a table says."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured
from .support.rows import rows

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((17_090, 700, 457), (161, 2, 7.25), (4_730.25, 232.75, 95.75), (502.3125, 7.0625, 7.5)),
    (1, 1): ((18_948, 794, 548), (161, 2, 7.25), (5_074.25, 263.75, 127.75), (277.3125, 1.0625, -0.5)),
    (1, 2): ((18_954, 794, 549), (161, 2, 7.25), (4_615.25, 235.75, 127.75), (277.3125, 1.0625, -0.5)),
    (1, 3): ((16_581, 702, 453), (2_114, 105, 48.25), (4_324.25, 215.75, 123.75), (394.3125, 1.0625, 3.5)),
    (8, 0): ((74_818, 2_548, 2_717), (5.75, 0.25, 0.25), (4_124.25, 195.75, 86.75), (459, 7, 5)),
    (8, 1): ((64_053, 2_226, 2_297), (5.75, 0.25, 0.25), (4_513.25, 230.75, 113.75), (225, 1, -3)),
    (8, 2): ((64_006, 2_222, 2_297), (5.75, 0.25, 0.25), (4_395.25, 221.75, 124.75), (225, 1, -3)),
    (8, 3): ((60_362, 2_077, 2_173), (3_597.25, 189, 81), (6_351.25, 316, 198), (830, 19, 22)),
}


ROWS = tuple(rows([], FIGURES))


@VERSIONS
@pytest.mark.parametrize(("world", "stage"), ROWS)
def test_a_step_runs_at_most_so_much_python_on_paths_for_devices(world: int, stage: int) -> None:
    above = excess(FIGURES[world, stage], measured(ROWS, devices=True)[world, stage])
    assert not above, "\n".join([f"stage {stage} as the last rank of {world}:", *above])
