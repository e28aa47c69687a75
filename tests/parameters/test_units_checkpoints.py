"""torch's other checkpoints at stage 3: a wrapper, and the composable one, which puts hooks on the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointError

from collectives import solo

from ..support.cases import Case, Fails, assert_parameters, check, net_of, plain_loop, sharded, train


def every_unit(model: Any) -> None:
    for block in model.blocks:
        checkpoint(block)


def one_unit(model: Any) -> None:
    checkpoint(model.blocks[1])


def wrapped(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def test_units_in_a_checkpoint_wrapper_have_the_bits_of_the_plain_loop() -> None:
    check(Case(prepared=wrapped), 1)


WHICH = pytest.mark.parametrize("which", [every_unit, one_unit])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@WHICH
def test_units_are_recomputed_with_the_bits_of_the_plain_loop(
    which: Callable[[Any], None], before: bool, world_size: int
) -> None:
    """Applied before the optimizer is built, or after."""
    try:
        check(Case(prepared=which) if before else Case(built=which), world_size)
    except CheckpointError as error:  # torch's own error, which lists the saved and the recomputed tensors
        pytest.fail(str(error))


def once(model: Any) -> None:
    """Add to the second unit a forward-pre hook that raises the first time it runs."""
    armed = [True]

    def hook(*_: Any) -> None:
        if armed and armed.pop():
            raise ZeroDivisionError

    model.blocks[1].register_forward_pre_hook(hook)


@pytest.mark.parametrize("fails", ["before", "inside"])
@WHICH
def test_a_forward_that_raises_leaves_an_object_that_goes_on(which: Callable[[Any], None], fails: str) -> None:
    case = Case(net_of(Fails), prepared=which)
    _, expected = plain_loop(case, 1)
    model, optimizer = sharded(case, solo())
    if fails == "before":
        once(model)
    for step in range(case.steps):
        if fails == "inside":
            model.blocks[1].armed = "forward"
        if fails == "inside" or step == 0:
            with pytest.raises(ZeroDivisionError):
                train(case, model, optimizer, step)
        model.blocks[1].armed = ""
        train(case, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered():
            assert_parameters(model, expected[step])
