"""Units that are compiled by themselves have the plain loop's graphs and bits; a warning tells of broken ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from collectives import solo
from zero import ZeroOptimizer

from ..support.cases import INPUTS, Case, Net, check_rank, plain_loop
from .compiled import (
    Recorder,
    assert_compiled_in_the_first_step_alone,
    blocks_in_place,
    compiled_training,
    forgotten,
    recorded,
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    with forgotten():
        yield


def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once() -> None:
    assert_compiled_in_the_first_step_alone(compiled_training(None, 0, "block.compile() before"))


def test_a_compiled_unit_has_the_graphs_of_the_plain_model() -> None:
    """No function of the library is traced."""

    def case(recorder: Recorder) -> Case:
        return Case(prepared=lambda model: blocks_in_place(model, recorder))

    _, expected = plain_loop(Case(), 1)
    plain, frames = recorded(lambda recorder: plain_loop(case(recorder), 1))
    ours, ours_frames = recorded(lambda recorder: check_rank(case(recorder), solo(), expected))
    assert ours.graphs == plain.graphs != []
    assert ours_frames == frames


def test_a_graph_that_is_broken_at_units_is_said_once() -> None:
    model = Net()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), lr=0.1)
    model.compile(backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, INPUTS)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(each.message) for each in said]
    assert len([text for text in texts if "stage 3: the graph of a compiled call is broken at" in text]) == 1
    assert not any("does not know how to trace" in text for text in texts)
