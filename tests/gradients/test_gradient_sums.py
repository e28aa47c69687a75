"""What is added to a gradient and what is cleared from it, on some ranks or on all, is as in the plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Transport, on_threads

from ..support.models import odd_batches, odd_loss
from ..support.plain import Clear, assert_same_model, plain_step
from ..support.programs import locked_build
from ..support.sides import Side, same_as_plain
from ..support.small import TwoVectors, with_sgd

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])

pytestmark = pytest.mark.contract


def loss_of(model: TwoVectors, rank: int) -> Tensor:
    return model(3.0 + rank)


def only_rank_0_uses_a(model: TwoVectors, rank: int) -> Tensor:
    return model(1.0, rank == 0)


def unfrozen_later(side: Side) -> None:
    for step in range(2):
        side.model.a.requires_grad_(step == 1)
        for _ in range(2):
            side.train(loss_of)
        side.step()
        side.clear()


def converted(side: Side) -> None:
    side.train(loss_of)
    side.model.to("cpu").float()  # assigns each p.grad.data to itself
    side.step()


@STAGES
def test_a_parameter_that_is_unfrozen_or_converted_keeps_its_gradients(stage: int) -> None:
    for loop in (unfrozen_later, converted):
        same_as_plain(loop, TwoVectors, lr=0.1, settings={"stage": stage}, divisor=4)


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


def recomputed(side: Side) -> None:
    def loss_of(model: Any, rank: int) -> Tensor:
        hidden = checkpoint(model.first, model.embed(odd_batches(2)[rank][0]), use_reentrant=False)
        return checkpoint(lambda x: model.head(model.last(x)), hidden, use_reentrant=False).square().mean()

    side.train(loss_of)
    side.step()


@pytest.mark.parametrize(("stage", "loop"), enumerate([created, recomputed, differentiated]))
def test_graphs_that_are_kept_or_made_anew_count_once(stage: int, loop: Any) -> None:
    same_as_plain(loop, locked_build_0, lr=0.1, settings={"stage": stage})


def locked_build_0() -> nn.Module:
    return locked_build(0)


# -- clears ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "zeros"), (1, "module zeros"), (2, "none"), (0, "zero_grad"), (2, "zeros")]
)
def test_a_gradient_that_one_rank_alone_held_does_not_survive_a_clear(stage: int, how: Clear) -> None:
    def loop(side: Side) -> None:
        side.train(only_rank_0_uses_a, sync=False)
        side.clip(float("inf"))
        side.model.a.requires_grad_(False)
        side.clear(how)
        side.model.a.requires_grad_(True)
        side.train(loss_of)
        side.step()

    same_as_plain(loop, TwoVectors, lr=0.1, settings={"stage": stage, "bucket_cap_mb": 1e-6})


def stepped(plain: nn.Module, divisor: float) -> nn.Module:
    """Divide the gradients, and take a step of SGD."""
    for p in plain.parameters():
        assert p.grad is not None
        p.grad.div_(divisor)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return plain


def assert_all_are(models: list[nn.Module], plain: nn.Module) -> None:
    for model in models:
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_clearing_one_gradient_of_a_divergent_graph_leaves_the_others(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage)
        only_rank_0_uses_a(model, transport.rank).backward()
        model.a.grad = None
        model(2.0).backward()
        optimizer.step()
        return model

    plain = TwoVectors()
    for use_a in (True, False):
        plain(1.0, use_a).backward()
    plain.a.grad = None
    for _ in range(2):
        plain(2.0).backward()
    assert_all_are(on_threads(2, program), stepped(plain, 2))


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
    assert_all_are(on_threads(world_size, program), stepped(plain, 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_stage_0_zeroes_means_that_it_does_not_show(world_size: int) -> None:
    def loop(side: Side) -> None:
        side.train(lambda model, _: model(1.0))
        side.divisor = 5
        side.clear("zeros")
        side.train(lambda model, _: model(2.0))
        side.step()

    same_as_plain(loop, TwoVectors, lr=0.1, world_size=world_size, settings={"stage": 0})


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
    assert_all_are(on_threads(2, program), plain)
