"""A call at a wrong moment is refused with the remedy, and the next step is that of the plain loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_model
from ..support.rows import rows
from .layers import backward, build, errors_on_ranks, on_ranks, plain, train, zero

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@ALL_STAGES
def test_calls_inside_no_sync_are_refused_and_an_error_ends_it(stage: int) -> None:
    model = build()
    optimizer = zero(model, solo(), stage)
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        raise ZeroDivisionError
    with optimizer.no_sync():
        backward(model)
        assert "step() inside no_sync(): call it after the block" in error_of(optimizer.step)
        assert "clip_grad_norm_() inside no_sync" in error_of(optimizer.clip_grad_norm_, 1.0)
    optimizer.step()
    optimizer.close()
    assert_same_model(model, plain())


def unscale(_: Any, optimizer: ZeroOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


USES: dict[str, Callable[[Any, ZeroOptimizer], object]] = {
    "step()": lambda _, optimizer: optimizer.step(),
    "clip_grad_norm_()": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "clip_grad_norm_(also=...)": lambda _, optimizer: optimizer.clip_grad_norm_(1.0, also=[]),
    "full_grad of '2.bias'": lambda model, optimizer: optimizer.full_grad(model[2].bias),
    "set_full_grad of '2.bias'": lambda model, optimizer: optimizer.set_full_grad(model[2].bias, None),
    "GradScaler.unscale_()": unscale,
}


@pytest.mark.parametrize(("stage", "settle"), [(0, "step"), (1, "clip"), (2, "step"), (2, "clip"), (3, "step")])
def test_what_uses_a_gradient_after_step_or_clip_and_a_further_backward_needs_zero_grad(
    stage: int, settle: str
) -> None:
    """Also on a rank that has not run that backward, as it may at stages 0 to 2. It sends nothing."""
    without_scaler = {name: use for name, use in USES.items() if use is not unscale}  # local, where p.grad is a mean

    def program(model: Any, optimizer: ZeroOptimizer) -> list[str]:
        backward(model)
        optimizer.step() if settle == "step" else optimizer.clip_grad_norm_(1.0)
        before = optimizer.traffic.payload_sent
        if optimizer.rank or stage == 3:
            backward(model)
            with optimizer.no_sync():
                backward(model)
            assert "does not hold the gradient of '0.weight'" in error_of(model[0].weight.grad.sum)
            assert stage == 3 or optimizer.traffic.payload_sent == before
        uses = dict(USES) if stage else without_scaler
        messages = [error_of(use, model, optimizer) for use in uses.values()]
        optimizer.check_replicas()
        optimizer.zero_grad()
        train(model, optimizer)  # the optimizer is still usable
        optimizer.check_replicas()
        return messages

    for messages in on_ranks(program, stage):
        for message, use in zip(messages, USES if stage else without_scaler, strict=True):
            assert message.startswith(f"RuntimeError: {use} on rank ")
            assert f"backward() after {'step' if settle == 'step' else 'clip_grad_norm_'}() without zero" in message
            assert "the gradient of '0.weight' was already divided; call optimizer.zero_grad() before" in message


def test_a_divisor_is_set_before_gradients_are_divided() -> None:
    model = build()
    optimizer = zero(model, solo(), 2)
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    assert "the divisor was set after clip_grad_norm_()" in error_of(setattr, optimizer, "divisor", 3)
    optimizer.step()
    optimizer.divisor = 3


@pytest.mark.parametrize(
    ("stage", "before"), [(0, [True]), (1, []), (1, [True, False, True]), (2, [True, False, True]), (3, [True])]
)
def test_a_gradient_that_was_assigned_is_named_before_a_backward_adds_to_it(stage: int, before: list[bool]) -> None:
    """Whichever parameter has it. ``before``: backwards before it, and whether all parameters are trained in them."""
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        model = build()
        optimizer = zero(model, solo(), stage)
        for all_train in before:
            model[2].requires_grad_(all_train)
            backward(model)
            optimizer.zero_grad()
        parameter = model.get_parameter(name)
        parameter.grad = torch.ones(parameter.shape)
        assert f"the gradient of {name!r} was assigned from outside" in error_of(backward, model)


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


def test_a_closed_optimizer_and_a_copy_are_refused() -> None:
    optimizer = zero(build(), solo(), 2)
    for copying in (copy.deepcopy, pickle.dumps):
        assert "cannot be copied or pickled" in error_of(copying, optimizer)
    optimizer.close()
    for call in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.check_replicas):
        assert "this optimizer is closed" in error_of(call)


def test_the_state_dict_of_a_shard_names_the_call_that_gathers_it() -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> None:
        optimizer.consolidate_state_dict(to=1)
        if optimizer.rank == 1:
            optimizer.state_dict()
        train(model, optimizer)
        optimizer.state_dict()

    for message in errors_on_ranks(program, 2):
        assert "consolidate_state_dict(to=rank)" in message


@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
def test_a_call_in_a_hook_waits_for_the_end_of_the_backward_and_changes_nothing_of_it(stage: int) -> None:
    """Whether its error ends the backward or the hook goes on."""

    def program(transport: Transport) -> tuple[list[str], list[str], nn.Module]:
        model, ended, went_on = build(), list[str](), list[str]()
        optimizer = zero(model, transport, stage)
        calls: list[Callable[[], Any]] = [
            optimizer.step,
            optimizer.zero_grad,
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.full_grad(model[2].bias),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
            torch.optim.SGD([model[2].bias], lr=0.5).step,
        ]
        for call in calls:
            with model[2].bias.register_post_accumulate_grad_hook(lambda _, call=call: call()):
                ended.append(error_of(backward, model))
            optimizer.zero_grad()
        with model[0].weight.register_post_accumulate_grad_hook(lambda _: went_on.extend(map(error_of, calls[:2]))):
            backward(model)  # when the first layer is reached, other parameters have gradients
        optimizer.step()
        optimizer.close()
        return ended, went_on, model

    names = ("step()", "zero_grad()", "clip_grad_norm_()", "full_grad of '2.bias'", "add_param_group()")
    for ended, went_on, model in on_threads(2, program, timeout=BOUND):
        for name, message in zip((*names, *names[:2]), (*ended[:-1], *went_on), strict=True):
            assert message.startswith(f"RuntimeError: {name} inside a backward"), message
            assert ("stages 2 and 3 shard gradients while the backward runs" in message) is (name == "step()")
        assert "of '2.bias', which is sharded, not reduced yet, " in ended[-1]
        assert_same_model(model, plain())
