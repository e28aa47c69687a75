"""FSDP2's policies and its ``ignored_params`` give here what they give there, where no order of a sum can matter."""

from __future__ import annotations

from typing import Any

import pytest

from ...support.plain import assert_same_value
from ...support.pool import GlooPool
from . import fsdp2


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(fsdp2.under_fsdp2, fsdp2.under_zero), (fsdp2.experts_under_fsdp2, fsdp2.experts_under_zero)],
    ids=["policies by module", "what both ignore"],
)
def test_training_has_the_bits_of_fsdp2(gloo: GlooPool, theirs: Any, ours: Any, ranks: tuple[int, ...]) -> None:
    """Two contributions have one sum, and half of it is exact."""
    expected = gloo.run(theirs, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(ours, stage, ranks=ranks), expected, f"stage {stage}")
