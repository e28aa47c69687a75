"""On accelerators the gradients of a bucket stay in p.grad until the last one is there: what a loop sees of that."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero.gradients.grad_publisher import ShardedGradient

from ..dials.loops import DIALS
from ..dials.record import ODD, config_with
from ..support.limits import BOUND
from ..support.machine.run import run
from ..support.plain import assert_same_model, assert_same_value
from ..support.small import with_sgd

LOOPS: Any = DIALS[0].values
pytestmark = [pytest.mark.usefixtures("launched", "unseen")]


@pytest.mark.first(0)
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 2), (1, 1), (2, 3)])
def test_training_by_buckets_has_the_bits_of_the_plain_loop(stage: int, world_size: int) -> None:
    parts = [part for part in ODD if part.kind != "sometimes"]  # else a bucket waits in vain
    config = config_with({"stage": stage, "world_size": world_size, "parts": tuple(parts), "bucket_cap_mb": 0.002})
    run(config, *LOOPS["no sync"], *LOOPS["clears, zeros"], *LOOPS["clears, none"])


class Chain(nn.Module):
    """Vectors whose gradients come in the reverse of the order in which a forward uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.linspace(0.3, 1.7, 7) * n) for n in (1, 3, 7))

    def forward(self, order: str, scale: float) -> Tensor:
        y = torch.full((7,), scale)
        for name in order:
            y = (y * self.get_parameter(name)).sin()
        return y.sum()


def raising(_: Tensor) -> None:
    raise ZeroDivisionError


def fail(model: Chain, order: str, scale: float) -> None:
    """Run a backward that raises before it reaches the first parameter of ``order``."""
    with model.get_parameter(order[0]).register_hook(raising), suppress(ZeroDivisionError):
        model(order, scale).backward()


@pytest.mark.parametrize("then", ["abc", "bac", "acb", "cba"])
def test_a_backward_that_raised_and_is_repeated_adds_no_gradient_twice(then: str) -> None:
    def loop(model: Chain, optimizer: Any) -> None:
        model("abc", 0.3).backward()  # from then on it is known that c comes first
        optimizer.step()
        optimizer.zero_grad()
        for step in range(2):
            fail(model, "abc", 0.5 + step)
            model(then, 0.7).backward()
            model(then, 0.9).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = Chain(), Chain()
    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loop(model, with_sgd(model, solo(), stage=2))
    assert_same_model(model, plain)


def test_what_a_loop_clears_after_a_backward_that_raised_stays_cleared() -> None:
    """Also if it is cleared by the module, on all ranks, of which one has failed."""

    def program(transport: Transport) -> Chain:
        model = Chain()
        optimizer = with_sgd(model, transport, stage=1)
        if transport.rank == 0:
            fail(model, "abc", 0.5)
        else:
            model("abc", 0.5).backward()
        model.zero_grad()
        model("abc", 0.7).backward()
        optimizer.step()
        optimizer.close()
        return model

    plain = Chain()
    plain("abc", 0.7).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(2, program, timeout=BOUND):
        assert_same_model(model, plain)


def test_an_edit_by_a_hook_counts_as_in_the_plain_loop_and_what_was_taken_is_refused() -> None:
    """In the backward c comes first, and is taken at once; b waits in p.grad for a, the last of the bucket."""

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    def loop(model: Chain, optimizer: Any, edited: str) -> None:
        with model.get_parameter(edited).register_post_accumulate_grad_hook(double):
            model("abc", 0.5).backward()
        optimizer.step()

    plain, model = Chain(), Chain()
    optimizer = with_sgd(model, solo(), stage=2)
    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1), "b")
    loop(model, optimizer, "b")
    assert_same_model(model, plain)
    for taken in "ca":
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=f"does not hold the gradient of '{taken}'"):
            loop(model, optimizer, taken)


@pytest.mark.parametrize("how", ["closed", "built again"])
def test_no_gradient_of_a_backward_that_raised_is_left_to_the_next_optimizer(how: str) -> None:
    model = Chain()
    optimizer = with_sgd(model, solo(), stage=2)
    fail(model, "abc", 0.5)
    assert not isinstance(model.b.grad, ShardedGradient)
    if how == "closed":
        optimizer.close()
    again = with_sgd(model, solo(), stage=2)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3
    model("abc", 0.5).backward()
    again.step()


def test_a_hook_may_set_the_divisor() -> None:
    def set_divisor(_: Tensor) -> None:
        optimizer.divisor = 1

    plain, model = Chain(), Chain()
    plain("abc", 0.5).backward()
    optimizer = with_sgd(model, solo(), stage=0)
    with model.b.register_post_accumulate_grad_hook(set_divisor):
        model("abc", 0.5).backward()
    assert_same_value([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")
