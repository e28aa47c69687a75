"""What is gathered and in flight at most is the sum counted by hand, whatever stays gathered for the backward."""

from __future__ import annotations

import pytest

from zero.core.buckets import build
from zero.core.formulas import peak_bounds
from zero.core.stage import stage_of

from .drawn import spec

UNITS = {0: 16, 1: 32, 2: 64, 3: 128}  # elements of each unit: one parameter, whose slot needs no padding
BYTES = 4


@pytest.mark.parametrize(
    ("stays", "kept"),
    [(None, 0), (4, 0), (2, sum(UNITS.values()) // 2), (1, 32)],
    ids=["nothing", "this rank's shard", "half", "all"],
)
def test_at_most_the_root_two_units_and_what_stays_for_the_backward_are_gathered(stays: int | None, kept: int) -> None:
    """Of four ranks. If all stays, every unit is there at once: the two largest, and the smallest as well."""
    layout = build([spec(f"unit {n}", (numel,), unit=n) for n, numel in UNITS.items()], 4, 10**6)
    found = peak_bounds(layout, stage_of(3), None, stays)
    assert found["gathered_peak"] == BYTES * (16 + 64 + 128 + kept)
    assert found["scratch_peak"] == 3 * BYTES * 128
    exposed = peak_bounds(layout, stage_of(3), None, stays, shards_are_exposed=True)
    assert exposed["scratch_peak"] - found["scratch_peak"] == BYTES * (16 + 64 + 128) // 4
    assert peak_bounds(layout, stage_of(2), None, stays)["gathered_peak"] == 0
