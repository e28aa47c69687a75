"""``optimizer.state`` is edited in place, other writes are errors, and `reset_states` forgets states."""

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
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ...dials.loops import step, steps
from ...dials.record import config_with
from ...state.training import TOGETHER
from ...support.loops import seeded
from ...support.machine.program import Backward, Command, Reset
from ...support.machine.run import run
from ...support.plain import assert_same_bits
from ...support.sides import OnRank, Side, same_as_plain, train

RESETS: list[Command] = [
    *(*steps(1), Backward(2), Backward(3, sync=False), Reset((0, 4, 5, 7, 9)), *step(4)),
    *(*step(5, Reset((0, 3)), last=False), *steps(1), Reset(), *steps(2)),
]


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 0, "bucket_cap_mb": 25.0},
        {"stage": 1, "optimizer": "adagrad", "precision": "bf16"},
        {"stage": 2, "optimizer": "adamw fused", "world_size": 4, "sharding_factor": 2},
        {"stage": 2, "optimizer": "adagrad", "precision": "bf16", "offload": True},
        {"stage": 3, "optimizer": "shampoo"},
    ],
    ids=str,
)
def test_states_that_are_reset_begin_anew_as_in_the_plain_loop(changes: dict[str, Any]) -> None:
    run(config_with({"world_size": 3, **changes}), *RESETS)


def stack(width: int) -> Any:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))


def loss_of(model: Any, scale: float) -> Tensor:
    width = model[0].weight.shape[0]
    found: Tensor = model(torch.linspace(-1, 1, 2 * width).view(2, width) * scale).square().mean()
    return found


def scales(step: int) -> list[float]:
    return [1.0 + number / 8 + step for number in range(TOGETHER)]


train_on = partial(train, batches_of=scales, loss_of=loss_of)


def trained(transport: Transport, stage: int) -> tuple[Any, ZeroOptimizer]:
    model = stack(4)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport)
    train_on(OnRank(model, optimizer), range(2))
    return model, optimizer


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
        (2, 2, 4, "element"),
        (3, 3, 4, "element"),
    ],
)
def test_edits_in_place_are_those_of_the_plain_loop(
    world_size: int, stage: int, width: int, partition: str, tmp_path: Path
) -> None:
    """Also after a load."""

    def loop(side: Side) -> None:
        train_on(side, range(2))
        edit(side.optimizer, side.model)
        train_on(side, range(2, 4))
        if isinstance(side.optimizer, ZeroOptimizer):
            zero.save(tmp_path / "saved", side.optimizer)
            side.optimizer.reset_states()
            zero.load(tmp_path / "saved", side.optimizer, rng=False)
        edit(side.optimizer, side.model)
        train_on(side, range(4, 6))

    settings, adam = {"stage": stage, "partition": partition}, torch.optim.Adam
    same_as_plain(loop, partial(stack, width), adam, world_size, settings=settings, divisor=TOGETHER, lr=0.01)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_read_can_be_copied_and_pickled_as_plain_dicts(stage: int) -> None:
    """Also on a rank that has no part of the parameter's states. Other writes are errors (`dials.loops`)."""

    def program(transport: Transport) -> None:
        _, optimizer = trained(transport, stage)
        for state in optimizer.state.values():
            for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), {**state}):
                assert type(copied) is dict
                assert_same_bits(copied["exp_avg"], state["exp_avg"])
                copied["exp_avg"] = torch.zeros(1)
        assert type(copy.copy(optimizer.state)) is dict
        optimizer.reset_states()
        assert not optimizer.state
        assert optimizer.describe().bytes["optimizer"] == 0

    on_threads(6, program, timeout=10)
