"""Memory on an accelerator, tested on the CPU: what no backward needs is given back, and the bits are the plain loop's.

There torch's allocator takes and gives memory in microseconds. Here the library is made to believe so of the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collectives import Transport, on_threads
from collectives.pool import holders
from zero import ZeroOptimizer

from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_model, plain_step
from ..support.programs import Program, Round, Step, compare, locked_build, run_rank

SMALL = 0.005  # MiB: several parameters in a bucket, and several buckets
STEPS = (
    Step((Round(), Round()), clips=((0.1, 2.0),)),
    Step((Round(), Round()), divisor=3.0, clear="zeros"),
    Step((Round(sync=False), Round()), clear="zeros"),
    Step((Round(), Round()), clips=((0.1, 2.0),), clear="module zeros"),
    Step((Round(),), step=False, clear="module"),
    Step((Round(), Round(sync=False)), divisor=0.5, toggle=("layers.0.weight",), clear="none"),
    Step((Round(), Round(), Round())),
)


@pytest.fixture(autouse=True)
def memory_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("collectives.pool", "zero.runtime.accumulator"):
        monkeypatch.setattr(f"{module}.worth_keeping", lambda device: False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.by_default("None-1-0", "None-1-1", "None-2-0", "None-2-2", "bf16-1-0", "bf16-3-3")
def test_the_bits_are_those_of_the_plain_loop(precision: str | None, world_size: int, stage: int) -> None:
    program = Program(world_size, stage, bucket_cap_mb=SMALL, steps=STEPS)
    program = replace(program, precision=None if precision is None else PRECISIONS[precision])
    compare(program, on_threads(world_size, lambda transport: run_rank(program, transport)))


def train(transport: Transport, stage: int, divisor: float | None = None) -> list[dict[str, int]]:
    """Return the bytes that a rank holds after each backward of two steps, after the step, and after `zero_grad`."""
    model = locked_build(0)
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, process_group=transport, divisor=divisor, bucket_cap_mb=SMALL
    )
    found = []

    def look() -> None:
        told = optimizer.describe()
        pool = parts_of(optimizer).shard_group.pool
        found.append({"gradients": told.bytes["gradients"], "scratch": pool.held_bytes})

    for batch in odd_batches(2, extra=False):
        for _ in range(2):
            odd_loss(model, batch).backward()
            look()
        optimizer.step()
        optimizer.zero_grad()
        look()
    optimizer.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_between_steps_no_gradient_and_no_scratch_takes_memory(world_size: int, stage: int) -> None:
    for found in on_threads(world_size, lambda transport: train(transport, stage)):
        assert all(each["scratch"] == 0 for each in found)
        for first, second, cleared in (found[:3], found[3:]):
            assert first["gradients"] == second["gradients"] > 0
            assert cleared["gradients"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.by_default("1-0", "2-0", "2-1")
def test_nothing_holds_the_memory_of_gradients_that_were_cleared(world_size: int, stage: int) -> None:
    """No view of a gradient that is kept for the next backward, either."""

    def program(transport: Transport) -> list[int]:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, bucket_cap_mb=SMALL)
        odd_loss(model, odd_batches(1, extra=False)[0]).backward()
        optimizer.step()
        buffers = [tensor.detach() for bucket in optimizer._storage.buckets for tensor in bucket.grad.tensors()]
        optimizer.zero_grad()
        return [holders(buffer) for buffer in buffers]

    for found in on_threads(world_size, program):
        assert found == [0] * len(found) != []


def test_one_rank_that_divides_by_1_keeps_sum_and_mean_once() -> None:
    (apart,) = on_threads(1, lambda transport: train(transport, 0, 3.0))
    (shared,) = on_threads(1, lambda transport: train(transport, 0))
    assert [2 * each["gradients"] for each in shared] == [each["gradients"] for each in apart]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_divisor_that_is_set_after_the_backwards_divides_their_sum(world_size: int, clipped: bool) -> None:
    batches = odd_batches(4 * world_size, extra=False)
    steps = [batches[: 2 * world_size], batches[2 * world_size :]]

    def program(transport: Transport) -> torch.nn.Module:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=0, process_group=transport, lr=1e-2)
        for divisor, given in zip((3.0, 1.0), steps, strict=True):
            for batch in given[transport.rank :: world_size]:
                odd_loss(model, batch).backward()
            optimizer.divisor = divisor
            if clipped:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return model

    plain = locked_build(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for divisor, given in zip((3.0, 1.0), steps, strict=True):
        plain_step(plain, optimizer, odd_loss, given, divisor, 0.1 if clipped else None)
        plain.zero_grad()
    for model in on_threads(world_size, program):
        assert_same_model(model, plain)


def test_one_rank_may_edit_the_mean_between_backwards_since_it_is_the_sum() -> None:
    """On the CPU, where the sum has memory of its own, the edit is refused."""
    batches = odd_batches(2, extra=False)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        odd_loss(model, batches[0]).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.3)
        odd_loss(model, batches[1]).backward()
        optimizer.step()
        return model

    def program(transport: Transport) -> torch.nn.Module:
        model = locked_build(0)
        return train(model, ZeroOptimizer(model, torch.optim.AdamW, stage=0, process_group=transport))

    plain = locked_build(0)
    assert_same_model(*on_threads(1, program), train(plain, torch.optim.AdamW(plain.parameters())))
