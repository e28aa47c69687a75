"""A released parameter gives no wrong value, harms nothing, and says what to do, whatever is done and when."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from collectives import Transport

from ..support.errors import error_of
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, on_ranks, plain, zero
from .worlds import on, size_of

NAME = "blocks.1.weight"
REPR = (
    f"<Parameter {NAME!r}, released (values inside optimizer.gathered()): shape (3, 3), torch.float32, cpu, "
    "requires_grad=True>"
)
Action = Callable[[Net, Any], Any]


def twice(tensor: Tensor) -> Tensor:
    return tensor * 2


def scripted(tensor: Tensor) -> Tensor:
    function: Callable[[Tensor], Tensor] = torch.jit.script(twice)
    return function(tensor) / 2


RAISES: dict[str, Action] = {
    "p + 1": lambda model, p: p + 1,
    "float(scalar)": lambda model, p: float(model.block(1).scalar),
    "p.numpy()": lambda model, p: p.numpy(),
    "p.data = ...": lambda model, p: setattr(p, "data", torch.ones(3, 3)),
    "vector_to_parameters": lambda model, p: nn.utils.vector_to_parameters(torch.ones(9), [p]),
    "p.mul_()": lambda model, p: p.mul_(2),
    "copy.deepcopy(p)": lambda model, p: copy.deepcopy(p),
    "autograd.grad(p, p)": lambda model, p: torch.autograd.grad(p, p, torch.ones(3, 3)),
    "autograd.backward(x, p)": lambda model, p: torch.autograd.backward(
        torch.ones(3, 3, requires_grad=True), p, inputs=[p]
    ),
    "model.to(float64)": lambda model, p: model.to(torch.float64),
    "p.expand_as(p)": lambda model, p: p.expand_as(p),
}
"""A `RuntimeError` that names a parameter and `gathered()`."""

RIGHT: dict[str, Action] = {
    "repr(p)": lambda model, p: repr(p) == REPR,
    "p.to(float32)": lambda model, p: p.to(torch.float32) is p,
    "get_gradient_edge(p)": lambda model, p: type(get_gradient_edge(p).node).__name__ == "AccumulateGrad",
    "model.to(float32)": lambda model, p: model.to(torch.float32) is model,
    "model.to(memory_format=...)": lambda model, p: model.to(memory_format=torch.channels_last) is model,
}
"""The true answer to a question that needs no value."""

PAST_THE_CLASS: dict[str, Action] = {
    "torch.tensor(p)": lambda model, p: torch.tensor(p),
    "p.as_subclass(Tensor)": lambda model, p: p.as_subclass(Tensor),
    "a scripted function": lambda model, p: scripted(p),
}
"""NaN where units travel, and else the value of the moment."""
ACTIONS = {**RAISES, **RIGHT, **PAST_THE_CLASS}
ROWS = list(zip(ACTIONS, cycle(["travel", "common", "travel", "one", "common"])))


def assert_outcome(name: str, world: str, model: Net, values: dict[str, Tensor]) -> None:
    """``values``: the parameters of the moment."""
    parameter = model.block(1).weight
    if name in RAISES:
        with pytest.raises(RuntimeError, match=r"'(first|blocks\.\d)\.(weight|scalar)' is released") as caught:
            RAISES[name](model, parameter)
        assert "gathered(" in str(caught.value)
        if name in ("p.data = ...", "vector_to_parameters"):
            assert ". There, p.copy_(t) under torch.no_grad() edits it" in str(caught.value)
    elif name in RIGHT:
        assert RIGHT[name](model, parameter) is True
    else:
        found = PAST_THE_CLASS[name](model, parameter).detach()
        assert_same_bits(found, torch.full((3, 3), torch.nan) if world == "travel" else values[NAME])


@pytest.mark.parametrize(("name", "world"), rows(ROWS[::2], ROWS[1::2]))
def test_what_is_done_outside_of_its_unit_has_its_outcome_and_training_goes_on(name: str, world: str) -> None:
    """Between steps, between the parts of one, and while other units run."""

    def program(transport: Transport) -> tuple[int, nn.Module]:
        model, values, moments = Net(), dict(Net().named_parameters()), list[int]()
        optimizer = zero(model, transport)

        def at(*_: Any) -> None:
            with torch.no_grad():
                assert_outcome(name, world, model, values)
            moments.append(len(moments))

        at()
        with torch.no_grad():
            model(INPUTS)
        at()
        inside = () if "model" in name else (model.block(0), model.block(2))
        handles = [unit.register_forward_pre_hook(at) for unit in inside]
        handles += [unit.register_full_backward_pre_hook(at) for unit in inside]
        loss = loss_of(model, INPUTS)
        at()
        torch.autograd.backward(loss)
        at()
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        values = dict(plain(1).named_parameters())
        at()
        optimizer.close()
        return len(moments), model

    for moments, model in on(world, program):
        assert moments == (5 if "model" in name else 9)
        assert_same_model(model, plain(1))


@pytest.mark.parametrize("function", [torch.autograd.grad, torch.autograd.backward])
def test_a_hook_inside_a_backward_for_parameters_never_sees_their_stand_ins(function: Any) -> None:
    def act(model: Net, _: Any) -> list[str]:
        said = list[str]()
        handle = model.first.weight.register_hook(lambda _: said.append(error_of(torch.exp, model.block(1).weight)))
        function(loss_of(model, INPUTS), inputs=[model.first.weight, model.block(1).weight])
        handle.remove()
        return said

    for (said,), _ in on_ranks("travel", act):
        assert "'blocks.1.weight' is released" in said


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("world", rows(["travel"], ["one", "common"]))
def test_script_modules_are_copied_and_saved_inside_gathered_alone(world: str) -> None:
    """The methods that do so in C++ never ask the class of a parameter."""

    def saved(model: Any) -> Any:
        stream = io.BytesIO()
        torch.jit.save(model, stream)
        stream.seek(0)
        return torch.jit.load(stream)

    def act(model: Any, optimizer: Any) -> list[nn.Module]:
        copying: list[Callable[[Any], Any]] = [saved, copy.deepcopy, lambda model: model.save_to_buffer()]
        for copied in copying:
            with pytest.raises(RuntimeError, match=r"'first\.weight' is released") as caught:
                copied(model)
            assert "gathered()" in str(caught.value)
        with optimizer.gathered():
            return [saved(model), copy.deepcopy(model)]

    made: list[Any] = [torch.jit.script(Net()) for _ in range(size_of(world))]
    for copies, model in on_ranks(world, act, made.pop):
        for each in copies:
            assert_same_model(each, Net())
        assert_same_model(model, plain(1))
        assert_same_model(saved(model), plain(1))
