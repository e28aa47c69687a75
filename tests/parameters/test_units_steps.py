"""A copy that is made inside `gathered()` is a plain model that trains alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport

from ..support.cases import (
    Case,
    assert_nothing_is_here,
    assert_parameters,
    batches_of,
    one_backward,
    plain_loop,
    sharded,
    train,
)
from .worlds import on, size_of


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(("world", "copied"), [("several", copy.deepcopy), ("common", pickled), ("one", copy.deepcopy)])
def test_a_copy_made_inside_gathered_is_a_plain_model_that_trains_alone(world: str, copied: Any) -> None:
    case = Case(steps=3)
    _, expected = plain_loop(case, size_of(world))
    reference = case.make()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(expected[0][name])
    one_backward(reference, batches_of(1, 1)[0])
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    alone = parameters_of(reference)

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(2):
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with optimizer.gathered():
                    twin = copied(model)
        assert_nothing_is_here(model, optimizer)
        assert_parameters(twin, expected[0])
        before = optimizer.traffic
        one_backward(twin, batches_of(1, 1)[0])
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert optimizer.traffic == before
        assert_parameters(twin, alone)
        train(case, model, optimizer, 2)
        optimizer.step()
        with optimizer.gathered():
            assert_parameters(model, expected[2])

    on(world, program)
