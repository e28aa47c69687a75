"""The plain loop, bit for bit: every stage, number of ranks, bucket size, optimizer and program."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.plain import assert_same_model, assert_same_states, plain_step, share
from ..support.programs import CLASSES, Program, Round, Step, compare, locked_build, run_rank

pytestmark = pytest.mark.contract

CAPS = (1e-6, 0.0005, 25.0)
STAGES = (0, 1, 2, 3)
SIZES = tuple(product((1, 2, 3, 4, 5, 6, 8), CAPS))
OFTEN = ((1, 25.0), (2, 1e-6), *product((3,), CAPS), (5, 0.0005), (8, 1e-6))  # others are in the slow tier


def check(program: Program) -> None:
    results = on_threads(program.world_size, lambda transport: run_rank(program, transport), timeout=5)
    plain = compare(program, results)
    states = results[0][3]
    assert states is not None
    assert_same_states(states, plain.optimizer.state_dict())


EVERY_CLASS = pytest.mark.parametrize("optimizer", CLASSES)
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)
THREE_STEPS = (Step(clips=((0.1, 2.0),)), Step(), Step())


@EVERY_CLASS
@EVERY_STAGE
@pytest.mark.by_default("0-adamw", "1-sgd", "2-sgd", "2-adamw", "2-adamw fused", "3-sgd")
def test_every_class_and_path_gives_the_bits_of_the_plain_loop(stage: int, optimizer: str) -> None:
    for world_size, cap in ((1, 25.0), (3, 0.0005)):
        check(Program(world_size, stage, optimizer, cap, steps=THREE_STEPS))


@EVERY_STAGE
def test_buckets_of_automatic_size_give_the_bits_of_the_plain_loop(stage: int) -> None:
    check(Program(2, stage, bucket_cap_mb="auto", steps=THREE_STEPS))


@pytest.mark.slow
@EVERY_CLASS
@EVERY_STAGE
def test_every_class_and_path_gives_the_bits_of_the_plain_loop_on_two_ranks(stage: int, optimizer: str) -> None:
    check(Program(2, stage, optimizer, 1e-6, steps=THREE_STEPS))


@pytest.mark.parametrize(
    ("world_size", "cap"),
    [pytest.param(*size, marks=() if size in OFTEN else pytest.mark.slow) for size in SIZES],
)
@EVERY_STAGE
@pytest.mark.by_default("0-2-1e-06", "1-3-25.0", "2-3-0.0005", "3-5-0.0005")
def test_the_number_of_ranks_and_the_bucket_size_do_not_matter(stage: int, world_size: int, cap: float) -> None:
    """Also against a loop in which autograd adds up 24 micro-batches itself."""
    count = 24 if 24 % world_size == 0 else 2 * world_size
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
            for batch in share(odd_batches(count, step, extra=stage < 3), transport.rank, world_size):
                odd_loss(ours, batch).backward()
            zero.clip_grad_norm_(0.5)
            zero.step()
            zero.zero_grad()
        zero.close()
        return ours

    for ours in on_threads(world_size, program):
        assert_same_model(ours, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@EVERY_STAGE
@pytest.mark.by_default("2-dtype1")
def test_other_dtypes_are_exact_too(stage: int, dtype: torch.dtype) -> None:
    for optimizer in ("adamw", "sgd momentum"):
        for world_size in (2, 3):
            check(Program(world_size, stage, optimizer, 0.0005, dtype=dtype, steps=(Step(clips=((0.1, 2.0),)), Step())))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@EVERY_STAGE
@pytest.mark.by_default("0-2.0", "2-2.0", "3-inf")
def test_clipping_is_that_of_the_plain_loop_for_every_norm(stage: int, norm_type: float) -> None:
    clips = ((0.3, norm_type), (0.2, norm_type), (float("inf"), norm_type))
    check(Program(3, stage, steps=(Step(clips=clips), Step(clips=clips[:1]), Step())))


@pytest.mark.parametrize("clear", ["zero_grad", "zeros", "module", "module zeros", "none"])
@EVERY_STAGE
@pytest.mark.by_default("2-zero_grad", "3-none")
def test_every_way_to_clear_a_gradient_works_after_steps_and_skipped_steps(stage: int, clear: str) -> None:
    steps = (
        Step(clear=clear),
        Step(clear=clear, step=False),
        Step(clear=clear, clips=((0.1, 2.0),)),
        Step(clear=clear),
    )
    for world_size in (1, 3):
        check(Program(world_size, stage, "sgd momentum", steps=steps))


@EVERY_STAGE
@pytest.mark.by_default("2")
def test_no_sync_changes_when_bytes_travel_never_what_they_sum_to(stage: int) -> None:
    off, on = Round(sync=False), Round()
    steps = (Step((off, off, on)), Step((off, off)), Step((on, off)), Step((on, off, on, off), clips=((0.1, 2.0),)))
    for world_size in (1, 2, 3):
        check(Program(world_size, stage, steps=steps))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.by_default("2")
def test_ranks_that_have_fewer_micro_batches_contribute_nothing(stage: int) -> None:
    """Down to a rank that runs no backward at all, while the others wait."""
    steps = (
        Step((Round(), Round(ranks=1))),
        Step((Round(ranks=2), Round(ranks=1))),
        Step((Round(ranks=1),) * 3),
        Step(),
    )
    for world_size in (2, 3, 4):
        check(Program(world_size, stage, steps=steps))


@EVERY_STAGE
@pytest.mark.by_default("2")
def test_freezing_and_unfreezing_is_honoured_at_the_next_backward(stage: int) -> None:
    steps = (
        Step(),
        Step(toggle=("frozen", "first.weight")),
        Step(toggle=("last.bias", "frozen")),
        Step(toggle=("first.weight", "last.bias")),
    )
    for cap in CAPS:
        check(Program(3, stage, bucket_cap_mb=cap, steps=steps))
