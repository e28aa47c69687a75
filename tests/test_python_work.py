"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((10_578, 544, 292), (5.75, 0.25, 0.25), (4_676.25, 224.75, 123.75), (191, 4, -1)),
    (1, 1): ((9_066, 455, 259), (5.75, 0.25, 0.25), (4_283.25, 213.75, 108.75), (71, 1, -4)),
    (1, 2): ((9_072, 455, 260), (5.75, 0.25, 0.25), (3_822.25, 185.75, 108.75), (71, 1, -4)),
    (1, 3): ((10_826, 553, 301), (1_972.75, 101.25, 42.25), (4_363.25, 208.75, 116.75), (132, 1, -4)),
    (8, 0): ((54_737, 2_021, 2_022), (5.75, 0.25, 0.25), (4_565.25, 219.75, 117.75), (191, 4, -1)),
    (8, 1): ((44_237, 1_623, 1_612), (5.75, 0.25, 0.25), (4_768.25, 243.75, 117.75), (62, 1, -4)),
    (8, 2): ((44_253, 1_623, 1_613), (5.75, 0.25, 0.25), (4_402.25, 217.75, 120.75), (62, 1, -4)),
    (8, 3): ((44_867, 1_675, 1_631), (3_503.75, 191.75, 75.75), (6_001.75, 277.25, 173.25), (463, 11, 10)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((11_831, 626, 355), (161, 2, 7.25), (4_005.25, 184.75, 91.75), (267.3125, 7.0625, 2.5)),
    (1, 1): ((10_284, 534, 320), (161, 2, 7.25), (3_398.25, 160.75, 77.75), (72.3125, 1.0625, -3.5)),
    (1, 2): ((10_290, 534, 321), (161, 2, 7.25), (2_939.25, 132.75, 77.75), (72.3125, 1.0625, -3.5)),
    (1, 3): ((12_044, 632, 362), (2_128, 103, 49.25), (3_480.25, 155.75, 85.75), (133.3125, 1.0625, -3.5)),
    (8, 0): ((56_261, 2_114, 2_096), (5.75, 0.25, 0.25), (3_911.25, 174.75, 93.75), (266, 7, 2)),
    (8, 1): ((48_759, 1_888, 1_787), (5.75, 0.25, 0.25), (3_904.25, 190.75, 86.75), (62, 1, -4)),
    (8, 2): ((48_714, 1_888, 1_786), (5.75, 0.25, 0.25), (3_839.25, 181.75, 98.75), (62, 1, -4)),
    (8, 3): ((46_269, 1_759, 1_707), (3_503.75, 191.75, 75.75), (5_556.75, 245.25, 159.25), (463, 11, 10)),
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
