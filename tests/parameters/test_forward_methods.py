"""A method that is registered gathers the same units at stage 3 as the forward, until `close`."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from collectives import Transport, solo

from ..support.cases import ROWS, WIDTH, Batch, Block, Case, Net, batches_of, manager_of, sharded
from ..support.plain import assert_same_bits
from ..support.rows import rows
from .stage3 import check_in, on

X = torch.ones(ROWS, WIDTH)


class Acting(Block):
    """A unit with further methods that use its weights."""

    scale = 2.0

    def act(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
        """Use the weight itself, too."""
        return torch.tanh(self.inner(x)) @ self.inner.weight * self.scale + bias

    def again(self, x: Tensor) -> Tensor:
        hidden: Tensor = self(self.act(x)) + self.act(x)
        return hidden

    def fails(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError(str(self.inner.weight.sum() + x.sum()))


class Agent(Net):
    """A model whose other methods are called, too, by its forward and by themselves."""

    block = Acting

    def encode(self, x: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](self.embed(x) + self.embed.bias))

    def decode(self, hidden: Tensor) -> Any:
        return self.head(self.blocks[0](self.blocks[2](hidden)))

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.encode(x))

    def both(self, x: Tensor) -> Any:
        return self.forward(x) * self.head.weight.sum()


def register(model: Any) -> None:
    for name in ("encode", "decode", "both"):
        zero.register_forward_method(model, name)
    for block in model.blocks:
        for name in ("act", "again", "fails"):
            zero.register_forward_method(block, name)


def call_all(model: Any, batch: Batch) -> Iterator[None]:
    """Call methods of units and of the model, around each other and around forwards."""
    x = model.blocks[1].again(model.blocks[1].act(model.embed(batch.x), bias=0.5))
    (model.blocks[2].act(x) + model.blocks[1](x)).square().mean().backward()
    yield
    with torch.no_grad(), suppress(ZeroDivisionError):
        model.blocks[1].fails(x)
    with torch.no_grad():
        x = batch.x + model.both(batch.x).mean()
    (model.both(x) + model(batch.x)).square().mean().backward()
    yield


CASE = Case(Agent, call_all, built=register)


@pytest.mark.parametrize("world", rows(["one", "common"], ["travel"]))
def test_registered_methods_train_as_in_the_plain_loop(world: str) -> None:
    check_in(world, CASE)


def test_registering_twice_is_harmless_and_what_the_user_puts_there_stays() -> None:
    """Before, as a method of one module alone, which comes back, or after. A copy has the plain method."""

    def put(model: Any) -> None:
        block = model.blocks[0]
        block.act = types.MethodType(lambda self, x: self.inner.weight.sum() * x, block)
        block.partly = functools.partial(Acting.act, block, bias=1.0)

    expected = Case(Agent, prepared=put).make().blocks[0]  # type: ignore[index]
    model, optimizer = sharded(Case(Agent, prepared=put), solo())
    block = model.blocks[0]
    own = {name: vars(block)[name] for name in ("act", "partly")}
    for name in (*own, "again"):
        zero.register_forward_method(block, name)
        first = vars(block)[name]
        zero.register_forward_method(block, name)
        assert vars(block)[name] is first
        assert_same_bits(getattr(block, name)(X), getattr(expected, name)(X))
    with optimizer.gathered():
        twin = copy.deepcopy(model).blocks[0]
    block.again = lambda value: value + 1
    optimizer.close()
    assert_same_bits(twin.again(X), expected.again(X))
    assert twin.again.__self__ is twin
    assert twin.again.__func__ is Acting.again
    assert_same_bits(block.again(X), X + 1)
    assert all(vars(block)[name] is method for name, method in own.items())
    assert not any(
        type(value).__module__.startswith("zero") for part in model.modules() for value in vars(part).values()
    )


def test_methods_inside_a_forward_begin_no_order_of_their_own() -> None:
    """Units are gathered ahead through both methods, as without them; the next forward begins anew."""

    def program(transport: Transport) -> list[list[int]]:
        model, optimizer = sharded(Case(Agent, built=register), transport)
        manager, seen = manager_of(optimizer), list[list[int]]()
        fetch = manager.unshard

        def noted(number: int) -> None:
            seen[-1].append(number)
            fetch(number)

        manager.unshard = noted  # type: ignore[method-assign]
        for _ in range(3):
            seen.append([])
            with torch.no_grad():
                model(batches_of(0, 1)[0].x)
        manager.unshard = fetch  # type: ignore[method-assign]
        return seen

    for seen in on("travel", program):
        assert [number for number in seen[1] if number] == [1, 2, 1, 2, 3, 2, 3, 1, 3, 1, 1]
        assert seen[2] == seen[1]
