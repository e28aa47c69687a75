"""However units are compiled, on one rank and two, the bits are those of the same compiled plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from collectives import on_threads, solo
from zero import ZeroOptimizer

from ...parameters.compiled import (
    CASES,
    Recorder,
    assert_compiled_in_the_first_step_alone,
    blocks_in_place,
    compiled_blocks,
    compiled_training,
    forgotten,
    recorded,
)
from ...support.cases import (
    INPUTS,
    WIDTH,
    Block,
    Case,
    Net,
    check_rank,
    net_of,
    plain_loop,
)
from ...support.pool import GlooPool


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    with forgotten():
        yield


@pytest.mark.parametrize("name", CASES)
def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once(gloo: GlooPool, name: str) -> None:
    assert_compiled_in_the_first_step_alone(compiled_training(None, 0, name))
    for counts in gloo.run(compiled_training, name, limit=120):
        assert_compiled_in_the_first_step_alone(counts)


# -- the graph of a unit ----------------------------------------------------------------------------------------------


class Hooked(Block):
    """A unit with hooks of the user's, which a compiler traces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * self.inner.weight.sum(),))
        self.register_forward_hook(lambda module, args, output: output + self.outer.bias)


UNITS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], None]]] = {
    "hooked": (Hooked, blocks_in_place),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), compiled_blocks),  # torch compiles no module of its own in place
    "Sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), blocks_in_place),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True),
        compiled_blocks,
    ),
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in UNITS), ("Linear", 2), ("Sequential", 2)])
def test_a_compiled_unit_has_the_graphs_of_the_plain_model(name: str, ranks: int) -> None:
    """Two ranks compile, one after the other; no rank compiles a function of the library."""
    build, compiles = UNITS[name]

    def case(recorder: Recorder) -> Case:
        return Case(net_of(build), prepared=lambda model: compiles(model, recorder))

    def ours(recorder: Recorder) -> None:
        try:
            on_threads(ranks, lambda transport: check_rank(case(recorder), transport, expected), timeout=60)
        except torch._dynamo.exc.TorchDynamoException as error:
            pytest.fail(str(error))

    plain, frames = recorded(lambda recorder: plain_loop(case(recorder), ranks))
    with forgotten():
        _, expected = plain_loop(case(Recorder()), ranks)
    found, ours_frames = recorded(ours)
    assert set(found.graphs) == set(plain.graphs)
    assert ranks > 1 or len(found.graphs) == len(plain.graphs)
    assert ours_frames == frames if ranks == 1 else ours_frames <= ranks * frames


def test_close_gives_back_the_compiled_call() -> None:
    model = Net()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), lr=0.1)
    blocks_in_place(model)
    calls = [block._compiled_call_impl for block in model.blocks]
    model(torch.ones(2, INPUTS)).sum().backward()
    assert [block._compiled_call_impl for block in model.blocks] != calls
    optimizer.close()
    assert [block._compiled_call_impl for block in model.blocks] == calls
