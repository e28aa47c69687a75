"""FSDP2's policies give here what they give there, where no order of a sum can matter."""

from __future__ import annotations

import pytest

from ...support.plain import assert_same_value
from ...support.pool import GlooPool
from .fsdp2 import under_fsdp2, under_zero


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
def test_policies_by_module_train_the_bits_of_fsdp2(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    """Two contributions have one sum, and half of it is exact."""
    expected = gloo.run(under_fsdp2, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(under_zero, stage, ranks=ranks), expected, f"stage {stage}")
