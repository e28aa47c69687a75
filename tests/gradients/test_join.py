"""Ranks with different numbers of batches, inside `join`, train like the plain loop over all batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.loops import seeded
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from ..support.sides import Side, same_as_plain
from ..support.small import TwoVectors, plain_two, with_sgd
from ..support.sockets import on_sockets

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def small() -> nn.Module:
    return seeded(3, lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2 + (step + rank) % 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return a sum over tokens."""
    loss: Tensor = model(batch(step, rank).to(next(model.parameters()).dtype)).float().square().sum()
    return loss


@pytest.mark.parametrize(
    ("stage", "on"), [(0, on_threads), (1, on_threads), (2, on_threads), (3, on_threads), (3, on_sockets)]
)
def test_a_rank_that_left_makes_every_call_of_the_others(stage: int, on: Any) -> None:
    def program(transport: Transport) -> list[Any]:
        model = small()
        model.register_buffer("mean", torch.full((2,), float(transport.rank)))
        optimizer = ZeroOptimizer(model, SGD, lr=0.1, stage=stage, process_group=transport)
        model.mean.fill_(transport.rank)  # type: ignore[operator, union-attr]
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.sum_over_ranks(2)))
        with optimizer.join():
            if transport.rank == 0:
                for _ in range(2):
                    loss_of(model, 0, 0).backward()
                    seen.append(optimizer.full_grad(model[0].weight))
                    with optimizer.gathered(model[0].weight, write=True):
                        seen.append(optimizer.clip_grad_norm_(1.0))
                        model(batch(0, 0))
                        model[0].weight.data.mul_(2)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                    with optimizer.gathered(), torch.no_grad():
                        model(batch(0, 0))
                    seen.append(optimizer.check_replicas())
                    seen.append(optimizer.full_master(model[2].bias))
                    optimizer.broadcast_buffers()
                    optimizer.consolidate_state_dict(0)
                    assert optimizer.exchange(b"x") == [b"x", b""]
            with pytest.raises(ValueError, match="not one of this optimizer's parameters"):
                optimizer.gathered(torch.ones(2)).__enter__()
        optimizer.check_replicas()
        return [seen, model.mean]

    (seen, _), (nothing, mean) = on(2, program, timeout=BOUND)
    assert nothing == []
    assert mean.tolist() == [0, 0]
    assert len(seen) == 10
    assert seen[2] == 2


@pytest.mark.parametrize(("stage", "overflow"), [(0, False), (0, True), (1, True), (2, False), (3, False), (3, True)])
def test_a_scaler_works_where_a_rank_left(stage: int, overflow: bool) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = loss_of(model, 0, 0)
        scaler.scale(loss / 0 if overflow else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, SGD, lr=0.1, divisor=1, stage=stage, process_group=transport)
        with optimizer.join():
            if transport.rank == 1:
                step(model, optimizer)
        optimizer.close()
        return model

    expected = small()
    step(expected, SGD(expected.parameters(), lr=0.1))
    for model in on_threads(2, program, timeout=BOUND):
        assert_same_model(model, expected)


@pytest.mark.parametrize("kind", rows(["a number", "numpy's", "a tensor"], ["the same tensor", "a new key"]))
def test_an_option_keeps_its_kind_on_the_way_to_a_rank_that_left(kind: str) -> None:
    """A step with a rate in fp32 has other bits than one with a Python float. Betas stay a tuple."""

    def loop(side: Side) -> Any:
        group = side.optimizer.param_groups[0]
        given = group["lr"]
        with side.join():
            for step in range(3 if 0 in side.ranks else 0):
                side.train(lambda model, _, step=step: loss_of(model, step, 0), ranks=[0])  # type: ignore[misc]
                side.divisor = 1.5 + step
                rate, group["betas"] = 0.1 / (step + 3), (0.5, 0.75)
                if kind == "a new key":
                    group["note"] = None
                if kind == "the same tensor":
                    given.fill_(rate)
                else:
                    group["lr"] = {"numpy's": np.float32(rate), "a tensor": torch.tensor(rate)}.get(kind, rate)
                side.step()
                side.clear()
        assert (group["lr"] is given) == (kind == "the same tensor")
        assert group["betas"] == (0.5, 0.75)
        return group.get("note", "no note")

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters()), "lr": torch.tensor(0.1) if kind == "the same tensor" else 0.1}]

    same_as_plain(loop, small, ADAMW, groups=groups, settings={"stage": 2}, divisor=1, foreach=False)


def test_a_backward_that_an_exception_ended_is_completed_before_the_block() -> None:
    """The other rank's backward is outside `join`, and waits for all means there."""

    def program(transport: Transport) -> Any:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=0)
        if transport.rank:
            model.b.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        assert ("ZeroDivisionError" in error_of(model(1.0 + transport.rank).backward)) == bool(transport.rank)
        with optimizer.join():
            optimizer.step()
        return model

    expected: Any = plain_two([(1.0, True), (2.0, True)], 2)
    for model in on_threads(2, program, timeout=BOUND):
        assert_same_model(model, expected)
        assert_same_bits(model.b.grad, expected.b.grad)  # outside of the block it is shown again
