"""Graphs of units that do not travel hold parameters themselves, and the versions of these guard them."""

from __future__ import annotations

import torch
from torch import Tensor

from zero import ZeroOptimizer

from ..support.errors import error_of
from .stage3 import Blocks, on_blocks
from .unit_cases import Opaque
from .worlds import TOGETHER, size_of

CHANGED = "modified by an inplace operation"
WIDTH = 4


def loss_of(model: Blocks) -> Tensor:
    loss: Tensor = model(model.inputs).square().sum()
    return loss


def released(model: Blocks) -> list[bool]:
    """Return which of the weights are released."""
    return ["is released: at stage 3" in error_of(model.weight(number).sum) for number in range(3)]


@TOGETHER
def test_a_unit_whose_output_hides_tensors_stays_until_the_backward_or_the_step_ends(world: str) -> None:
    """One that has hidden a tensor once is as any other."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[list[bool]]:
        hidden = model[0].register_forward_hook(lambda _, __, out: Opaque(out))
        model[1].register_forward_pre_hook(lambda _, args: (getattr(args[0], "hidden", args[0]),))
        with torch.no_grad():
            model(model.inputs)
        seen = [released(model)]
        loss = loss_of(model)
        seen.append(released(model))
        loss.backward()
        seen.append(released(model))
        optimizer.zero_grad()
        model(model.inputs)
        optimizer.step()
        seen.append(released(model))
        hidden.remove()
        model(model.inputs)
        seen.append(released(model))
        return seen

    for seen, _ in on_blocks(world, WIDTH, act):
        assert [unit[:2] for unit in seen] == [[True, True], [False, True], [True, True], [True, True], [True, True]]


@TOGETHER
def test_inside_a_backward_a_unit_is_released_when_the_next_is_reached(world: str) -> None:
    def act(model: Blocks, _: ZeroOptimizer) -> list[list[bool]]:
        seen: list[list[bool]] = []
        with model[1].register_full_backward_pre_hook(lambda *_: seen.append(released(model))):
            model(model.inputs.clone().requires_grad_()).sum().backward()
        return [*seen, released(model)]

    for seen, _ in on_blocks(world, WIDTH, act):
        assert seen == [[True, False, True], [True, True, True]]


@TOGETHER
def test_a_step_counts_the_changes_of_all_ranks_on_every_rank(world: str) -> None:
    """A rank that has used only other weights, and owns no element of these, raises as well.

    A graph of weights that no rank used in the step stays right.
    """

    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[str]:
        inputs = model.inputs.clone().requires_grad_()  # else its graph needs no weight
        kept = [model[number](inputs).square().sum() for number in range(3)]
        model[optimizer.rank](model.inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [error_of(graph.backward) for graph in kept]

    for messages, _ in on_blocks(world, WIDTH, act):
        assert [CHANGED in message for message in messages] == [number < size_of(world) for number in range(3)]
        assert messages[2] == "nothing"
