"""A compiled step has the bits of the eager one; `ci/contract/test_compiled_steps` has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero import ZeroOptimizer

from ..support.models import build, odd_batches, odd_loss
from ..support.plain import assert_same_model
from ..support.rows import rows


def trained(stage: int, *, compiled: bool) -> nn.Module:
    model = build()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for batch in odd_batches(3):
        odd_loss(model, batch).backward()
        step()
        optimizer.zero_grad()
    optimizer.close()
    return model


@pytest.mark.parametrize("stage", rows([3], [0]))
def test_a_compiled_step_has_the_bits_of_the_eager_one(stage: int) -> None:
    assert_same_model(trained(stage, compiled=True), trained(stage, compiled=False))
