"""Blocks of zero/recipes run as they stand, and train to the bits of the plain loop; `tests/ci` runs the others."""

from __future__ import annotations

import pytest

from ..support.loops import BLOCKS, ECOSYSTEM
from ..support.pool import GlooPool
from ..support.rows import rows
from .recipes import EXAMPLES, OTHERS, assert_trains_as_plain


def test_every_block_of_the_guide_is_run() -> None:
    assert set(BLOCKS) == {*EXAMPLES, *OTHERS, *ECOSYSTEM}


@pytest.mark.parametrize("heading", rows(["fp32"], ["Uneven data"]))
def test_a_block_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, heading: str) -> None:
    assert_trains_as_plain(gloo, heading)
