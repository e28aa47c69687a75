"""A step of `zero` runs no more Python beyond the plain loop than a table says, by step, unit, bucket and parameter."""

from __future__ import annotations

import pytest

from .python_work import VERSIONS, excess, measured

FIGURES = {  # by ranks and stage: (bytecodes, Python calls, C calls) of a step, a unit, a bucket and a parameter
    (1, 0): ((12_072, 590, 312), (5.75, 0.25, 0.25), (5_326.25, 270.75, 126.75), (395, 4, 2)),
    (1, 1): ((10_482, 496, 277), (5.75, 0.25, 0.25), (5_929.25, 318.75, 157.75), (273, 1, -1)),
    (1, 2): ((10_488, 496, 278), (5.75, 0.25, 0.25), (5_468.25, 290.75, 157.75), (273, 1, -1)),
    (1, 3): ((12_311, 594, 322), (1_934.75, 100.25, 41.25), (5_156.25, 269.75, 153.75), (390, 1, 3)),
    (8, 0): ((60_754, 2_300, 2_091), (5.75, 0.25, 0.25), (4_740.25, 238.75, 109.75), (353, 4, 0)),
    (8, 1): ((49_077, 1_841, 1_668), (5.75, 0.25, 0.25), (5_347.25, 285.75, 143.75), (222, 1, -3)),
    (8, 2): ((49_093, 1_841, 1_669), (5.75, 0.25, 0.25), (5_097.25, 266.75, 149.75), (222, 1, -3)),
    (8, 3): ((49_682, 1_889, 1_686), (3_375.75, 182.5, 69), (6_819.75, 345.5, 215), (827, 19, 22)),
}
ON_DEVICES = {  # likewise, on the paths for devices
    (1, 0): ((13_325, 672, 375), (161, 2, 7.25), (4_710.25, 235.75, 94.75), (499.3125, 7.0625, 7.5)),
    (1, 1): ((14_808, 758, 437), (161, 2, 7.25), (5_044.25, 265.75, 126.75), (274.3125, 1.0625, -0.5)),
    (1, 2): ((14_814, 758, 438), (161, 2, 7.25), (4_585.25, 237.75, 126.75), (274.3125, 1.0625, -0.5)),
    (1, 3): ((13_529, 673, 383), (2_090, 102, 48.25), (4_273.25, 216.75, 122.75), (391.3125, 1.0625, 3.5)),
    (8, 0): ((62_278, 2_393, 2_165), (5.75, 0.25, 0.25), (4_141.25, 198.75, 85.75), (456, 7, 5)),
    (8, 1): ((53_599, 2_106, 1_843), (5.75, 0.25, 0.25), (4_483.25, 232.75, 112.75), (222, 1, -3)),
    (8, 2): ((53_557, 2_103, 1_843), (5.75, 0.25, 0.25), (4_360.25, 221.75, 123.75), (222, 1, -3)),
    (8, 3): ((51_087, 1_970, 1_763), (3_375.75, 182.5, 69), (6_200.75, 304.5, 197), (827, 19, 22)),
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
