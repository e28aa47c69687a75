"""Compiled models at stage 3: the bits of the same compiled plain loop, and nothing is compiled again after a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from collectives import solo
from collectives.native import connect

from .cases import Batch, Case, check_rank, one_backward, plain_loop
from .pool import GlooPool

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


def compiled_training(group: dist.ProcessGroup | None, rank: int, name: str) -> list[int]:
    """The graphs that were compiled before the plain loop, when each step of this rank began, and at the end. A process
    for each rank: of threads that compile at once, torch lets some wait for a later step."""
    counts = [counters["stats"]["unique_graphs"]]

    def count(model: Any, step: int) -> None:
        counts.append(counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    try:
        case = replace(CASES[name], steps=3)
        transport = solo() if group is None else connect(group)
        _, expected = plain_loop(case, transport.world_size)
        check_rank(replace(case, begin=count), transport, expected)
        return [*counts, counters["stats"]["unique_graphs"]]
    finally:
        torch._dynamo.reset()


def assert_compiled_in_the_first_step_alone(counts: list[int]) -> None:
    before, _, after_first, *later = counts
    assert before < after_first
    assert later == [after_first, after_first]


@pytest.mark.parametrize("name", CASES)
def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once(name: str) -> None:
    assert_compiled_in_the_first_step_alone(compiled_training(None, 0, name))


@pytest.mark.parametrize("name", CASES)
def test_the_same_on_two_ranks(gloo: GlooPool, name: str) -> None:
    for counts in gloo.run(compiled_training, name, ranks=(0, 1), limit=120):
        assert_compiled_in_the_first_step_alone(counts)
