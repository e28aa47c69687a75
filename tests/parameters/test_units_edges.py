"""Graphs that leave their block, units of two optimizers inside each other and like names stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from ..support.cases import Case, assert_nothing_is_here
from ..support.plain import assert_same_model, plain_step
from .worlds import EVERY_WORLD, on, size_of


def zero(model: nn.Module, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.5, process_group=transport, **arguments)


def stepped(model: nn.Module, loss_of: Any, ranks: int) -> nn.Module:
    """Run a step of the plain loop on as many equal micro-batches as there are ranks."""
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda *_: loss_of(), range(ranks), ranks)
    return model


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize(("world", "inside"), [("travel", True), ("travel", False), ("common", False), ("one", False)])
def test_a_loss_that_was_made_inside_gathered_has_its_gradient_anywhere(world: str, inside: bool) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Case().make()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            loss = squares(model)
            if inside:
                torch.autograd.backward(loss)
        if not inside:
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert_nothing_is_here(model, optimizer)
        optimizer.close()
        return model

    expected = Case().make()
    stepped(expected, lambda: squares(expected), size_of(world))
    for model in on(world, program):
        assert_same_model(model, expected)


class Guided(nn.Module):
    """A unit that uses a weight of another model, inside its own forward."""

    def __init__(self, guide: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.guide = [guide]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.guide[0](x)
        return x


@EVERY_WORLD
def test_two_optimizers_whose_units_run_inside_each_other_keep_their_places_apart(world: str) -> None:
    def pair() -> tuple[nn.Sequential, Guided]:
        guides = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        guided = Guided(guides[3])
        for number, parameter in enumerate([*guides.parameters(), *guided.parameters()]):
            nn.init.constant_(parameter, 0.1 + 0.07 * number)
        return guides, guided

    def program(transport: Transport) -> tuple[nn.Module, nn.Module]:
        guides, guided = pair()
        optimizers = [zero(guides, transport), zero(guided, transport)]
        guided(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.close()
        return guides, guided

    expected = pair()
    stepped(nn.ModuleList(expected), lambda: expected[1](torch.ones(2, 3)).sum(), size_of(world))
    for models in on(world, program):
        for ours, theirs in zip(models, expected, strict=True):
            assert_same_model(ours, theirs)


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
