"""Stage 3 trains whatever torch trains, used in whatever way: the plain loop's bits, and nothing left gathered."""

from __future__ import annotations

import pytest

from ..support.rows import only
from .unit_cases import BY_DEFAULT, CASES
from .worlds import check_in

FIRST = (
    ("plain", "one"),
    ("inside gathered()", "common"),
    ("ties", "common"),
    ("interrupt in a forward", "one"),
    ("outputs are a dict", "one"),
)


@pytest.mark.parametrize(("name", "world"), only(BY_DEFAULT, *FIRST))
def test_training_has_the_plain_loops_bits_and_leaves_nothing_gathered(name: str, world: str) -> None:
    check_in(world, CASES[name])
