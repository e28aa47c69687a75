"""However units are compiled, on one rank and two, the bits are those of the same compiled plain loop."""

from __future__ import annotations

import pytest
import torch

from collectives import solo

from ...parameters.compiled import CASES, UNITS, blocks_in_place, check_compiled_training, check_graphs, forgotten
from ...support.cases import INPUTS, Case, sharded
from ...support.pool import GlooPool


@pytest.mark.parametrize("name", CASES)
def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once(gloo: GlooPool, name: str) -> None:
    check_compiled_training(None, 0, name)
    gloo.run(check_compiled_training, name, limit=120)


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in UNITS), ("Linear", 2), ("Sequential", 2)])
def test_a_compiled_unit_has_the_graphs_of_the_plain_model(name: str, ranks: int) -> None:
    """Two ranks compile, one after the other; no rank compiles a function of the library."""
    check_graphs(name, ranks)


@forgotten()
def test_close_gives_back_the_compiled_call() -> None:
    model, optimizer = sharded(Case(), solo())
    blocks_in_place(model)
    calls = [block._compiled_call_impl for block in model.blocks]
    model(torch.ones(2, INPUTS)).sum().backward()
    assert [block._compiled_call_impl for block in model.blocks] != calls
    optimizer.close()
    assert [block._compiled_call_impl for block in model.blocks] == calls
