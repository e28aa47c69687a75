"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((10_603, 546, 293), (7.5, 0.25, 0.25), (4_686.5, 224.75, 124.75), (185, 4, -2)),
    (1, 1): ((9_091, 457, 260), (7.5, 0.25, 0.25), (4_293.5, 213.75, 109.75), (65, 1, -5)),
    (1, 2): ((9_097, 457, 261), (7.5, 0.25, 0.25), (3_832.5, 185.75, 109.75), (65, 1, -5)),
    (1, 3): ((10_851, 555, 302), (1_974.5, 101.25, 42.25), (4_373.5, 208.75, 117.75), (126, 1, -5)),
    (8, 0): ((54_930, 2_023, 2_023), (7.5, 0.25, 0.25), (4_575.5, 219.75, 118.75), (185, 4, -2)),
    (8, 1): ((44_388, 1_625, 1_613), (7.5, 0.25, 0.25), (4_778.5, 243.75, 118.75), (56, 1, -5)),
    (8, 2): ((44_404, 1_625, 1_614), (7.5, 0.25, 0.25), (4_423.5, 219.75, 121.75), (56, 1, -5)),
    (8, 3): ((45_003, 1_674, 1_632), (3_496.25, 189.25, 75.75), (6_058.25, 286.75, 174.25), (457, 11, 9)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((11_856, 628, 356), (162.75, 2, 7.25), (4_015.5, 184.75, 92.75), (261.3125, 7.0625, 1.5)),
    (1, 1): ((10_309, 536, 321), (162.75, 2, 7.25), (3_408.5, 160.75, 78.75), (66.3125, 1.0625, -4.5)),
    (1, 2): ((10_315, 536, 322), (162.75, 2, 7.25), (2_949.5, 132.75, 78.75), (66.3125, 1.0625, -4.5)),
    (1, 3): ((12_069, 634, 363), (2_129.75, 103, 49.25), (3_490.5, 155.75, 86.75), (127.3125, 1.0625, -4.5)),
    (8, 0): ((56_454, 2_116, 2_097), (7.5, 0.25, 0.25), (3_921.5, 174.75, 94.75), (260, 7, 1)),
    (8, 1): ((48_910, 1_890, 1_788), (7.5, 0.25, 0.25), (3_914.5, 190.75, 87.75), (56, 1, -5)),
    (8, 2): ((48_884, 1_889, 1_788), (7.5, 0.25, 0.25), (3_845.5, 184.75, 99.75), (56, 1, -5)),
    (8, 3): ((46_424, 1_757, 1_709), (3_496.25, 189.25, 75.75), (5_598.25, 255.75, 160.25), (457, 11, 9)),
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
