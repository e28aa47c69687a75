"""A training loop that calls the test between its phases, and places at which a step is interrupted.

The calls of a test must leave the bits of the plain loop: parameters, norms and states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.limits import BOUND
from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_states, plain_step

WORLD_SIZE, STEPS, TURNS, MAX_NORM = 2, 3, 2, 0.5
ARGUMENTS: dict[str, Any] = {"lr": 1e-2, "bucket_cap_mb": 0.0005, "divisor": WORLD_SIZE * TURNS}
At = Callable[[str, Odd, ZeroOptimizer], None]


@dataclass(frozen=True)
class Result:
    parameters: list[Tensor]
    norms: list[Tensor]
    states: dict[str, Any]


def batch_of(step: int, number: int) -> tuple[Tensor, bool]:
    return odd_batches(1, 100 * step + number)[0][0], step % 2 == 1


@functools.cache
def plain() -> Result:
    model, norms = build(0), list[Tensor]()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batches = [batch_of(step, number) for number in range(WORLD_SIZE * TURNS)]
        norm = plain_step(model, adamw, odd_loss, batches, WORLD_SIZE * TURNS, MAX_NORM)
        assert norm is not None
        norms.append(norm)
        model.zero_grad()
    return Result([p.detach() for p in model.parameters()], norms, adamw.state_dict())


def one_step(model: Odd, optimizer: ZeroOptimizer, step: int, norms: list[Tensor], at: At) -> None:
    for turn in range(TURNS):
        loss = odd_loss(model, batch_of(step, turn * optimizer.world_size + optimizer.rank))
        at("forward", model, optimizer)
        loss.backward()
        at("backward" if turn < TURNS - 1 else "last backward", model, optimizer)
    norms.append(optimizer.clip_grad_norm_(MAX_NORM))
    at("clip", model, optimizer)
    optimizer.step()
    at("step", model, optimizer)
    optimizer.zero_grad()
    at("clear", model, optimizer)


def finished(model: Odd, optimizer: ZeroOptimizer, norms: list[Tensor]) -> Result:
    states = []
    for rank in range(optimizer.world_size):
        optimizer.consolidate_state_dict(rank)
        if optimizer.rank == rank:
            states.append(optimizer.state_dict())
    optimizer.close()
    return Result([p.detach() for p in model.parameters()], norms, states[0])


def nothing(*_: Any) -> None:
    return None


def trained(stage: int, at: At = nothing, **arguments: Any) -> list[Result]:
    """Train on all ranks; return the result of each."""
    models = [build(rank) for rank in range(WORLD_SIZE)]

    def program(transport: Transport) -> Result:
        model = models[transport.rank]
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, **{**ARGUMENTS, **arguments})
        norms: list[Tensor] = []
        at("built", model, optimizer)
        for step in range(STEPS):
            one_step(model, optimizer, step, norms, at)
        return finished(model, optimizer, norms)

    return on_threads(WORLD_SIZE, program, timeout=BOUND)


def assert_plain_loop(results: list[Result]) -> None:
    for result in results:
        for ours, theirs in zip(result.parameters, plain().parameters, strict=True):
            assert_same_bits(ours, theirs, "a parameter")
        for ours, theirs in zip(result.norms, plain().norms, strict=True):
            assert_same_bits(ours, theirs, "a norm")
        assert_same_states(result.states, plain().states)


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
