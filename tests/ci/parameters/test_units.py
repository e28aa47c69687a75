"""Each use of each model at stage 3 has the plain loop's bits on one rank, sent between three, in common memory."""

from __future__ import annotations

import pytest

from ...parameters.stage3 import check_in
from ...parameters.unit_cases import CASES, FIRST, FURTHER, ROWS


@pytest.mark.parametrize(("name", "world"), [row for row in ROWS if row not in (*FIRST, *FURTHER)])
def test_training_has_the_plain_loops_bits_and_leaves_nothing_gathered(name: str, world: str) -> None:
    check_in(world, CASES[name])
