"""Blocks of zero/recipes run as they stand, and train to the bits of the plain loop; `tests/ci` runs the others."""

from __future__ import annotations

import re

import pytest

from ..files import TESTS
from ..support.loops import BLOCKS
from ..support.pool import GlooPool
from ..support.rows import rows
from .recipes import EXAMPLES, ON_MESHES, assert_trains_as_plain


def test_every_block_of_the_recipes_is_run() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("*.py"))
    run = re.findall(r'(?:code_of\(|BLOCKS\[|BLOCK = )"([^"]+)"', sources)
    assert EXAMPLES.keys() <= BLOCKS.keys() <= {*EXAMPLES, *ON_MESHES, *run}


@pytest.mark.parametrize("heading", rows(["fp32"], ["Uneven data"]))
def test_a_block_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, heading: str) -> None:
    assert_trains_as_plain(gloo, heading)
