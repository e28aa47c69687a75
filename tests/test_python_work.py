"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((12_076, 590, 312), (5.75, 0.25, 0.25), (5_326.25, 270.75, 126.75), (395, 4, 2)),
    (1, 1): ((10_486, 496, 277), (5.75, 0.25, 0.25), (5_929.25, 318.75, 157.75), (273, 1, -1)),
    (1, 2): ((10_492, 496, 278), (5.75, 0.25, 0.25), (5_468.25, 290.75, 157.75), (273, 1, -1)),
    (1, 3): ((12_316, 594, 322), (1_937.75, 100.25, 41.25), (5_156.25, 269.75, 153.75), (390, 1, 3)),
    (8, 0): ((60_758, 2_300, 2_091), (5.75, 0.25, 0.25), (4_740.25, 238.75, 109.75), (353, 4, 0)),
    (8, 1): ((49_081, 1_841, 1_668), (5.75, 0.25, 0.25), (5_347.25, 285.75, 143.75), (222, 1, -3)),
    (8, 2): ((49_097, 1_841, 1_669), (5.75, 0.25, 0.25), (5_094.25, 265.75, 149.75), (222, 1, -3)),
    (8, 3): ((49_692, 1_891, 1_686), (3_400.25, 189, 69), (6_785.25, 334, 215), (827, 19, 22)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((13_329, 672, 375), (161, 2, 7.25), (4_710.25, 235.75, 94.75), (499.3125, 7.0625, 7.5)),
    (1, 1): ((14_812, 758, 437), (161, 2, 7.25), (5_044.25, 265.75, 126.75), (274.3125, 1.0625, -0.5)),
    (1, 2): ((14_818, 758, 438), (161, 2, 7.25), (4_585.25, 237.75, 126.75), (274.3125, 1.0625, -0.5)),
    (1, 3): ((13_534, 673, 383), (2_093, 102, 48.25), (4_273.25, 216.75, 122.75), (391.3125, 1.0625, 3.5)),
    (8, 0): ((62_282, 2_393, 2_165), (5.75, 0.25, 0.25), (4_141.25, 198.75, 85.75), (456, 7, 5)),
    (8, 1): ((53_603, 2_106, 1_843), (5.75, 0.25, 0.25), (4_483.25, 232.75, 112.75), (222, 1, -3)),
    (8, 2): ((53_573, 2_105, 1_843), (5.75, 0.25, 0.25), (4_357.25, 220.75, 123.75), (222, 1, -3)),
    (8, 3): ((51_109, 1_974, 1_763), (3_400.25, 189, 69), (6_166.25, 293, 197), (827, 19, 22)),
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
