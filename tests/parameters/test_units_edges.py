"""Graphs outside of their block, optimizers whose units nest, and names stay apart; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Transport

from ..support.cases import (
    Batch,
    Case,
    assert_nothing_is_here,
    assert_parameters,
    batches_of,
    loss_of,
    plain_loop,
    sharded,
    train,
)
from ..support.plain import assert_same_model, plain_step
from ..support.rows import rows
from .stage3 import Blocks, zero
from .worlds import EVERY_WORLD, on, size_of


@pytest.mark.law("side by side")
@EVERY_WORLD
def test_two_optimizers_whose_units_run_inside_each_other_keep_their_places_apart(world: str) -> None:
    def pair() -> nn.ModuleList:
        """Build two models; hooks of the second one's units use a unit of the first one."""
        guides, guided = Blocks(3), Blocks(3)
        for unit in guided:
            unit.register_forward_hook(lambda _, args, out: torch.tanh(out) * guides[2](args[0]))
        return nn.ModuleList([guides, guided])

    def program(transport: Transport) -> nn.Module:
        models = pair()
        optimizers = [zero(model, transport) for model in models]
        models[1](torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.close()
        return models

    expected, ranks = pair(), size_of(world)
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5)
    plain_step(expected, sgd, lambda *_: expected[1](torch.ones(2, 3)).sum(), range(ranks), ranks)
    for models in on(world, program):
        assert_same_model(models, expected)


def test_units_whose_long_names_begin_alike_are_told_apart() -> None:
    """Each rank enters another unit; a message has room only for the beginning of a name."""
    name = "a_module_with_a_name_that_is_longer_than_the_label_of_any_message_can_be_"

    def program(transport: Transport) -> str:
        model = nn.ModuleDict({name + letter: nn.Linear(3, 3) for letter in "ab"})
        optimizer = zero(model, transport, units=lambda module: isinstance(module, nn.Linear))
        with pytest.raises(RuntimeError) as caught, torch.no_grad():  # noqa: PT012 - whichever of the two it is
            model[name + "ab"[transport.rank]](torch.ones(1, 3))
            optimizer.step()
        return str(caught.value)

    for said in on("travel", program):
        assert "gather of unit 'a_module_with" in said


EDITED = "modified by an inplace operation"


def after_its_unit(model: Any, batch: Batch) -> None:
    with model.blocks[1].register_forward_hook(lambda *_: model.blocks[0].norm.weight.sum()):
        model(batch.x)


def checkpointed(model: Any, batch: Batch) -> None:
    hidden = checkpoint(model.blocks[0], model.embed(batch.x), use_reentrant=True)
    hidden.sum().backward()


def edit_a_saved_result(model: Any, batch: Batch) -> None:
    hidden = model.blocks[0](model.embed(batch.x))
    with torch.no_grad():
        hidden.zero_()
    out = model.blocks[1](hidden)
    with torch.no_grad():
        hidden.exp_()
    out.sum().backward()


REFUSALS: list[tuple[Callable[[Any, Batch], None], str, str]] = [
    (after_its_unit, "common", r"'blocks\.0\.norm\.weight' is released: .*gathered\(\)"),
    (checkpointed, "travel", "use_reentrant=False"),
    (edit_a_saved_result, "one", EDITED),
]


@pytest.mark.parametrize(("wrong", "world", "message"), REFUSALS)
def test_what_cannot_be_is_one_error_on_every_rank_and_the_step_goes_on(wrong: Any, world: str, message: str) -> None:
    case = Case()
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


@pytest.mark.parametrize(
    ("world", "create_graph"), rows([("travel", False)], [("travel", True), ("one", True), ("common", False)])
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
