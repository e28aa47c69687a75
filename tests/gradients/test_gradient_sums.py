"""What is added to a gradient and what is cleared from it, on some ranks or on all, is as in the plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.limits import BOUND
from ..support.loops import seeded
from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.plain import Clear, assert_same_model
from ..support.rows import rows
from ..support.sides import AsPlain, Side, same_as_plain
from ..support.small import TwoVectors, with_sgd


def loss_of(model: TwoVectors, rank: int) -> Tensor:
    return model(3.0 + rank)


def only_rank_0_uses_a(model: TwoVectors, rank: int) -> Tensor:
    return model(1.0, rank == 0)


def converted(side: Side) -> None:
    side.train(loss_of)
    side.model.to("cpu").float()  # assigns each p.grad.data to itself
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

    def loop(side: Side) -> None:
        for _ in range(2):
            side.train(lambda model, _: model(1.0))
            side.step()
            if isinstance(side, AsPlain):
                side.clear("zeros")
            else:
                torch.optim.SGD(side.model.parameters(), foreach=True).zero_grad(set_to_none=False)
        side.step()

    same_as_plain(loop, TwoVectors, settings={"bucket_cap_mb": 1e-6}, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("stage", rows([0, 3], [1, 2]))
def test_a_further_backward_may_follow_a_step_that_a_loss_scaler_has_skipped(stage: int) -> None:
    """At stage 0 the scaler has edited p.grad, and the optimizer has not been called."""

    def loop(model: nn.Linear, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), list[float]()
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.tensor([[1.0, float("inf") if step == 1 else 2.0]])
            scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.scale(model(torch.full((1, 2), 3.0)).sum()).backward()
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def program(transport: Transport) -> tuple[nn.Module, list[float]]:
        model = seeded(1, lambda: nn.Linear(2, 2))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.5, momentum=0.5)
        scales = loop(model, optimizer)
        optimizer.close()
        return model, scales

    plain = seeded(1, lambda: nn.Linear(2, 2))
    expected = loop(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5))
    for model, scales in on_threads(2, program, timeout=BOUND):  # equal batches: two ranks take the step of one
        assert scales == expected
        assert_same_model(model, plain)
