"""``optimizer.state`` is edited in place as in the plain loop, and is read as plain dicts."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from zero import ZeroOptimizer

from ...state.training import TOGETHER
from ...support.loops import seeded
from ...support.plain import assert_same_bits
from ...support.sides import Side, same_as_plain, train


def stack(width: int) -> Any:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))


def loss_of(model: Any, scale: float) -> Tensor:
    width = model[0].weight.shape[0]
    found: Tensor = model(torch.linspace(-1, 1, 2 * width).view(2, width) * scale).square().mean()
    return found


def scales(step: int) -> list[float]:
    return [1.0 + number / 8 + step for number in range(TOGETHER)]


train_on = partial(train, batches_of=scales, loss_of=loss_of)


def edit(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Edit states in place, as people do after a rewind: of parameters that are stepped beside others, also counts."""
    for p in (model[0].bias, model[2].weight):
        if state := optimizer.state[p]:
            state["exp_avg"] *= 0.5
            state["exp_avg_sq"].mul_(0.25)
            state["step"].zero_()
            optimizer.state[p]["step"].add_(1)
    for state in optimizer.state.values():
        state["exp_avg"].add_(0.125)


@pytest.mark.parametrize(
    ("world_size", "stage", "width", "partition"),
    [
        (2, 0, 4, "parameter"),
        (3, 1, 300, "element"),  # 300 * 300 elements are more than those of a run
        (6, 3, 4, "element"),  # some ranks have no part of a parameter's states
    ],
)
def test_edits_in_place_are_those_of_the_plain_loop(
    world_size: int, stage: int, width: int, partition: str, tmp_path: Path
) -> None:
    """Also after a load. Copies are plain dicts; other writes are errors (`dials.loops`)."""

    def loop(side: Side) -> None:
        train_on(side, range(2))
        edit(side.optimizer, side.model)
        train_on(side, range(2, 4))
        if isinstance(side.optimizer, ZeroOptimizer):
            for state in side.optimizer.state.values():
                for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), {**state}):
                    assert type(copied) is dict
                    assert_same_bits(copied["exp_avg"], state["exp_avg"])
                    copied["exp_avg"] = torch.zeros(1)
            zero.save(tmp_path / "saved", side.optimizer)
            side.optimizer.reset_states()
            assert not side.optimizer.state
            assert side.optimizer.describe().bytes["optimizer"] == 0
            zero.load(tmp_path / "saved", side.optimizer, rng=False)
        edit(side.optimizer, side.model)
        train_on(side, range(4, 6))

    settings, adam = {"stage": stage, "partition": partition}, torch.optim.Adam
    same_as_plain(loop, partial(stack, width), adam, world_size, settings=settings, divisor=TOGETHER, lr=0.01)
