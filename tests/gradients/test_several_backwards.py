"""Several backwards for one micro-batch are added up by rounds: the first ones of all ranks, then the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from ..support.loops import even, network, seeded
from ..support.plain import bits
from ..support.pool import GlooPool
from ..support.sides import AsPlain, OnRank, Side, same_as_plain

pytestmark = pytest.mark.contract

MICRO_BATCHES = 12  # in a step
SETTINGS: dict[str, Any] = {"bucket_cap_mb": 0.0005}


def real(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(inputs), targets)


def fake(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(-inputs.flip(0)), targets * 3)


def build() -> nn.Module:
    return seeded(7, network)


def loop_of(world_size: int, apart: bool) -> Callable[[Side], None]:
    """Return a loop. ``apart``: all backwards of a micro-batch except its last are inside `no_sync`."""

    def loop(side: Side) -> None:
        for begin in range(0, 2 * MICRO_BATCHES, world_size):
            side.train(lambda model, rank, begin=begin: real(model, begin + rank), sync=not apart)  # type: ignore[misc]
            side.train(lambda model, rank, begin=begin: fake(model, begin + rank))  # type: ignore[misc]
            if begin + world_size in (MICRO_BATCHES, 2 * MICRO_BATCHES):
                side.step()
                side.clear()

    return loop


@pytest.mark.parametrize(
    ("stage", "world_size", "apart"),
    [(0, 2, True), (1, 2, False), (2, 2, True), (3, 2, False), (2, 3, False), (3, 3, True), (1, 1, True)],
)
def test_several_backwards_of_a_micro_batch_are_added_up_by_rounds(stage: int, world_size: int, apart: bool) -> None:
    """Under `no_sync` those of a micro-batch are added up by themselves first."""
    loop, settings = loop_of(world_size, apart), {"stage": stage, **SETTINGS}
    same_as_plain(loop, build, torch.optim.AdamW, world_size, settings=settings, divisor=MICRO_BATCHES, lr=1e-2)


def test_the_orders_differ_and_that_of_one_rank_is_autograds() -> None:
    """Shows that the orders differ, so that the test above can fail."""
    ends = []
    for world_size, apart in ((1, False), (2, False), (2, True), (3, False)):
        side = AsPlain(build(), lambda updated: torch.optim.AdamW(updated, lr=1e-2), world_size, None, MICRO_BATCHES)
        loop_of(world_size, apart)(side)
        ends.append(torch.cat([p.detach().reshape(-1) for p in side.model.parameters()]))
    for number, one in enumerate(ends):
        assert all(not torch.equal(one, other) for other in ends[number + 1 :])
        assert torch.allclose(one, ends[0], atol=1e-3), "other numbers: two steps of at most 1e-2 do not end so close"
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for begin in (0, MICRO_BATCHES):
        for number in range(begin, begin + MICRO_BATCHES):
            real(plain, number).backward()
            fake(plain, number).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(bits(torch.cat([p.detach().reshape(-1) for p in plain.parameters()])), bits(ends[0]))


def trained_bits(group: Any, rank: int) -> list[list[Tensor]]:
    found = []
    for stage in range(4):
        model = build()
        arguments: dict[str, Any] = {"stage": stage, "process_group": group, "divisor": MICRO_BATCHES, **SETTINGS}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, **arguments)
        loop_of(2, True)(OnRank(model, optimizer))
        optimizer.close()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def test_so_it_is_on_processes(gloo: GlooPool) -> None:
    side = AsPlain(build(), lambda updated: torch.optim.AdamW(updated, lr=1e-2), 2, None, MICRO_BATCHES)
    loop_of(2, True)(side)
    for by_stage in gloo.run(trained_bits):
        for found in by_stage:
            for ours, theirs in zip(found, side.model.parameters(), strict=True):
                assert torch.equal(bits(ours), bits(theirs))
