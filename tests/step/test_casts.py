"""Inputs, unlisted parameters and asked-for buffers are cast to what the model computes in."""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.narrowed import BF16, FP16, FP32
from ..support.plain import assert_same_bits, assert_same_value
from ..support.rows import rows
from .narrow import WIDTH, build, step, zero


class Averaging(nn.Module):
    """A module that keeps a mean of its inputs in fp32, as a batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.register_buffer("mean", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.training:
            self.mean.lerp_(y.detach().float().mean(0), 0.1)
        return y - self.mean.to(y.dtype)


@pytest.mark.parametrize("stage", rows([2], [3]))
def test_an_evaluation_between_steps_changes_nothing(stage: int) -> None:
    """It changes no weights, masters, moments and buffers, and no later step."""

    def train(transport: Transport, evaluates: bool) -> Any:
        model = Averaging()
        optimizer = zero(model, transport, stage)
        for number in range(3):
            step(model, optimizer, 10 * number + transport.rank)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(2, WIDTH))
                model.train()
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model.state_dict(), states["state"], states["masters"]

    for found, expected in on_threads(2, lambda transport: [train(transport, each) for each in (True, False)]):
        assert_same_value(found, expected, "model, states and masters")


class Fed(nn.Module):
    """A model that records its inputs, with a parameter that no optimizer has and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.apart = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = [x, *args, *kwargs.values()]
        return (x * self.weight * self.apart).sum()


@pytest.mark.parametrize(("stage", "casts"), rows([(0, True), (2, True), (3, False)], [(1, False), (3, True)]))
def test_inputs_unlisted_parameters_and_asked_for_buffers_are_cast(stage: int, casts: bool) -> None:
    precision = MixedPrecision(BF16, buffer_dtype=BF16 if casts else None, cast_forward_inputs=casts)

    def program(transport: Transport) -> None:
        model = Fed()
        arguments: dict[str, Any] = {"stage": stage, "module": model, "process_group": transport}
        optimizer = ZeroOptimizer([model.weight], torch.optim.SGD, lr=0.1, mixed_precision=precision, **arguments)
        x = torch.ones(2, dtype=FP32 if casts else BF16)
        more = {"pair": (torch.ones(2, dtype=FP16), "text"), "tokens": torch.ones(2, dtype=torch.int64)}
        model(x, more=more).backward()
        found = [model.seen[0], model.seen[1]["pair"][0], model.seen[1]["tokens"]]
        assert [each.dtype for each in found] == [BF16, BF16 if casts else FP16, torch.int64]
        assert more["pair"][0].dtype is FP16  # the caller's own tensors are unchanged
        assert (model.weight.dtype, model.apart.dtype) == (BF16, BF16)
        assert (model.mean.dtype, model.count.dtype) == (BF16 if casts else FP32, torch.int64)
        optimizer.step()
        optimizer.close()
        assert model.weight.dtype is BF16
        model(x)
        assert model.seen[0].dtype is x.dtype  # the model is plain again

    on_threads(2, program)


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Item:
    x: Tensor
    count: int = 0


def narrow(model: nn.Module, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16), **arguments)


def test_inputs_are_cast_in_every_container() -> None:
    model, x = Fed(), torch.ones(2)
    optimizer = narrow(model)
    model(x, Pair(x, "a"), Item(x, 3), OrderedDict(x=x), UserDict({"x": x}), [x, (x,)])
    first, pair, item, ordered, user, listed = model.seen
    assert [type(value) for value in model.seen[1:]] == [Pair, Item, OrderedDict, UserDict, list]
    assert (pair.name, item.count) == ("a", 3)
    found = (first, pair.x, item.x, ordered["x"], user["x"], listed[0], listed[1][0])
    assert {value.dtype for value in found} == {BF16}
    assert x.dtype is FP32
    optimizer.close()


@pytest.mark.parametrize("ends", rows(["superseded"], ["discarded"]))
def test_what_an_optimizer_did_to_the_inputs_ends_with_it(ends: str) -> None:
    """For a notebook whose cell is run again. A copy of the model computes in its dtype as long as it lives."""
    model, ones = build(), torch.ones(1, WIDTH)
    first: ZeroOptimizer | None = narrow(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert_same_bits(average(ones), model(ones))
    if ends == "discarded":
        first = None
        gc.collect()
        model.float()
    else:
        model.float()
        second = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0)
    found = model(ones)
    assert found.dtype is FP32
    with torch.no_grad():
        assert_same_bits(found, nn.Sequential.forward(model, ones))
    if first is not None:
        second.close()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="param_dtype must be one of"):
        MixedPrecision(torch.float64)
    with pytest.raises(TypeError, match="reduce_dtype must be one of"):
        MixedPrecision(BF16, reduce_dtype=torch.int8)
    for param_dtype in (FP32, FP16):  # with two 16-bit dtypes each part would be rounded twice
        with pytest.raises(ValueError, match=r"accumulate_dtype torch.bfloat16 must be torch\.\w+, in which .* or wid"):
            MixedPrecision(param_dtype, accumulate_dtype=BF16)
    with pytest.raises(TypeError, match=r"mixed_precision must be a zero.MixedPrecision, not torch.bfloat16"):
        ZeroOptimizer(build(), mixed_precision=BF16)  # type: ignore[arg-type]
