"""Inputs, unlisted parameters and asked-for buffers are cast to what the model computes in."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.narrowed import BF16, FP16, FP32
from ..support.plain import assert_same_value
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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = [x, *args, *kwargs.values()]
        return {"loss": (x * self.weight * self.apart).sum(), "all": (x, [x], 3)}


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Item:
    x: Tensor
    count: int = 0


@pytest.mark.parametrize(("stage", "casts"), rows([(0, True), (2, True), (3, False)], [(1, False), (3, True)]))
def test_inputs_outputs_unlisted_parameters_and_asked_for_buffers_are_cast(stage: int, casts: bool) -> None:
    """Inputs and outputs are cast in every container; the caller's own are unchanged."""
    precision = MixedPrecision(BF16, buffer_dtype=BF16 if casts else None, cast_forward_inputs=casts, output_dtype=FP32)

    def program(transport: Transport) -> None:
        model = Fed()
        arguments: dict[str, Any] = {"stage": stage, "module": model, "process_group": transport}
        optimizer = ZeroOptimizer([model.weight], torch.optim.SGD, lr=0.1, mixed_precision=precision, **arguments)
        x, y = torch.ones(2, dtype=FP32 if casts else BF16), torch.ones(2, dtype=FP16)
        containers = (Pair(y, "a"), Item(y, 3), OrderedDict(x=y), UserDict({"x": y}), [y, (y,)])
        found = model(x, *containers, more={"tokens": torch.ones(2, dtype=torch.int64)})
        assert [found["loss"].dtype, found["all"][0].dtype, found["all"][1][0].dtype] == [FP32, FP32, FP32]
        assert found["all"][2] == 3
        found["loss"].backward()
        first, pair, item, ordered, user, listed, more = model.seen
        assert [type(value) for value in model.seen[1:-1]] == [type(value) for value in containers]
        assert (pair.name, item.count) == ("a", 3)
        inside = (pair.x, item.x, ordered["x"], user["x"], listed[0], listed[1][0])
        assert {value.dtype for value in inside} == {BF16 if casts else FP16}
        assert (first.dtype, more["tokens"].dtype, y.dtype) == (BF16, torch.int64, FP16)
        assert (model.weight.dtype, model.apart.dtype) == (BF16, BF16)
        assert (model.mean.dtype, model.count.dtype) == (BF16 if casts else FP32, torch.int64)
        optimizer.step()
        optimizer.close()
        assert model.weight.dtype is BF16
        model(x)
        assert model.seen[0].dtype is x.dtype

    on_threads(2, program)
