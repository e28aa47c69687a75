"""Several backwards for one micro-batch are added up by rounds: the first ones of all ranks, then the second ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.loops import even, network, seeded
from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool

pytestmark = pytest.mark.contract

Batch = tuple[Tensor, Tensor]
STAGES = (0, 1, 2, 3)
MICRO_BATCHES = 12  # in a step


def real(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def fake(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(-batch[0].flip(0)), batch[1] * 3)


LOSSES = (real, fake)


def model_and_batches() -> tuple[nn.Module, list[Batch]]:
    return seeded(7, network), even(2 * MICRO_BATCHES)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(MICRO_BATCHES)
    optimizer.step()
    optimizer.zero_grad()


def by_rounds(model: nn.Module, batches: Sequence[Batch], world_size: int) -> None:
    """Run the first backward of ``world_size`` micro-batches, then the second of each."""
    for begin in range(0, len(batches), world_size):
        for loss_of in LOSSES:
            for batch in batches[begin : begin + world_size]:
                loss_of(model, batch).backward()


def by_micro_batches(model: nn.Module, batches: Sequence[Batch], world_size: int) -> None:
    """Run all backwards of a micro-batch before the next micro-batch, as most loops do."""
    for batch in batches:
        for loss_of in LOSSES:
            loss_of(model, batch).backward()


def with_a_sum_for_each(model: nn.Module, batches: Sequence[Batch], world_size: int) -> None:
    """Add up the gradients of each micro-batch first, and then these sums."""
    sums: list[Tensor] = []
    for batch in batches:
        for loss_of in LOSSES:
            loss_of(model, batch).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)] if sums else gradients
        model.zero_grad()
    for parameter, total in zip(model.parameters(), sums, strict=True):
        parameter.grad = total


Backwards = Callable[[nn.Module, Sequence[Batch], int], None]


def plain(backwards: Backwards, world_size: int) -> nn.Module:
    model, batches = model_and_batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for begin in range(0, len(batches), MICRO_BATCHES):
        backwards(model, batches[begin : begin + MICRO_BATCHES], world_size)
        step(model, optimizer)
    return model


def ours(group: Transport | dist.ProcessGroup, rank: int, world_size: int, stage: int, apart: bool) -> nn.Module:
    """Train with the library. ``apart``: all backwards of a micro-batch except its last are inside `no_sync`."""
    model, batches = model_and_batches()
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=group,
        divisor=MICRO_BATCHES,
        bucket_cap_mb=0.0005,
        lr=1e-2,
    )
    for begin in range(0, len(batches), MICRO_BATCHES):
        for batch in batches[begin + rank : begin + MICRO_BATCHES : world_size]:
            if apart:
                with optimizer.no_sync():
                    real(model, batch).backward()
            else:
                real(model, batch).backward()
            fake(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3)), 2])
def test_several_backwards_of_a_micro_batch_are_added_up_by_rounds(world_size: int, stage: int) -> None:
    expected = plain(by_rounds, world_size)
    for model in on_threads(world_size, lambda t: ours(t, t.rank, world_size, stage, False), timeout=20):
        assert_same_model(model, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3)), 2])
def test_under_no_sync_those_of_a_micro_batch_are_added_up_by_themselves_first(world_size: int, stage: int) -> None:
    expected = plain(with_a_sum_for_each, world_size)
    for model in on_threads(world_size, lambda t: ours(t, t.rank, world_size, stage, True), timeout=20):
        assert_same_model(model, expected)


def test_these_are_three_orders_but_by_rounds_one_rank_is_the_plain_loop() -> None:
    """Shows that the three orders differ, so that the tests above can fail."""
    orders = [plain(by_rounds, 2), plain(by_micro_batches, 2), plain(with_a_sum_for_each, 2), plain(by_rounds, 3)]
    flat = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in orders]
    for number, one in enumerate(flat):
        assert all(not torch.equal(one, other) for other in flat[number + 1 :])
        assert torch.allclose(one, flat[0], atol=1e-3), "other numbers: two steps of at most 1e-2 do not end so close"
    assert_same_model(plain(by_rounds, 1), orders[1])


def parameters_of(group: dist.ProcessGroup, rank: int, apart: bool) -> list[list[Tensor]]:
    found = [ours(group, rank, 2, stage, apart) for stage in STAGES]
    return [[parameter.detach().clone() for parameter in model.parameters()] for model in found]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.by_default("True")
def test_so_it_is_on_processes(gloo: GlooPool, apart: bool) -> None:
    expected = list(plain(with_a_sum_for_each if apart else by_rounds, 2).parameters())
    for by_stage in gloo.run(parameters_of, apart):
        for found in by_stage:
            for mine, theirs in zip(found, expected, strict=True):
                assert_same_bits(mine, theirs)
