"""What a unit cannot be used for is one error on every rank with the remedy, and the step goes on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from collectives import Transport

from ..support.cases import (
    Batch,
    Case,
    Fails,
    Net,
    assert_nothing_is_here,
    assert_parameters,
    batches_of,
    loss_of,
    net_of,
    one_backward,
    plain_loop,
    sharded,
    train,
)
from .worlds import EVERY_WORLD, on, size_of

Wrong = Callable[[Any, Batch], None]
RELEASED = r"'blocks\.1\.norm\.weight' is released: .*gathered\(\)"
EDITED = "modified by an inplace operation"


class Misused(Net):
    """A model that goes another way while it is ``wrong``."""

    wrong: Callable[[Any, Tensor], Tensor] | None = None

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) if self.wrong is None else self.wrong(self, x)


def once(through: Callable[[Any, Tensor], Tensor]) -> Wrong:
    def wrong(model: Any, batch: Batch) -> None:
        model.wrong = through
        try:
            one_backward(model, batch)
        finally:
            model.wrong = None

    return wrong


def derivative_inside(model: Any, x: Tensor) -> Any:
    def derive(unit: Any, inputs: Any) -> Any:
        return torch.func.grad(lambda y: torch.tanh(unit.inner(y)).sum())(inputs[0])

    with model.blocks[0].register_forward_pre_hook(derive):
        return model.blocks[0](x)


def edit_a_saved_result(model: Any, batch: Batch) -> None:
    hidden = model.blocks[0](model.embed(batch.x))
    with torch.no_grad():
        hidden.zero_()
    out = model.blocks[1](hidden)
    with torch.no_grad():
        hidden.exp_()
    out.sum().backward()


REFUSALS: dict[str, tuple[Wrong, str]] = {
    "torch.func.grad inside a unit": (once(derivative_inside), "saved tensor hooks"),  # in the world where units travel
    "a weight after its unit": (once(lambda model, x: model.blocks[1](x) + model.blocks[1].norm.weight), RELEASED),
    "a re-entrant checkpoint": (
        once(lambda model, x: checkpoint(model.blocks[0], x, use_reentrant=True)),
        "use_reentrant=False",
    ),
    "an edit without gradient of what a unit saved": (edit_a_saved_result, EDITED),
}


@pytest.mark.parametrize(("name", "world"), list(zip(REFUSALS, cycle(["travel", "common", "travel", "one"]))))
def test_what_cannot_be_is_one_error_on_every_rank_and_the_step_goes_on(name: str, world: str) -> None:
    wrong, message = REFUSALS[name]
    case = Case(Misused)
    if message == EDITED:  # torch raises this, too
        with pytest.raises(RuntimeError, match=EDITED):
            wrong(case.make(), batches_of(0, 1)[0])
    _, expected = plain_loop(case, size_of(world))

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(case.steps):
            with pytest.raises(RuntimeError, match=message):
                wrong(model, batches_of(step, 1)[0])
            optimizer.zero_grad()
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_is_here(model, optimizer)
            with optimizer.gathered():
                assert_parameters(model, expected[step])

    on(world, program)


@EVERY_WORLD
def test_an_exception_in_a_forward_leaves_nothing_gathered_at_once(world: str) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(net_of(Fails)), transport)
        model.blocks[1].armed = "forward"
        for grad in (True, False, True):
            with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(grad):
                model(batches_of(0, 1)[0].x)
            assert_nothing_is_here(model, optimizer)

    on(world, program)


@pytest.mark.parametrize(
    ("world", "create_graph"), [("travel", False), ("travel", True), ("one", True), ("common", False)]
)
def test_a_step_between_forward_and_backward_is_an_error_as_in_torch(world: str, create_graph: bool) -> None:
    case = Case()

    def late(model: Any) -> Tensor:
        batch = batches_of(7, 1)[0]
        if not create_graph:
            return loss_of(model, batch)
        x = batch.x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, Batch(x, 0, 0)), x, create_graph=True)
        return gradient.square().sum()

    plain = case.make()
    adam = torch.optim.AdamW(plain.parameters())
    one_backward(plain, batches_of(0, 1)[0])
    loss = late(plain)
    adam.step()
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()
    _, expected = plain_loop(case, size_of(world))

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(case.steps):
            train(case, model, optimizer, step)
            loss = late(model)
            optimizer.step()
            with pytest.raises(RuntimeError, match=f"changed by a step or an edit after the forward|{EDITED}"):
                loss.backward()
            optimizer.zero_grad()
            with optimizer.gathered():
                assert_parameters(model, expected[step])
        assert_nothing_is_here(model, optimizer, lends=create_graph)

    on(world, program)
