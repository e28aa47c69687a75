"""Units that are compiled, by themselves or within the model, and what the compiler has made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from collectives import solo
from collectives.backends.gloo import connect

from ..support.cases import Batch, Case, check_rank, one_backward, plain_loop

BACKEND = "aot_eager"


@contextmanager
def forgotten() -> Iterator[None]:
    """Run the block as if nothing had been compiled before, and leave nothing compiled."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def in_place(model: Any) -> None:
    model.compile(backend=BACKEND)


def blocks_in_place(model: Any, backend: Any = BACKEND) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def compiled_blocks(model: Any, backend: Any = BACKEND) -> None:
    """Store a list of compiled blocks, which changes the names of parameters."""
    model.blocks = nn.ModuleList([torch.compile(block, backend=backend) for block in model.blocks])


def another_shape(model: Any, batch: Batch) -> None:
    """Make the second micro-batch longer, so that there is something to compile while gradients exist."""
    one_backward(model, replace(batch, x=torch.cat([batch.x] * (1 + batch.turn))))


CASES: dict[str, Case] = {
    "block.compile() before": Case(prepared=blocks_in_place),
    "block.compile() after": Case(built=blocks_in_place),
    "block.compile(), another shape": Case(prepared=blocks_in_place, run=another_shape),
    "a list of torch.compile(block)": Case(prepared=compiled_blocks),
    # A model that is compiled as a whole has these bits if units share no tensor; this is not promised.
    "model.compile() after, another shape": Case(built=in_place, run=another_shape),
}


def compiled_training(group: dist.ProcessGroup | None, rank: int, name: str) -> list[int]:
    """Return the numbers of graphs compiled so far: at first, at the beginning of each step of this rank, at the end.

    The first number is that before the plain loop. Each rank is a process: if several threads compile at once, torch
    may put off the compilation of some to a later step.
    """
    counts = [counters["stats"]["unique_graphs"]]

    def count(model: Any, step: int) -> None:
        counts.append(counters["stats"]["unique_graphs"])

    with forgotten():
        case = replace(CASES[name], steps=3)
        transport = solo() if group is None else connect(group)
        _, expected = plain_loop(case, transport.world_size)
        check_rank(replace(case, begin=count), transport, expected)
        return [*counts, counters["stats"]["unique_graphs"]]


def assert_compiled_in_the_first_step_alone(counts: list[int]) -> None:
    before, _, after_first, *later = counts
    assert before < after_first
    assert later == [after_first, after_first]


class Recorder:
    """A backend that compiles nothing and keeps the source of each graph."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self._before = counters["frames"]["total"]

    def frames(self) -> int:
        """The number of functions that Dynamo tried to trace."""
        return counters["frames"]["total"] - self._before

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph.code)
        return graph.forward


def recorded(train: Callable[[Recorder], Any]) -> tuple[Recorder, int]:
    """Return what was compiled in a training, and how many functions were traced, the second time that it runs.

    The first time some functions are marked as not to be traced, for good.
    """
    for _ in range(2):
        with forgotten():
            recorder = Recorder()
            train(recorder)
            frames = recorder.frames()
    return recorder, frames
