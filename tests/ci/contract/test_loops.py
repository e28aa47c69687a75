"""Every block of zero/recipes runs as it stands, and trains to the bits of the plain loop at every stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...contract import recipes
from ...contract.recipes import EXAMPLES, REQUIRED, WORLD_SIZE, assert_same_dict, assert_trains_as_plain, run_block
from ...support.launched import launch
from ...support.loops import Halves, PlainLoop, seeded, two_layers
from ...support.plain import assert_same_bits, assert_same_model, assert_same_states
from ...support.pool import GlooPool

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("heading", [name for name in EXAMPLES if name not in ("Batch norm", "fp32", "Uneven data")])
def test_a_block_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, heading: str) -> None:
    pytest.importorskip(REQUIRED.get(heading, "torch"))
    assert_trains_as_plain(gloo, heading)


def test_training_goes_on_from_what_was_saved_which_is_plain(gloo: GlooPool, tmp_path: Path) -> None:
    example = EXAMPLES["fp32"]
    model, batches = example.model(), example.micro_batches()
    optimizer = example.plain.run(model, batches)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    PlainLoop(optimizer=optimizer).run(model, batches)
    for by_stage in gloo.run(recipes.save_and_load, str(tmp_path / "saved")):
        for saved, state in by_stage:
            assert_same_dict(saved["model"], weights)
            assert_same_states(saved["optimizer"], states)
            assert_same_dict(state, model.state_dict())
    expected = example.model()
    example.plain.run(expected, [*batches, *example.micro_batches(epoch=1)])
    for by_stage in gloo.run(recipes.stop_and_go_on, str(tmp_path / "run")):
        for state in by_stage:
            assert_same_dict(state, expected.state_dict())


def test_blocks_on_meshes_train_the_bits_of_their_plain_loops(tmp_path: Path) -> None:
    """A mesh of two copies; tensor parallelism by hand, which adds parts; a pipeline of two copies, of half batches."""
    batches = EXAMPLES["fp32"].micro_batches()
    halves = [
        (inputs.chunk(2)[half], targets.chunk(2)[half])
        for step in range(0, len(batches), 2)
        for half in range(2)
        for inputs, targets in batches[step : step + 2]
    ]
    parts, copies, pipeline = Halves(seeded(7, two_layers)), EXAMPLES["fp32"].model(), EXAMPLES["fp32"].model()
    PlainLoop().run(parts, batches)
    PlainLoop(together=4).run(copies, batches)
    PlainLoop(together=4).run(pipeline, halves)
    on_meshes = launch(f"{recipes.__name__}:on_meshes", tmp_path, ranks=4)
    for heading, expected in (("A mesh", copies), ("Pipeline parallelism", pipeline)):
        for state in on_meshes[heading]:
            assert_same_dict(state, dict(expected.named_parameters()))
    for state in on_meshes["Tensor parallelism by hand"]:
        assert len(state) == 8
        for name, value in state.items():
            assert_same_bits(value, parts.get_parameter("bias" if name.endswith(".bias") else name), name)


def test_training_goes_to_fsdp2_and_comes_back_with_the_plain_loops_bits(tmp_path: Path) -> None:
    """Two ranks with a micro-batch each: a sum of two terms has one order, and FSDP2's bits are the plain loop's."""
    expected, batches = EXAMPLES["fp32"].model(), EXAMPLES["fp32"].given(12)
    PlainLoop(max_norm=float("inf")).run(expected, batches)
    for state in launch(f"{recipes.__name__}:from_and_to_fsdp2", tmp_path):
        assert_same_dict(state, expected.state_dict())


def test_batch_norm_has_the_plain_loops_parameters_and_rank_0s_statistics_everywhere(gloo: GlooPool) -> None:
    example = EXAMPLES["Batch norm"]
    expected = example.expected()
    batches = example.micro_batches()
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
        for state in by_stage:
            assert_same_dict(state, statistics.state_dict())
