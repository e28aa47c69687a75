"""FSDP2's policies and its ``ignored_params`` give here what they give there, where no order of a sum can matter."""

from __future__ import annotations

import pytest

from ...support.plain import assert_same_value
from ...support.pool import GlooPool
from . import fsdp2


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
def test_policies_by_module_train_the_bits_of_fsdp2(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    """Two contributions have one sum, and half of it is exact."""
    expected = gloo.run(fsdp2.under_fsdp2, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(fsdp2.under_zero, stage, ranks=ranks), expected, f"stage {stage}")


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
def test_what_both_ignore_trains_beside_them_to_the_same_bits(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    expected = gloo.run(fsdp2.experts_under_fsdp2, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(fsdp2.experts_under_zero, stage, ranks=ranks), expected, f"stage {stage}")
