"""Views train if they share no element, and gaps are told.

That what shares an element with a parameter that moves is refused is a law: see `tests/dials/models.py`.
"""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero.core.parameter_specs import check_memory_apart

from ..support.errors import errors_on
from ..support.limits import BOUND
from ..support.rows import only
from ..support.small import with_sgd
from .unit_cases import in_one_tensor

STAGES = (0, 1, 2, 3)


def test_sharing_is_exact_for_every_shape_and_stride() -> None:
    draw, memory, found = random.Random(3), torch.arange(400), set()

    def drawn() -> Tensor:
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        return memory.as_strided(sizes, [draw.randint(0, 20) for _ in sizes], draw.randint(0, 60))

    for _ in range(400):
        one, other = drawn(), drawn()
        share = not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())
        found.add(share)
        texts = check_memory_apart([], [("one", one)], [("other", other)])
        assert any("share memory" in text for text in texts) is share
    assert found == {True, False}


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_that_shares_memory_with_what_is_not_trained_is_told_and_trains_on(stage: int) -> None:
    model: Any = nn.Linear(4, 4)
    model.kept = nn.Parameter(torch.ones(3, 4), requires_grad=False)
    model.twin = nn.Parameter(model.kept.data[1:], requires_grad=False)
    model.register_buffer("other", model.kept.data[:2])
    listed = [parameter for parameter in model.parameters() if parameter is not model.twin]
    with pytest.warns(UserWarning, match="share memory now. After this, edits of one do not reach the other") as seen:
        optimizer = with_sgd(listed, solo(), stage=stage, module=model)
    texts = {str(warning.message).partition(" share")[0] for warning in seen}
    assert {"'kept' and 'other'", "'kept' and 'twin'"} <= texts
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_view_that_a_graph_holds_is_named_on_every_rank() -> None:
    def in_a_graph(transport: Transport) -> None:
        model = nn.Linear(4, 4)
        in_one_tensor(model)
        held = torch.ones(2, 4).requires_grad_() @ model.weight if transport.rank else None
        with_sgd(model, transport, stage=3)
        del held

    for message in errors_on(2, in_a_graph):
        assert "shares a version counter with another tensor, as views of one tensor do" in message
        assert message.endswith("first forward, or give it memory of its own: nn.Parameter(p.detach().clone())")


@pytest.mark.parametrize("stage", only(STAGES, 0, 3))
def test_gaps_are_told_by_name_and_closed(stage: int) -> None:
    """That such parameters train is shown by random programs."""

    def program(transport: Transport) -> nn.ParameterDict:
        columns = torch.linspace(-1, 1, 48).view(4, 12)
        model = nn.ParameterDict({"even": columns[:, :8:2], "odd": columns[:, 1:8:2], "rows": columns[:, 8:]})
        model["odd"].requires_grad_(False)
        with_sgd(model, transport, stage=stage).close()
        return model

    with pytest.warns(UserWarning, match=r"gaps in the memory of .*, such as big\[:, ::2\] has, are closed") as seen:
        found = on_threads(2, program, timeout=BOUND)
    (text,) = [str(warning.message) for warning in seen]
    assert sorted(re.findall(r"'\w+'", text)) == ["'even'", "'odd'", "'rows'"]
    assert all(parameter.is_contiguous() for parameter in found[1].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # which is then that of every rank, at once
        with pytest.raises((UserWarning, ValueError), match="gaps in the memory"):  # rank 0's, and the others'
            on_threads(2, program, timeout=BOUND)
