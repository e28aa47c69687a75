"""Several backwards for one micro-batch are added up by rounds: the first ones of all ranks, then the second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ..support.loops import even, network, seeded
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

MICRO_BATCHES = 12  # in a step


def real(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(inputs), targets)


def fake(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(-inputs.flip(0)), targets * 3)


def build() -> nn.Module:
    return seeded(7, network)


def loop_of(world_size: int, apart: bool) -> Callable[[Side], None]:
    """Return a loop. ``apart``: all backwards of a micro-batch except its last are inside `no_sync`."""

    def loop(side: Side) -> None:
        for begin in range(0, 2 * MICRO_BATCHES, world_size):
            side.train(lambda model, rank, begin=begin: real(model, begin + rank), sync=not apart)  # type: ignore[misc]
            side.train(lambda model, rank, begin=begin: fake(model, begin + rank))  # type: ignore[misc]
            if begin + world_size in (MICRO_BATCHES, 2 * MICRO_BATCHES):
                side.step()
                side.clear()

    return loop


@pytest.mark.parametrize(
    ("stage", "world_size", "apart"),
    rows(
        [
            (0, 2, True),
            (2, 3, False),
        ],
        [
            (1, 2, False),
            (3, 2, False),
            (2, 2, True),
            (3, 3, True),
            (1, 1, True),
        ],
    ),
)
def test_several_backwards_of_a_micro_batch_are_added_up_by_rounds(stage: int, world_size: int, apart: bool) -> None:
    """Under `no_sync` those of a micro-batch are added up by themselves first."""
    loop, settings = loop_of(world_size, apart), {"stage": stage, "bucket_cap_mb": 0.0005}
    same_as_plain(loop, build, torch.optim.AdamW, world_size, settings=settings, divisor=MICRO_BATCHES, lr=1e-2)
