"""`offload` and `reload`: all memory of a device goes to the host between two steps, and comes back with its bits.

There is no device here: the CPU takes its place, and all that was left behind is overwritten. That the copies are
ordered on streams is shown by `test_streams_are_ordered`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from collectives.pool import holders
from zero import ShardedAverage, ZeroOptimizer
from zero.state import device_memory
from zero.state.device_memory import DeviceMemory

from ..dials import loops
from ..dials.record import config_with
from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.machine import program as p
from ..support.machine.run import run
from ..support.models import build as locked_build
from ..support.models import odd_batches, take_steps
from ..support.plain import assert_same_model
from ..support.rows import rows

LEFT = 0xFF  # each byte of memory that was left behind: NaN, in every dtype


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Move all memory, as if it were a device's, and overwrite what is left. Return it."""
    left: list[Tensor] = []
    swap = DeviceMemory._swap

    def overwritten(self: DeviceMemory) -> None:
        swap(self)
        for source, _ in self._pairs:
            source.fill_(LEFT)
            left.append(source)

    monkeypatch.setattr(device_memory, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(DeviceMemory, "_swap", overwritten)
    return left


LENDS = [
    *(p.Lend(), *loops.steps(1), p.Lend(), *loops.step(2, clear="none"), p.Lend(), p.Reset((2,))),
    *(*loops.steps(2, 60), p.Average(), p.Lend(), *loops.steps(1), p.Average()),
    *(p.Load(p.Setting(1, 3), folder=p.FOLDER), p.Average(), p.Lend(), *loops.steps(1)),
]


@pytest.mark.parametrize(
    "changes",
    rows(
        [
            {"stage": 1, "optimizer": "adagrad", "precision": "bf16"},
            {"stage": 3, "collective": "pairwise", "precision": "bf16"},
        ],
        [
            {"stage": 0, "optimizer": "sgd momentum"},
            {"stage": 2, "optimizer": "shampoo"},
            {"stage": 2, "optimizer": "adamw fused"},
            {"stage": 3, "world_size": 1, "precision": "bf16"},
        ],
    ),
    ids=str,
)
def test_what_goes_to_the_host_and_comes_back_has_the_plain_loops_bits(changes: dict[str, Any]) -> None:
    run(config_with({"world_size": 2, **changes}), *LENDS)


STEPS = [odd_batches(1, step)[0] for step in range(2)]


def build(stage: int, transport: Transport | None = None) -> tuple[nn.Module, ZeroOptimizer]:
    model, group = locked_build(0), transport or solo()
    options: dict[str, Any] = {"collective": "pairwise"} if group.world_size > 1 else {}
    return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=group, lr=1e-2, **options)


def same_as_plain(model: nn.Module) -> None:
    plain = locked_build(0)
    take_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), STEPS)
    assert_same_model(model, plain)


@pytest.mark.parametrize(("stage", "call"), [(2, "reload"), (1, "close"), (3, "close")])
def test_without_room_on_one_rank_every_rank_raises_and_all_is_where_it_was(
    stage: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = set[str]()

    def without_room(name: str, error: Exception) -> None:
        copied = getattr(DeviceMemory, name)

        def copies(self: DeviceMemory) -> Any:
            if self._transport.rank == 1 and name not in failed:
                failed.add(name)
                raise error
            return copied(self)

        monkeypatch.setattr(DeviceMemory, name, copies)

    without_room("_to_host", ValueError("offload: 7 bytes of the host's memory cannot be pinned"))
    without_room("_to_device", torch.OutOfMemoryError("7 bytes are missing"))

    def program(transport: Transport) -> tuple[str, str, nn.Module]:
        model, optimizer = build(stage, transport)
        no_host = error_of(optimizer.offload)
        optimizer.offload()
        no_device = error_of(getattr(optimizer, call))
        optimizer.reload()
        take_steps(model, optimizer, STEPS)
        optimizer.close()
        return no_host, no_device, model

    for no_host, no_device, model in on_threads(2, program, timeout=BOUND):
        assert "offload(): offload: 7 bytes of the host's memory cannot be pinned" in no_host
        assert "reload(): rank 1: 7 bytes are missing; all is on the host still" in no_device
        same_as_plain(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_keeps_the_memory_that_is_left_and_the_hosts_is_used_again(stage: int, left: list[Tensor]) -> None:
    model, optimizer = build(stage)
    ShardedAverage(optimizer).update_parameters()
    take_steps(model, optimizer, STEPS[:1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = set()
    for _ in range(2):
        left.clear()
        optimizer.offload()
        moved = len(left)
        assert sum(map(Tensor.numel, left)) >= 4 * 4 * parameters, "weights, an average and two states"
        assert [*map(holders, left)] == [0] * moved
        optimizer.reload()
        blocks |= {copy.untyped_storage().data_ptr() for copy in left[moved:]}
    assert len(blocks) == 1
    optimizer.close()
