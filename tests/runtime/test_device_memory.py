"""On an accelerator what no backward needs is given back, and the bits are the plain loop's.

There torch's allocator takes and gives memory in microseconds. Here the library is made to believe so of the CPU.
"""

from __future__ import annotations

import pytest
import torch

from collectives import Transport, on_threads
from collectives.pool import holders
from zero import ZeroOptimizer

from ..contract.space import HABITS
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.programs import Program, check, locked_build
from ..support.rows import only, rows

SMALL = 0.005  # MiB: several parameters in a bucket, and several buckets
STEPS = tuple(step for name in ("no sync", "zeros", "module", "module zeros", "divisors") for step in HABITS[name])
ROWS = {
    "1-0": Program(1, 0, bucket_cap_mb=SMALL, steps=STEPS),
    "2-2": Program(2, 2, bucket_cap_mb=SMALL, steps=STEPS),
    "1-0-bf16": Program(1, 0, bucket_cap_mb=SMALL, precision=PRECISIONS["bf16"], steps=STEPS),
    "2-3-bf16": Program(2, 3, bucket_cap_mb=SMALL, precision=PRECISIONS["bf16"], steps=STEPS),
}


@pytest.fixture(autouse=True)
def memory_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("collectives.pool", "zero.runtime.accumulator"):
        monkeypatch.setattr(f"{module}.worth_keeping", lambda device: False)


@pytest.mark.parametrize("row", only(ROWS, "1-0-bf16"))
def test_the_bits_are_those_of_the_plain_loop(row: str) -> None:
    check(ROWS[row])


def held(transport: Transport, stage: int, divisor: float | None = None) -> list[int]:
    """Train two steps. Return the bytes of gradients after the backwards."""
    model = locked_build(0)
    arguments = {"stage": stage, "process_group": transport, "divisor": divisor, "bucket_cap_mb": SMALL}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **arguments)  # type: ignore[arg-type]
    parts, found = parts_of(optimizer), []
    for batch in odd_batches(2, extra=False):
        for _ in range(2):
            odd_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            found.append(optimizer.describe().bytes["gradients"])
            assert parts.shard_group.pool.held_bytes == 0
        optimizer.step()
        buffers = [tensor.detach() for bucket in parts.storage.buckets for tensor in bucket.grad.tensors()]
        optimizer.zero_grad()
        assert optimizer.describe().bytes["gradients"] == parts.shard_group.pool.held_bytes == 0
        assert [holders(buffer) for buffer in buffers] == [0] * len(buffers) != [], "a view is kept"
    optimizer.close()
    return found


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 0), (1, 2)], [(2, 0), (2, 1), (2, 3)]))
def test_between_steps_no_gradient_and_no_scratch_takes_memory(world_size: int, stage: int) -> None:
    """One rank that divides by 1 keeps sum and mean once."""
    for found in on_threads(world_size, lambda transport: held(transport, stage)):
        assert len(set(found)) == 1
        assert found[0] > 0
    if (world_size, stage) == (1, 0):
        (apart,) = on_threads(1, lambda transport: held(transport, 0, 3.0))
        assert [2 * each for each in found] == apart
