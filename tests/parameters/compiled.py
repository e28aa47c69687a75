"""Units that are compiled, by themselves or within the model, and what the compiler has made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from collectives import on_threads, solo
from collectives.backends.gloo import connect

from ..support.cases import WIDTH, Batch, Block, Case, check_rank, net_of, one_backward, plain_loop

BACKEND = "aot_eager"


@contextmanager
def forgotten() -> Iterator[None]:
    """Run the block, or the function, as if nothing had been compiled before, and leave nothing compiled."""
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


def check_compiled_training(group: dist.ProcessGroup | None, rank: int, name: str) -> None:
    """Compare a case with its plain loop; assert that the first step alone compiles something.

    Each rank is a process: if several threads compile at once, torch may put off the compilation of some to a later
    step.
    """
    counts = []

    def count(*_: Any) -> None:
        counts.append(counters["stats"]["unique_graphs"])

    with forgotten():
        case, transport = replace(CASES[name], steps=3), solo() if group is None else connect(group)
        count()
        _, expected = plain_loop(case, transport.world_size)
        check_rank(replace(case, begin=count), transport, expected)
        count()
    before, _, after_first, *later = counts
    assert before < after_first
    assert later == [after_first, after_first]


# -- the graph of a unit ----------------------------------------------------------------------------------------------


UNITS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], None]]] = {
    "Block": (Block, blocks_in_place),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), compiled_blocks),  # in place torch compiles no module of its own
    "Sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), compiled_blocks),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True),
        compiled_blocks,
    ),
}


def recorded(train: Callable[[Callable[..., Any]], Any]) -> tuple[list[str], int]:
    """Train with a backend that compiles nothing. Return the source of its graphs, and how many functions were traced.

    Both are those of the second time: the first time some functions are marked as not to be traced, for good.
    """
    for _ in range(2):
        graphs, before = list[str](), counters["frames"]["total"]

        def backend(graph: torch.fx.GraphModule, _: Any, graphs: list[str] = graphs) -> Any:
            graphs.append(graph.code)
            return graph.forward

        with forgotten():
            train(backend)
            frames = counters["frames"]["total"] - before
    return graphs, frames


def check_graphs(name: str, ranks: int) -> None:
    """Assert that a unit has the graphs of the plain model, and that no function of the library is traced."""
    build, compiles = UNITS[name]

    def case(backend: Any) -> Case:
        return Case(net_of(build), prepared=lambda model: compiles(model, backend))

    def ours(backend: Any) -> None:
        try:
            on_threads(ranks, lambda transport: check_rank(case(backend), transport, expected), timeout=60)
        except torch._dynamo.exc.TorchDynamoException as error:
            pytest.fail(str(error))

    plain, frames = recorded(lambda backend: plain_loop(case(backend), ranks))
    with forgotten():
        _, expected = plain_loop(case("eager"), ranks)
    found, our_frames = recorded(ours)
    assert set(found) == set(plain) != set()
    assert ranks > 1 or len(found) == len(plain)
    assert our_frames == frames if ranks == 1 else our_frames <= ranks * frames
