"""What cannot be is refused by name, and ranks that differ are named on every rank; the model stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from collectives import Transport, solo
from zero import ZeroOptimizer

from ..dials import ASKED
from ..dials.record import Differs, Refused
from ..support.errors import assert_in_order, error_of, errors_on, is_plain
from ..support.plain import assert_same_value


def shown(arguments: Mapping[str, Any]) -> str:
    """Return arguments as the name of a case, which must be the same in every process."""
    return ", ".join(f"{name}={getattr(value, '__name__', repr(value)):.40}" for name, value in arguments.items())


def error_of_building(model: Any, group: Any, arguments: Mapping[str, Any]) -> str:
    """Return the error of a constructor, behind which the model is as it was."""
    is_module = isinstance(model, nn.Module)
    named = model.named_parameters() if is_module else ()
    before = {name: p.detach().clone() for name, p in named if not p.is_meta}
    message = error_of(ZeroOptimizer, model, **{"process_group": group, **arguments})
    if is_module:
        assert is_plain(model)
        after = {name: p.detach() for name, p in model.named_parameters() if name in before}
        assert_same_value(after, before, "after an error")
    return message


REFUSED = [pytest.param(row, id=f"{dial.name}: {shown(row.arguments)}") for dial in ASKED for row in dial.refused]
DIFFERS = [pytest.param(row, id=f"{dial.name}: {shown(row.of_first)}") for dial in ASKED for row in dial.differs]


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_is_refused_by_name(row: Refused) -> None:
    assert_in_order(row.words, error_of_building(row.model(), solo(), row.arguments))


@pytest.mark.law("agreement at construction")
@pytest.mark.law("errors")
@pytest.mark.parametrize("row", DIFFERS)
def test_ranks_that_differ_are_named_on_every_rank(row: Differs) -> None:
    def build(transport: Transport) -> None:
        arguments, model = (
            (row.of_others, row.model_of_others or row.model) if transport.rank else (row.of_first, row.model)
        )
        message = error_of_building(model(), transport, arguments)
        raise ValueError(message)

    messages = errors_on(3, build)
    for message in messages:
        assert_in_order(row.words, message)
        remedies = (
            "Pass the same arguments on every rank",
            "different",
            "the function failed",
            "matches no module",
            "same weights",
        )
        assert any(remedy in message for remedy in remedies)
