"""The plain loop, bit for bit: the programs with which the bugs of the zoo are found."""

from __future__ import annotations

import pytest
import torch

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.plain import assert_same_model, plain_step, share
from ..support.programs import Program, Round, Step, check, locked_build
from ..support.rows import only, without
from .space import CLIPPED, HABITS


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [(1, "sgd"), (2, "sgd"), (2, "adamw"), (2, "adamw fused"), (3, "sgd")],
)
def test_every_class_and_path_gives_the_bits_of_the_plain_loop(stage: int, optimizer: str) -> None:
    for world_size, cap in ((1, 25.0), (3, 0.0005)):
        check(Program(world_size, stage, optimizer, cap, steps=(CLIPPED, Step(), Step())))


@pytest.mark.parametrize(
    ("stage", "ranks", "cap"), only([(0, 2, 1e-6), (1, 3, 25.0), (2, 3, 0.0005), (3, 5, 0.0005)], (2, 3, 0.0005))
)
def test_the_number_of_ranks_and_the_bucket_size_do_not_matter(stage: int, ranks: int, cap: float) -> None:
    """Also against a loop in which autograd adds up 24 micro-batches itself."""
    count = 24 if 24 % ranks == 0 else 2 * ranks
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        plain_step(model, optimizer, odd_loss, odd_batches(count, step, stage < 3), 24, 0.5)
        optimizer.zero_grad()

    def program(transport: Transport) -> Odd:
        ours = locked_build(transport.rank)
        zero = ZeroOptimizer(ours, torch.optim.AdamW, stage=stage, process_group=transport, bucket_cap_mb=cap, lr=1e-2)
        zero.divisor = 24
        for step in range(2):
            for batch in share(odd_batches(count, step, extra=stage < 3), transport.rank, ranks):
                odd_loss(ours, batch).backward()
            zero.clip_grad_norm_(0.5)
            zero.step()
            zero.zero_grad()
        zero.close()
        return ours

    for ours in on_threads(ranks, program):
        assert_same_model(ours, model)


@pytest.mark.law("norm and overflow")
@pytest.mark.parametrize(("stage", "norm_type"), without([(0, 2.0), (2, 2.0), (3, float("inf"))], (3, float("inf"))))
def test_clipping_is_that_of_the_plain_loop_for_every_norm(stage: int, norm_type: float) -> None:
    clips = ((0.3, norm_type), (0.2, norm_type), (float("inf"), norm_type))
    check(Program(3, stage, steps=(Step(clips=clips), Step(clips=clips[:1]), Step())))


@pytest.mark.parametrize(("stage", "clear"), only([(2, "zero_grad"), (3, "none")], (2, "zero_grad")))
def test_every_way_to_clear_a_gradient_works_after_steps_and_skipped_steps(stage: int, clear: str) -> None:
    for world_size in (1, 3):
        check(Program(world_size, stage, "sgd momentum", steps=HABITS[clear]))


@pytest.mark.parametrize("stage", [2])
def test_no_sync_changes_when_bytes_travel_never_what_they_sum_to(stage: int) -> None:
    for world_size in (1, 2, 3):
        check(Program(world_size, stage, steps=HABITS["no sync"]))


@pytest.mark.law("every rank enters")
def test_ranks_that_have_fewer_micro_batches_contribute_nothing() -> None:
    """Down to a rank that runs no backward at all, while the others wait."""
    for world_size in (2, 4):
        check(Program(world_size, 2, steps=(*HABITS["fewer"], Step((Round(ranks=1),) * 3), Step())))
