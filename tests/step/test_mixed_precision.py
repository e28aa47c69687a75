"""Mixed precision is that of the plain loop: 16-bit model, fp32 masters, sums in the accumulate dtype, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collectives import on_threads

from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank

pytestmark = pytest.mark.contract

EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)
EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
EVERY_SIZE = pytest.mark.parametrize(("world_size", "cap"), [(1, 25.0), (2, 1e-6), (3, 0.0005)], ids=["W1", "W2", "W3"])


def check(program: Program) -> None:
    results = on_threads(program.world_size, lambda transport: run_rank(program, transport), timeout=5)
    plain = compare(program, results)
    states = results[0][3]
    assert states is not None
    assert_same_states(states, plain.optimizer.state_dict())
    assert_same_masters(states, plain.numbers.updated)


def assert_same_masters(states: dict[str, object], updated: list[Tensor]) -> None:
    masters = states.get("masters", {})
    assert isinstance(masters, dict)
    for index, master in masters.items():
        assert_same_bits(master, updated[index], f"master weights of parameter {index}")


@EVERY_SIZE
@EVERY_PRECISION
@EVERY_STAGE
@pytest.mark.by_default(
    "0-bf16-W2",
    "2-bf16-W3",
    "2-bf16, added up in bf16-W3",
    "2-fp32, sent in bf16-W1",
    "2-fp32, sent in bf16-W2",
    "3-fp16-W2",
)
def test_training_is_that_of_the_plain_loop(stage: int, precision: str, world_size: int, cap: float) -> None:
    steps = (Step(clips=((0.1, 2.0),)), Step(), Step((Round(), Round(), Round())))
    for optimizer in ("adamw", "adamw fused", "sgd momentum"):
        check(Program(world_size, stage, optimizer, cap, precision=PRECISIONS[precision], steps=steps))


@EVERY_PRECISION
@EVERY_STAGE
@pytest.mark.full
def test_what_no_sync_adds_up_is_wide_and_rounded_once(stage: int, precision: str) -> None:
    off, on = Round(sync=False), Round()
    steps = (Step((off, off, on)), Step((off, off)), Step((on, off)), Step((on, off, on, off), clips=((0.1, 2.0),)))
    for world_size in (1, 2, 3):
        check(Program(world_size, stage, precision=PRECISIONS[precision], steps=steps))


@pytest.mark.parametrize("clear", ["zero_grad", "zeros", "module", "module zeros", "none"])
@EVERY_STAGE
@pytest.mark.by_default("2-module zeros")
def test_every_way_to_clear_a_gradient_works(stage: int, clear: str) -> None:
    steps = (Step(clear=clear), Step(clear=clear, step=False), Step(clear=clear, clips=((0.1, 2.0),)), Step())
    for world_size in (1, 3):
        check(Program(world_size, stage, "sgd momentum", precision=PRECISIONS["bf16"], steps=steps))


@EVERY_STAGE
@pytest.mark.full
def test_what_was_frozen_has_masters_from_its_first_step_on(stage: int) -> None:
    steps = (
        Step(),
        Step(toggle=("frozen", "first.weight")),
        Step(toggle=("last.bias",)),
        Step(toggle=("first.weight",)),
    )
    for cap in (1e-6, 25.0):
        check(Program(3, stage, bucket_cap_mb=cap, precision=PRECISIONS["bf16"], steps=steps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@EVERY_STAGE
@pytest.mark.by_default("2-dtype1")
def test_the_model_may_have_been_made_in_any_dtype(stage: int, dtype: torch.dtype) -> None:
    check(Program(3, stage, dtype=dtype, precision=PRECISIONS["bf16"]))
