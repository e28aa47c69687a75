"""Gradients from before the optimizer, a closed one, and a hook that goes on; `dials` has other wrong moments."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import solo

from ..support.errors import error_of
from ..support.plain import assert_same_model
from ..support.rows import rows
from .layers import backward, build, on_ranks, plain, train, zero


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_from_before_the_optimizer_is_cleared_or_an_error(stage: int) -> None:
    model = build()
    backward(model)
    optimizer = zero(model, solo(), stage)
    message = error_of(optimizer.step)
    assert "was assigned from outside" in message
    assert "set it to None" in message
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    train(model, optimizer)
    optimizer.close()
    assert_same_model(model, plain())


def test_a_closed_optimizer_is_refused() -> None:
    optimizer = zero(build(), solo(), 2)
    optimizer.close()
    for call in (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.check_replicas,
        optimizer.reset_states,
    ):
        assert "this optimizer is closed" in error_of(call)


@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
def test_calls_in_a_hook_that_goes_on_change_nothing_of_the_backward(stage: int) -> None:
    def program(model: Any, optimizer: Any) -> Any:
        said = list[str]()
        calls = (optimizer.step, optimizer.zero_grad)
        with model[0].weight.register_post_accumulate_grad_hook(lambda _: said.extend(map(error_of, calls))):
            backward(model)  # when the first layer is reached, other parameters have gradients
        optimizer.step()
        optimizer.close()
        return said, model

    for (of_step, of_zero_grad), model in on_ranks(program, stage):
        assert "step() inside a backward" in of_step
        assert "stages 2 and 3 shard gradients while the backward runs" in of_step
        assert "zero_grad() inside a backward" in of_zero_grad
        assert_same_model(model, plain())
