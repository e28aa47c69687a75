"""What cannot be is refused where it is given, by an error that names what, where and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from collectives import solo
from collectives.backends.gloo import connect
from zero import ZeroOptimizer, save

from ..support.errors import error_of
from ..support.shampoo import Shampoo
from .layers import build, train, zero

pytestmark = pytest.mark.law("errors")

MODEL = nn.Linear(3, 3)
WEIGHT, BIAS = MODEL.weight, MODEL.bias


def linear(more: torch.Tensor | None = None) -> nn.Linear:
    """Return a layer, with a further parameter ``more`` if there is a value for it."""
    model = nn.Linear(3, 3)
    if more is not None:
        model.more = nn.Parameter(more)
    return model


def sharing() -> nn.Linear:
    model = linear()
    model.twin = nn.Parameter(model.weight.detach())
    return model


def result() -> torch.Tensor:
    found = nn.Parameter(torch.ones(3)) * 2
    found.retain_grad()  # torch itself would then accept it
    return found


PARAMS: list[tuple[Any, str]] = [
    ([WEIGHT, BIAS, 42], "params[2] is 42 (int), neither a parameter nor a (name, parameter) pair"),
    ([42, WEIGHT], "params[0] is 42 (int)"),
    ([("weight", WEIGHT), ("bias", 3)], "params[1] is ('bias', 3) (tuple)"),
    ([("weight", WEIGHT, 1)], "params[0] is ('weight', "),
    ([WEIGHT, None], "params[1] is None (NoneType)"),
    ([MODEL], "params[0] is Linear("),
    ({"weight": WEIGHT}, "params[0] is 'weight' (str)"),
    ([WEIGHT, torch.ones(3).numpy()], "params[1] is a ndarray, neither"),
    ([{"params": [WEIGHT]}, {"params": [BIAS, "x"]}], "params[1]['params'][1] is 'x' (str)"),
    ([{"params": [WEIGHT]}, {"params": 7}], "params[1]['params'] is 7 (int), and must be parameters"),
    ([{"params": [WEIGHT]}, BIAS], "params[1] is a Parameter, not a param group with 'params'"),
    ([WEIGHT, {"params": [BIAS]}], "params[0] is a Parameter, not a param group with 'params'"),
    ([{"lr": 0.5}], "params[0] is {'lr': 0.5} (dict), not a param group with 'params'"),
    ([{"params": {WEIGHT}}], "params[0]['params'] must be in an order that all ranks share; a set has none"),
    (None, "params is None (NoneType), and must be parameters, param groups or a module"),
]


@pytest.mark.parametrize(("params", "text"), PARAMS)
def test_what_is_no_parameter_is_named_with_its_place(params: Any, text: str) -> None:
    for stage in (0, 3):
        assert error_of(zero, params, solo(), stage, module=MODEL).startswith(f"TypeError: {text}")


ADAMW = "give the class torch.optim.AdamW, and its arguments here"
SHAMPOO = f"{Shampoo.__module__}.Shampoo"
CLASSES: list[tuple[Any, str]] = [
    (torch.optim.AdamW([WEIGHT]), f"not an instance of AdamW: {ADAMW}"),
    ("adamw", f"not 'adamw': {ADAMW}"),
    (partial(torch.optim.AdamW, lr=0.1), f"not a partial of AdamW: {ADAMW}"),
    (Shampoo([WEIGHT]), f"not an instance of Shampoo: give the class {SHAMPOO}, and its arguments here"),
    ("adan", "not 'adan': give a class, such as torch.optim.AdamW, and its arguments here"),
    (nn.Linear, "not torch.nn.modules.linear.Linear, which is not derived from torch.optim.Optimizer: give a class, "),
]


@pytest.mark.parametrize(("given", "text"), CLASSES)
def test_what_is_no_class_of_optimizers_is_told_what_to_give(given: Any, text: str) -> None:
    message = error_of(ZeroOptimizer, build(), given, process_group=solo())
    assert message.startswith(f"TypeError: optimizer_class must be a class of optimizers, {text}")
    group = {"params": build().parameters(), "optimizer_class": given}
    message = error_of(ZeroOptimizer, [group], process_group=solo())
    assert message.startswith(f"TypeError: param group 0: optimizer_class must be a class of optimizers, {text}")


def new(*arguments: Any, **named: Any) -> Callable[[], object]:
    return lambda: ZeroOptimizer(*arguments, **named)


def divisor_is(value: Any) -> Callable[[], object]:
    return lambda: setattr(zero(build(), solo()), "divisor", value)


def clip(*arguments: Any, **named: Any) -> Callable[[], object]:
    return lambda: zero(build(), solo()).clip_grad_norm_(*arguments, **named)


def call(name: str, *arguments: Any) -> Callable[[], object]:
    """Return a function that makes a call of an optimizer of one rank."""
    return lambda: getattr(zero(build(), solo()), name)(*arguments)


GROUPS = [{"params": [WEIGHT]}, {"params": [BIAS, WEIGHT]}]
OVERLAPPING = torch.zeros(1, 4).expand(5, 4)
NO_SUCH_RANK = "consolidate_state_dict: rank 9 is not one of the 1 ranks"
CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    *((divisor_is(v), ValueError, "a finite number other than 0") for v in (0, math.nan, "3", None, True)),
    (new(GROUPS, module=MODEL), ValueError, "'weight' is listed twice"),
    (new([WEIGHT, WEIGHT]), ValueError, "'parameter 1' is listed twice"),
    (new(linear(torch.zeros(3).to(torch.complex128))), TypeError, "'more' is torch.complex128.*or freeze"),
    (new(linear(torch.zeros(3).to(torch.float8_e4m3fn))), TypeError, "'more' is torch.float8_e4m3fn.*or freeze"),
    (new(linear(OVERLAPPING)), ValueError, "'more' overlaps itself in memory .*clone"),
    (new(sharing()), ValueError, "share memory but are different parameters"),
    (new([WEIGHT * 2]), ValueError, "can't optimize a non-leaf Tensor"),
    (new([("p", result())]), ValueError, "'p' is the result of a computation"),
    (new(torch.zeros(3, requires_grad=True)), TypeError, "not one tensor"),
    (new(MODEL, module=linear()), ValueError, "two different modules"),
    (new([]), ValueError, "empty"),
    (new(MODEL, ignored=MODEL), ValueError, "the parameter list is empty, or all is in ignored=: pass"),
    (lambda: zero(build(), solo()).consolidate_state_dict(9), ValueError, NO_SUCH_RANK),
    (clip(1.0, 0), ValueError, "norm_type"),
    *((call("full_state_dict", v), TypeError, "full_state_dict: to must be the number of") for v in ("0", 0.0, True)),
    (call("full_grad", "0.weight"), TypeError, "'0.weight' is no parameter: give the tensor"),
    (call("gathered", "0.weight"), TypeError, r"gathered\(\) takes parameters, as module.parameters.*, not a str"),
    (call("reset_states", MODEL), TypeError, r"reset_states\(\) takes parameters, .*, not a Linear"),
    (call("add_param_group", {}), TypeError, "param_group is {}, not a param group with 'params'"),
    (call("load_state_dict", None), ValueError, "a torch.optim state dict is needed, with 'state' and"),
    (call("exchange", "text"), TypeError, r"rank 0: exchange\(\) sends bytes, not a str: .encode\(\) makes some"),
    (lambda: save("nowhere", MODEL), TypeError, "a ZeroOptimizer is needed, whose states are saved, not a Linear"),
    (clip(math.nan), ValueError, "max_norm"),
    *((clip(v, 1.0), TypeError, "max_norm must be a number, not ") for v in (None, "", [WEIGHT, BIAS])),
    (clip(1.0, replicated=[WEIGHT]), ValueError, r"\(replicated=...\) without over=: .* has: pass over=, too"),
    (clip(1.0, also=zero(build(), solo())), TypeError, "also must be a list of .*, not a ZeroOptimizer"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_what_cannot_be_is_an_error_that_names_it(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


def test_several_ranks_of_a_launcher_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, but no process group is initialised: call" in error_of(connect, None)
    assert "init_process_group" in error_of(ZeroOptimizer, linear())


def test_what_is_added_is_checked_as_what_is_given_and_changes_nothing() -> None:
    model = build()
    optimizer = zero(model, solo(), 1)
    refused: list[tuple[Any, str]] = [
        ([nn.Parameter(torch.ones(2)), 42], "TypeError: param_group['params'][1] is 42 (int)"),
        (7, "TypeError: param_group['params'] is 7 (int)"),
        (model[0].weight, "ValueError: add_param_group: '0.weight' is in a param group already"),
    ]
    for params, text in refused:
        assert error_of(optimizer.add_param_group, {"params": params}).startswith(text)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lazy_modules_run_a_forward_first(stage: int) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    text = "'0.weight' is not initialised yet: run a forward of its lazy module first"
    assert text in error_of(zero, model, solo(), stage)
    model(torch.ones(2, 4))
    train(model, zero(model, solo(), stage))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_in_a_dtype_of_their_own_are_refused(stage: int) -> None:
    model = build().bfloat16()
    for parameter in model.parameters():
        if not hasattr(parameter, "grad_dtype"):
            pytest.skip("torch before 2.10")
        parameter.grad_dtype = torch.float32
    message = error_of(train, model, zero(model, solo(), stage))
    assert message.startswith("RuntimeError: rank 0: the gradient of '2.bias': ")
    assert "grad_dtype" in message
