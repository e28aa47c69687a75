"""Compiled models at stage 3: the bits of the same compiled plain loop, and nothing is compiled again after a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from .cases import Batch, Case, check, one_backward

BACKEND = "aot_eager"


def in_place(model: Any) -> None:
    model.compile(backend=BACKEND)


def blocks_in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)


def compiled_blocks(model: Any) -> None:
    """A list of compiled blocks; parameters get other names by that."""
    made: list[Any] = [torch.compile(block, backend=BACKEND) for block in model.blocks]
    model.blocks = nn.ModuleList(made)


def compiled(model: Any) -> None:
    """The compiled model is another module, which is no part of this one."""
    object.__setattr__(model, "fast", torch.compile(model, backend=BACKEND))


def run_compiled(model: Any, batch: Batch) -> None:
    model.fast(batch.x).square().mean().backward()


def another_shape(model: Any, batch: Batch) -> None:
    """The second micro-batch is longer, so that there is something to compile while gradients are there."""
    one_backward(model, replace(batch, x=torch.cat([batch.x] * (1 + batch.turn))))


CASES: dict[str, Case] = {
    "model.compile() before": Case(prepared=in_place),
    "model.compile() after": Case(built=in_place),
    "model.compile(), another shape": Case(prepared=in_place, run=another_shape),
    "block.compile(), another shape": Case(prepared=blocks_in_place, run=another_shape),
    "torch.compile(model) before": Case(prepared=compiled, run=run_compiled),
    "block.compile() before": Case(prepared=blocks_in_place),
    "block.compile() after": Case(built=blocks_in_place),
    "a list of torch.compile(block)": Case(prepared=compiled_blocks),
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once(name: str, world_size: int) -> None:
    counts: list[tuple[int, int]] = []

    def count(model: Any, step: int) -> None:
        counts.append((step, counters["stats"]["unique_graphs"]))

    case = replace(CASES[name], begin=count, steps=3)
    before = counters["stats"]["unique_graphs"]
    check(case, world_size)
    after = counters["stats"]["unique_graphs"]
    assert after > before
    begun = [[number for at, number in counts[case.steps :] if at == step] for step in range(case.steps)]
    assert begun[2] == [after] * world_size
    # Of ranks that are threads, and compile at once, one has been seen to do so a step late: a rank alone never may,
    # nor all of them.
    assert len(begun[1]) == world_size
    assert all(after - number < world_size for number in begun[1])
