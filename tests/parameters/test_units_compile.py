"""Units that are compiled by themselves have the plain loop's graphs; a warning tells of broken ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from collectives import solo

from ..support.cases import INPUTS, WIDTH, Case, sharded
from .compiled import forgotten


@forgotten()
def test_a_graph_that_is_broken_at_units_is_said_once() -> None:
    model, optimizer = sharded(Case(), solo())
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


@forgotten()
def test_a_unit_that_is_compiled_later_and_called_by_itself_is_not_said_to_be_broken() -> None:
    """Its first call begins before the hooks are around it: they interrupt it, but lie before and behind its graph."""
    model, optimizer = sharded(Case(), solo())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model.blocks[0].compile(backend="eager")
            for _ in range(2):
                model.blocks[0](torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [str(each.message) for each in said] == []
    optimizer.close()


@forgotten()
def test_a_compiled_unit_with_a_hook_of_the_user_has_a_whole_graph() -> None:
    def prepared(model: Any) -> None:
        model.blocks[0].register_forward_pre_hook(lambda *_: None)
        model.blocks[0].compile(backend="eager")

    model, optimizer = sharded(Case(prepared=prepared), solo())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.blocks[0](torch.ones(2, WIDTH))
    optimizer.close()
