"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((15_205, 593, 370), (5.75, 0.25, 0.25), (5_727.25, 272.75, 138.75), (395, 4, 2)),
    (1, 1): ((12_888, 499, 323), (5.75, 0.25, 0.25), (6_330.25, 320.75, 169.75), (273, 1, -1)),
    (1, 2): ((12_894, 499, 324), (5.75, 0.25, 0.25), (5_869.25, 292.75, 169.75), (273, 1, -1)),
    (1, 3): ((14_725, 598, 368), (1_958.75, 103.25, 41.25), (5_557.25, 271.75, 165.75), (390, 1, 3)),
    (8, 0): ((72_749, 2_429, 2_618), (5.75, 0.25, 0.25), (5_141.25, 240.75, 121.75), (353, 4, 0)),
    (8, 1): ((57_902, 1_928, 2_057), (5.75, 0.25, 0.25), (5_748.25, 287.75, 155.75), (222, 1, -3)),
    (8, 2): ((57_974, 1_934, 2_060), (5.75, 0.25, 0.25), (5_523.25, 271.75, 161.75), (222, 1, -3)),
    (8, 3): ((58_485, 1_978, 2_074), (3_597.25, 189, 81), (7_340.25, 361, 227), (827, 19, 22)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((16_814, 677, 446), (161, 2, 7.25), (4_755.25, 235.75, 93.75), (499.3125, 7.0625, 7.5)),
    (1, 1): ((18_638, 769, 535), (161, 2, 7.25), (5_089.25, 265.75, 125.75), (274.3125, 1.0625, -0.5)),
    (1, 2): ((18_644, 769, 536), (161, 2, 7.25), (4_630.25, 237.75, 125.75), (274.3125, 1.0625, -0.5)),
    (1, 3): ((16_299, 679, 442), (2_114, 105, 48.25), (4_318.25, 216.75, 121.75), (391.3125, 1.0625, 3.5)),
    (8, 0): ((74_629, 2_524, 2_705), (5.75, 0.25, 0.25), (4_186.25, 198.75, 84.75), (456, 7, 5)),
    (8, 1): ((63_848, 2_201, 2_284), (5.75, 0.25, 0.25), (4_528.25, 232.75, 111.75), (222, 1, -3)),
    (8, 2): ((63_801, 2_197, 2_284), (5.75, 0.25, 0.25), (4_410.25, 223.75, 122.75), (222, 1, -3)),
    (8, 3): ((60_185, 2_054, 2_162), (3_597.25, 189, 81), (6_345.25, 317, 196), (827, 19, 22)),
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
