"""At stages 0 to 2 the blocks of a model may be CUDA graphs, captured by `torch.compile(mode="reduce-overhead")`.

Where there is no GPU the blocks are compiled to themselves, which only shows that the test's code works.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from zero import ZeroOptimizer

from ...support.devices import DEVICE, HAS_GPU, deterministic_products
from ...support.plain import assert_same_model

STEPS, WIDTH = 6, 64  # the first ones compile, warm up and capture
STAGES = (0, 1, 2) if HAS_GPU else (2,)
HOW: dict[str, str] = {"mode": "reduce-overhead"} if HAS_GPU else {"backend": "eager"}


class Block(nn.Module):
    """A class of its own: torch leaves an `nn.Sequential` eager that is itself compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    with deterministic_products():
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def train(model: Model, optimizer: Any, batches: Tensor) -> int:
    """Train with compiled blocks. Return how many graphs the last step replayed."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * HAS_GPU
    for block in model.blocks:
        block.compile(**HOW)
    for batch in batches[:-1]:
        step(model, optimizer, batch)
    with torch.profiler.profile(activities=activities) as profile:
        step(model, optimizer, batches[-1])
    return sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")


def step(model: Model, optimizer: Any, batch: Tensor) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_that_are_cuda_graphs_keep_the_bits_of_the_plain_loop_with_the_same_graphs(stage: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, batches = Model().to(DEVICE), torch.randn(STEPS, 8, WIDTH, device=DEVICE)
    plain = copy.deepcopy(model)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2, fused=True)
    replayed = train(model, optimizer, batches)
    assert counters["stats"]["unique_graphs"] > 0, "a block was compiled"
    optimizer.close()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    assert_same_model(model, plain)
    assert replayed == expected
    assert (replayed > 0) is HAS_GPU
