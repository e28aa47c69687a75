"""A training loop that calls the test between its phases, and places at which a step is interrupted.

The calls of a test must leave the bits of the plain loop: parameters, norms and states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero import ZeroOptimizer

from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.sides import OnRank, Side, same_as_plain

WORLD_SIZE, STEPS, TURNS, MAX_NORM = 2, 3, 2, 0.5
At = Callable[[str, Odd, ZeroOptimizer], None]


def batch_of(step: int, number: int) -> tuple[Tensor, bool]:
    return odd_batches(1, 100 * step + number)[0][0], step % 2 == 1


def nothing(*_: Any) -> None:
    return None


def train(stage: int, at: At = nothing) -> None:
    """Train on all ranks, and assert the plain loop's bits."""

    def loop(side: Side) -> list[Any]:
        def moment(name: str) -> None:
            if isinstance(side, OnRank):
                at(name, side.model, side.optimizer)

        def loss_of(model: Odd, rank: int, step: int, turn: int) -> Tensor:
            loss = odd_loss(model, batch_of(step, turn * WORLD_SIZE + rank))
            moment("forward")
            return loss

        found: list[Any] = []
        moment("built")
        for step in range(STEPS):
            for turn in range(TURNS):
                side.train(partial(loss_of, step=step, turn=turn))
                moment("backward" if turn < TURNS - 1 else "last backward")
            found.append(side.clip(MAX_NORM))
            moment("clip")
            side.step()
            moment("step")
            side.clear()
            moment("clear")
        if isinstance(side, OnRank):
            side.optimizer.consolidate_state_dict(None)
        return [*found, side.optimizer.state_dict()["state"]]

    settings = {"stage": stage, "bucket_cap_mb": 0.0005}
    divisor = WORLD_SIZE * TURNS
    same_as_plain(loop, build, torch.optim.AdamW, WORLD_SIZE, settings=settings, divisor=divisor, lr=1e-2)


class Stop(BaseException):
    """Raised in the middle of an operation, as by the user's code or the keyboard."""


def stop(*_: Any) -> None:
    raise Stop


def in_forward(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with model.layers[1].register_forward_pre_hook(stop):
        odd_loss(model, batch_of(step, 0))


def in_backward_of_activation(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with model.layers[0].register_forward_hook(lambda _, __, out: out.register_hook(stop) and None):
        loss = odd_loss(model, batch_of(step, 0))
    loss.backward()


def in_backward_of_parameter(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    loss = odd_loss(model, batch_of(step, 0))
    with model.first.weight.register_hook(stop):
        loss.backward()


def in_no_sync(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.no_sync():
        odd_loss(model, batch_of(step, 0)).backward()
        raise Stop


def in_gathered(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.gathered():
        raise Stop


def in_gathered_write(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.gathered(model.last.weight, write=True):
        raise Stop


def in_closure(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    def closure() -> None:
        odd_loss(model, batch_of(step, 0)).backward()
        raise Stop

    optimizer.step(closure)


def in_step_pre_hook(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    odd_loss(model, batch_of(step, 0)).backward()
    optimizer.clip_grad_norm_(1e-3)
    handle = optimizer.register_step_pre_hook(stop)
    try:
        optimizer.step()
    finally:
        handle.remove()


PLACES = [in_forward, in_backward_of_activation, in_backward_of_parameter, in_no_sync]
PLACES += [in_gathered, in_gathered_write, in_closure, in_step_pre_hook]
