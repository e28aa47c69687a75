"""What `p.grad` shows after a backward is right, or every use of it raises and says what to call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import CollectiveError, Loopback, Transport, on_threads, solo
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.rows import rows
from ..support.sides import AsPlain
from ..support.small import TwoVectors, plain_two, with_sgd
from ..support.trainings import trained


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("whenever_seen")
@pytest.mark.parametrize(("world_size", "clips"), rows([(1, False), (2, True)], [(2, False)]))
def test_stage_0_honours_edits_of_the_mean_also_between_clips(world_size: int, clips: bool) -> None:
    def edited(model: Any, optimizer: Any, clip: Callable[[float], object]) -> nn.Module:
        clip(1e9 if clips else 0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.one.grad = model.one.grad * 2
        model.scale.grad = None
        if clips:
            clip(0.005)
        optimizer.step()
        return model

    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, 0, 0)
        return edited(model, optimizer, optimizer.clip_grad_norm_)

    def plain_program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, 0, 0)
        optimizer.close()  # the means are the user's own, and the model is plain
        again = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return edited(model, again, lambda norm: clip_grad_norm_(model.parameters(), norm))

    for ours, plain in zip(on_threads(world_size, program), on_threads(world_size, plain_program), strict=True):
        assert_same_model(ours, plain)
        assert_same_value(gradients_of(ours), gradients_of(plain), "gradients")


def test_after_a_backward_that_raised_gradients_are_shown_or_stay_cleared() -> None:
    """From the next call of all ranks on; `torch.autograd.grad` changes nothing of it."""
    model, expected = TwoVectors(), plain_two([(2.0, False)], 1).b.grad
    optimizer = with_sgd(model, solo(), stage=0)
    with model.b.register_post_accumulate_grad_hook(lambda _: 1 / 0), pytest.raises(ZeroDivisionError):
        model(2.0).backward()
    assert model.a.grad is not None
    model.a.grad = None
    for call in (optimizer.check_replicas, lambda: torch.autograd.grad(model(1.0), [model.b])):
        call()
        assert_same_value([model.a.grad, model.b.grad], [None, expected], "gradients")


class Signed(nn.Module):
    """A model of which one parameter has -0.0, and a gradient that is nothing but zeros of both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = nn.Parameter(torch.tensor([-0.0, -0.0, 1.0]).repeat(40))
        self.other = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return (self.zeros * torch.tensor([-0.0, 0.0, -0.0]).repeat(40)).sum() + self.other.square().sum()


@pytest.mark.parametrize("world_size", rows([2], [1]))
def test_stage_0_keeps_the_signs_of_zeros_that_are_written_into_a_gradient(world_size: int) -> None:
    def loop(model: Any, optimizer: Any, clip: Callable[[], object]) -> nn.Module:
        for _ in range(2):
            model().backward()
            model.zeros.grad.fill_(-0.0)
            model().backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
            model().backward()
            clip()
            model.zeros.grad.fill_(-0.0)
            optimizer.step()
            optimizer.zero_grad()
        return model

    def program(transport: Transport) -> nn.Module:
        model = Signed()
        optimizer = with_sgd(model, transport, stage=0, momentum=0.5)
        loop(model, optimizer, lambda: optimizer.clip_grad_norm_(0.5))
        assert_same_bits(optimizer.state[model.zeros]["momentum_buffer"], kept["momentum_buffer"])
        optimizer.close()
        return model

    plain = Signed()
    again = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    loop(plain, again, lambda: clip_grad_norm_(plain.parameters(), 0.5))
    kept = again.state[plain.zeros]
    assert any(bool((value == 0).logical_and(value.signbit()).any()) for value in (plain.zeros, *kept.values()))
    for model in on_threads(world_size, program, timeout=BOUND):
        assert_same_model(model, plain)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2)])
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

    plain = AsPlain(TwoVectors(), lambda updated: torch.optim.SGD(updated, lr=0.1), world_size, divisor=1)
    plain.train(lambda model, _: model(5.0), sync=False)
    for local in plain.local:
        del local[0]  # of ``a``
    plain.train(lambda model, _: model(1.0, False))
    plain.train(lambda model, _: model(2.0))
    plain.step()
    for model in on_threads(world_size, program):
        assert_same_model(model, plain.model)


def test_a_gradient_that_a_hook_changes_after_it_was_handed_over_is_loud() -> None:
    """torch's documentation forbids this to hooks: if autograd gave one tensor to two parameters, it would show."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer([a, b], torch.optim.SGD, lr=0.1)
    b.register_hook(lambda gradient: [None, gradient.mul_(2)][0])
    (a + b).square().sum().backward()
    with pytest.raises(RuntimeError, match="modified in place after autograd had handed it over"):
        (a + b).square().sum().backward()
    optimizer.zero_grad()


def test_a_backward_that_a_broken_connection_ended_is_forgotten_without_a_wait() -> None:
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "send":
            armed[0] = False
            raise OSError("unplugged")

    def program(transport: Transport) -> None:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, bucket_cap_mb=1e-6)
        loss = model(1.0)
        armed[0] = armed[0] or transport.rank == 0
        with pytest.raises((OSError, CollectiveError)):
            loss.backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(CollectiveError, match="unplugged"):
            optimizer.step()

    Loopback[None](2, timeout=BOUND, interfere=interfere).run(program)


class Raises(torch.autograd.Function):
    """The identity, whose backward raises on rank 0, or changes the gradient that it is given in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.how == "raises":
            raise ZeroDivisionError
        return gradients[0].mul_(3.0) if ctx.how == "in place" else gradients[0], None


class Chained(nn.Module):
    """Gradients come in the order scale, last, and that of ``beside``, which is the tensor that `Raises` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last, self.scale = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(4))

    def forward(self, how: str = "") -> Tensor:
        inner: Tensor = Raises.apply(self.first * 3.0, how)  # type: ignore[no-untyped-call]
        return ((inner + self.beside) * self.last * self.scale).square().sum()


@pytest.mark.parametrize("stage", rows([0, 2], [1]))
@pytest.mark.parametrize("number", [0, 1])
def test_none_after_a_backward_that_raised_on_one_rank_clears_what_the_others_contributed(
    stage: int, number: int
) -> None:
    """``number``: of the micro-batch."""

    def program(transport: Transport) -> Tensor:
        model = Chained()
        optimizer = with_sgd(model, transport, stage=stage)
        for micro in range(3):
            fails = micro == number and transport.rank == 0
            with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                model("raises" if fails else "").backward()
            if micro == number:
                model.last.grad = None
        optimizer.step()
        return model.last.detach()

    alone = Chained()
    for _ in range(2 * (2 - number)):
        alone().backward()
    assert alone.last.grad is not None
    alone.last.grad /= 2
    torch.optim.SGD([alone.last], lr=0.1).step()
    for last in Loopback[Tensor](2).run(program):
        assert_same_bits(last, alone.last.detach(), "the parameter")


@pytest.mark.parametrize("stage", rows([0, 2], [1, 3]))
def test_a_further_gradient_that_its_function_goes_on_to_edit_is_loud(stage: int) -> None:
    """A plain loop has added it before; a rank adds a bucket's gradients together."""
    _optimizer = with_sgd(model := Chained(), solo(), stage=stage)
    model().backward()
    with pytest.raises(RuntimeError, match="the gradient of 'beside' was modified in place after"):
        model("in place").backward()  # the last gradient of the only bucket comes in this backward


@pytest.mark.parametrize("stage", rows([2], [1, 3]))
def test_after_the_error_for_an_assigned_gradient_training_goes_on(stage: int) -> None:
    optimizer = with_sgd(model := Chained(), solo(), stage=stage)
    model().backward()
    model.beside.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="the gradient of 'beside' was assigned from outside"):
        model().backward()
    model().backward()
    optimizer.step()
    alone = Chained()
    for _ in range(2):
        alone().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    with optimizer.gathered():
        assert_same_model(model, alone)
