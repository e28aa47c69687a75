"""What is added to a gradient and what is cleared from it, on some ranks or on all, is as in the plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads

from ..support.models import odd_batches, odd_loss
from ..support.plain import Clear, assert_same_model, plain_step
from ..support.programs import locked_build
from ..support.sides import Side, same_as_plain
from ..support.small import TwoVectors, with_sgd


def loss_of(model: TwoVectors, rank: int) -> Tensor:
    return model(3.0 + rank)


def only_rank_0_uses_a(model: TwoVectors, rank: int) -> Tensor:
    return model(1.0, rank == 0)


def converted(side: Side) -> None:
    side.train(loss_of)
    side.model.to("cpu").float()  # assigns each p.grad.data to itself
    side.step()


def differentiated(side: Side) -> None:
    """Call `torch.autograd.grad` between backwards."""
    for round_ in range(2):

        def loss_of(model: Any, rank: int, round_: int = round_) -> Tensor:
            loss = odd_loss(model, odd_batches(2, round_)[rank])
            torch.autograd.grad(loss, [model.last.weight, model.first.weight], retain_graph=True)
            return loss

        side.train(loss_of)
        torch.autograd.grad(odd_loss(side.model, odd_batches(1, 9)[0]), list(side.model.last.parameters()))
    side.step()


def created(side: Side) -> None:
    """Keep the graph of a backward."""

    class Loss:
        def __init__(self, loss: Tensor) -> None:
            self.backward = partial(loss.backward, create_graph=True)

    side.train(lambda model, rank: odd_loss(model, odd_batches(2)[rank]))
    side.train(lambda model, rank: Loss(odd_loss(model, odd_batches(2, 1)[rank]) + model.one.sum()))  # type: ignore
    side.step()


def locked_build_0() -> nn.Module:
    return locked_build(0)


def one_alone_held(side: Side, how: Clear) -> None:
    """Clear a gradient that one rank alone has."""
    side.train(only_rank_0_uses_a, sync=False)
    side.clip(float("inf"))
    side.model.a.requires_grad_(False)
    side.clear(how)
    side.model.a.requires_grad_(True)
    side.train(loss_of)
    side.step()


CLEARS: list[tuple[int, Clear]] = [(0, "zeros"), (1, "module zeros"), (2, "none"), (0, "zero_grad"), (2, "zeros")]


@pytest.mark.parametrize(
    ("loop", "build", "stage", "cap"),
    [
        *((converted, TwoVectors, stage, 25.0) for stage in range(4)),
        (created, locked_build_0, 0, 25.0),
        (differentiated, locked_build_0, 2, 25.0),
        *((partial(one_alone_held, how=how), TwoVectors, stage, 1e-6) for stage, how in CLEARS),
    ],
)
def test_the_sums_are_those_of_the_plain_loop(loop: Any, build: Any, stage: int, cap: float) -> None:
    same_as_plain(loop, build, lr=0.1, settings={"stage": stage, "bucket_cap_mb": cap}, divisor=4)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 1), (0, 2)])
def test_what_no_sync_left_and_was_cleared_does_not_come_back(stage: int, world_size: int) -> None:
    """All gradients of a bucket are stashed; one is cleared, and the next backward does not reach its parameter."""

    def program(transport: Transport) -> nn.Module:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage, divisor=1)
        with optimizer.no_sync():
            model(5.0).backward()
        model.a.grad = None
        model(1.0, False).backward()
        model(2.0).backward()
        optimizer.step()
        return model

    plain, once, twice = TwoVectors(), TwoVectors(), TwoVectors()
    once(5.0).backward()
    once(1.0, False).backward()
    twice(2.0).backward()
    assert once.b.grad is not None
    plain.a.grad, plain.b.grad = torch.full((32,), -0.0), torch.full((40,), -0.0)
    for _ in range(world_size):
        plain.b.grad += once.b.grad
    for _ in range(world_size):
        for parameter, other in zip(plain.parameters(), twice.parameters(), strict=True):
            parameter.grad += other.grad  # type: ignore[operator]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(world_size, program):
        assert_same_model(model, plain)


def test_another_optimizer_may_set_our_gradients_to_zero() -> None:
    """As `torch.optim` does for all of its parameters at once: the gradients exist, and are zero."""

    def program(transport: Transport) -> nn.Module:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, momentum=0.9)
        other = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
        for _ in range(2):
            model(1.0).backward()
            optimizer.step()
            other.zero_grad(set_to_none=False)
        optimizer.step()
        return model

    plain = TwoVectors()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        plain_step(plain, sgd, lambda model, scale: model(scale), [1.0, 1.0], 2)
        sgd.zero_grad(set_to_none=False)
    sgd.step()
    for model in on_threads(2, program):
        assert_same_model(model, plain)
