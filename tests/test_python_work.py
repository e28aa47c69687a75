"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((15_206, 594, 371), (0, 0, 0), (5_685, 271, 139), (405, 4, 2)),
    (1, 1): ((12_906, 501, 325), (0, 0, 0), (6_275, 318, 169), (283, 1, -1)),
    (1, 2): ((12_912, 501, 326), (0, 0, 0), (5_814, 290, 169), (283, 1, -1)),
    (1, 3): ((14_726, 599, 369), (1_953, 103, 41), (5_512, 270, 165), (400, 1, 3)),
    (8, 0): ((72_750, 2_430, 2_619), (0, 0, 0), (5_095, 239, 121), (363, 4, 0)),
    (8, 1): ((57_920, 1_930, 2_059), (0, 0, 0), (5_693, 285, 155), (232, 1, -3)),
    (8, 2): ((57_992, 1_936, 2_062), (0, 0, 0), (5_468, 269, 161), (232, 1, -3)),
    (8, 3): ((58_486, 1_979, 2_075), (3_591.5, 188.75, 80.75), (7_295, 359.25, 226.25), (837, 19, 22)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((16_833, 678, 447), (161, 2, 7.25), (4_748.25, 234.75, 94.75), (502.3125, 7.0625, 7.5)),
    (1, 1): ((18_674, 771, 537), (161, 2, 7.25), (5_069.25, 263.75, 125.75), (277.3125, 1.0625, -0.5)),
    (1, 2): ((18_680, 771, 538), (161, 2, 7.25), (4_610.25, 235.75, 125.75), (277.3125, 1.0625, -0.5)),
    (1, 3): ((16_318, 680, 443), (2_114, 105, 48.25), (4_308.25, 215.75, 121.75), (394.3125, 1.0625, 3.5)),
    (8, 0): ((74_660, 2_526, 2_707), (5.75, 0.25, 0.25), (4_163.25, 196.75, 84.75), (459, 7, 5)),
    (8, 1): ((63_884, 2_203, 2_286), (5.75, 0.25, 0.25), (4_508.25, 230.75, 111.75), (225, 1, -3)),
    (8, 2): ((63_837, 2_199, 2_286), (5.75, 0.25, 0.25), (4_390.25, 221.75, 122.75), (225, 1, -3)),
    (8, 3): ((60_204, 2_055, 2_163), (3_597.25, 189, 81), (6_335.25, 316, 196), (830, 19, 22)),
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
