"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

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
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((17_090, 700, 457), (161, 2, 7.25), (4_730.25, 232.75, 95.75), (502.3125, 7.0625, 7.5)),
    (1, 1): ((18_948, 794, 548), (161, 2, 7.25), (5_074.25, 263.75, 127.75), (277.3125, 1.0625, -0.5)),
    (1, 2): ((18_954, 794, 549), (161, 2, 7.25), (4_615.25, 235.75, 127.75), (277.3125, 1.0625, -0.5)),
    (1, 3): ((16_581, 702, 453), (2_114, 105, 48.25), (4_324.25, 215.75, 123.75), (394.3125, 1.0625, 3.5)),
    (8, 0): ((74_818, 2_548, 2_717), (5.75, 0.25, 0.25), (4_124.25, 195.75, 86.75), (459, 7, 5)),
    (8, 1): ((64_053, 2_226, 2_297), (5.75, 0.25, 0.25), (4_513.25, 230.75, 113.75), (225, 1, -3)),
    (8, 2): ((64_006, 2_222, 2_297), (5.75, 0.25, 0.25), (4_395.25, 221.75, 124.75), (225, 1, -3)),
    (8, 3): ((60_362, 2_077, 2_173), (3_597.25, 189, 81), (6_351.25, 316, 198), (830, 19, 22)),
}
HERE, THERE = tuple(FIGURES), tuple(ON_DEVICES)


@pytest.mark.first(0)
@VERSIONS
@pytest.mark.parametrize(
    ("row", "devices"), [*((row, False) for row in HERE), *((row, True) for row in THERE)], ids=str
)
def test_a_step_runs_at_most_so_much_python_beyond_the_plain_loop(row: tuple[int, int], devices: bool) -> None:
    figures, table = (ON_DEVICES, THERE) if devices else (FIGURES, HERE)
    above = excess(figures[row], measured(table, devices=devices)[row])
    assert not above, "\n".join([f"stage {row[1]} as the last rank of {row[0]}, devices: {devices}", *above])
