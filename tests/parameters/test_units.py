"""Stage 3 trains whatever torch trains, used in whatever way: the plain loop's bits, and nothing left gathered."""

from __future__ import annotations

import pytest

from .unit_cases import BY_DEFAULT, CASES
from .worlds import check_in


@pytest.mark.parametrize(("name", "world"), BY_DEFAULT)
def test_training_has_the_plain_loops_bits_and_leaves_nothing_gathered(name: str, world: str) -> None:
    check_in(world, CASES[name])
