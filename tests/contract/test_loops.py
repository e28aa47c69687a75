"""Blocks of zero/recipes run as they stand, and train to the bits of the plain loop; `tests/ci` runs the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.loops import BLOCKS, ECOSYSTEM, PlainLoop
from ..support.plain import assert_same_model
from ..support.pool import GlooPool
from ..support.rows import rows
from .recipes import EXAMPLES, OTHERS, WORLD_SIZE, assert_same_dict, assert_trains_as_plain, run_block

pytestmark = pytest.mark.contract


def test_every_block_of_the_guide_is_run() -> None:
    assert set(BLOCKS) == {*EXAMPLES, *OTHERS, *ECOSYSTEM}


@pytest.mark.parametrize("heading", rows(["fp32"], ["Uneven data"]))
def test_a_block_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, heading: str) -> None:
    assert_trains_as_plain(gloo, heading)


def test_batch_norm_has_the_plain_loops_parameters_and_rank_0s_statistics_everywhere(gloo: GlooPool) -> None:
    example = EXAMPLES["Batch norm"]
    expected = example.expected()
    batches = example.loader(example.count)
    alone, statistics = example.model(), example.model()

    def keep_rank_0s(model: nn.Module, batch: Any) -> Tensor:
        """Make the running statistics of a plain loop use only every second micro-batch."""
        kept = [buffer.clone() for buffer in model.buffers()]
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if next(number for number, known in enumerate(batches) if known is batch) % WORLD_SIZE:
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.data.copy_(value)  # past the version counter: the backward has read what it needs
        return loss

    PlainLoop(keep_rank_0s).run(statistics, batches)
    assert_same_model(statistics, expected)
    assert not torch.equal(statistics.state_dict()["1.running_mean"], alone.state_dict()["1.running_mean"])
    for by_stage in gloo.run(run_block, "Batch norm"):
        for state, _ in by_stage:
            assert_same_dict(state, statistics.state_dict())
