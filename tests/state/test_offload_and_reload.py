"""`offload` and `reload`: all memory of a device goes to the host between two steps, and comes back with its bits.

There is no device here: the CPU takes its place, and all that was left behind is overwritten. That the copies are
ordered on streams is shown by `test_streams_are_ordered`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from collectives.pool import holders
from zero import ShardedAverage, ZeroOptimizer, load, save
from zero.state import device_memory
from zero.state.device_memory import DeviceMemory

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model
from ..support.programs import Program, Step, check, locked_build
from ..support.rows import without

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


CLEARED = (Step(clips=((0.1, 2.0),)), Step(clear="none"), Step(reset=("last.bias",), clear="zeros"), Step())
ROWS = {
    "0": Program(2, 0, "sgd momentum", lends=True, steps=CLEARED),
    "1 in bf16": Program(2, 1, "adagrad", lends=True, precision=PRECISIONS["bf16"], steps=CLEARED),
    "2 fused": Program(3, 2, "adamw fused", lends=True, steps=CLEARED),
    "2 by parameter": Program(2, 2, "shampoo", lends=True, steps=CLEARED),
    "3 alone": Program(1, 3, "adamw", lends=True, precision=PRECISIONS["bf16"], steps=CLEARED),
    "3 gathered": Program(3, 3, "adamw", lends=True, collective="pairwise", steps=CLEARED),
    "3 gathered in bf16": Program(
        2, 3, "adamw", lends=True, collective="pairwise", precision=PRECISIONS["bf16"], steps=CLEARED
    ),
}


@pytest.mark.parametrize("row", without(ROWS, "2 fused", "3 gathered"))
def test_what_goes_to_the_host_and_comes_back_has_the_plain_loops_bits(row: str) -> None:
    check(ROWS[row])


# -- between the two calls ---------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        odd_loss(model, odd_batches(1, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(stage: int, transport: Transport | None = None) -> tuple[nn.Module, ZeroOptimizer]:
    model, group = locked_build(0), transport or solo()
    options: dict[str, Any] = {"collective": "pairwise"} if group.world_size > 1 else {}
    return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=group, lr=1e-2, **options)


def uses(model: nn.Module, optimizer: ZeroOptimizer) -> list[Callable[[], object]]:
    """Return what may not be done before `reload`."""
    parameter = next(model.parameters())
    return [
        lambda: odd_loss(model, odd_batches(1, 0)[0]),
        optimizer.step,
        optimizer.zero_grad,
        optimizer.offload,
        optimizer.describe,
        optimizer.state_dict,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.gathered().__enter__(),
        lambda: optimizer.full_master(parameter),
        lambda: optimizer.state[parameter],
        lambda: ShardedAverage(optimizer),
    ]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_before_reload_every_use_is_an_error_and_changes_nothing(stage: int) -> None:
    model, optimizer = build(stage)
    train(model, optimizer, range(2))
    optimizer.offload()
    for use in uses(model, optimizer):
        assert "all ranks call optimizer.reload() before the model or the optimizer is used" in error_of(use)
    for read in (model.state_dict, lambda: next(model.parameters()).sum()):
        assert ("is released" if stage == 3 else "is on the host") in error_of(read)
    optimizer.reload()
    optimizer.reload()  # nothing is left to do
    train(model, optimizer, range(2, 4))
    optimizer.close()
    same_as_plain(model, range(4))


def same_as_plain(model: nn.Module, steps: range) -> None:
    plain = locked_build(0)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps)
    assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_of_an_earlier_graph_is_an_error_before_reload(stage: int) -> None:
    model, optimizer = build(stage)
    loss = odd_loss(model, odd_batches(1, 0)[0])
    optimizer.offload()
    assert "optimizer.reload()" in error_of(loss.backward)
    optimizer.reload()
    train(model, optimizer, range(2))
    optimizer.close()
    same_as_plain(model, range(2))


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_refused_on_every_rank_and_nothing_moves(stage: int) -> None:
    def run(transport: Transport) -> tuple[list[str], nn.Module]:
        model, optimizer = build(stage, transport)
        odd_loss(model, odd_batches(1, 0)[0]).backward()
        found = [error_of(optimizer.offload)]
        model.zero_grad(set_to_none=False)  # zeros that no step has used are like any others that a loop writes
        found.append(error_of(optimizer.offload))
        odd_loss(model, odd_batches(1, 0)[0]).backward()
        optimizer.step()
        found.append(error_of(optimizer.offload))
        optimizer.zero_grad()
        optimizer.offload()
        optimizer.close()
        return found, model

    for found, model in on_threads(2, run, timeout=BOUND):
        for message in found:
            assert "offload() with gradients, which do not move: call zero_grad() first" in message
        same_as_plain(model, range(1))


@pytest.mark.parametrize(("stage", "call"), [(2, "reload"), (1, "close"), (3, "close")])
def test_without_room_on_one_rank_every_rank_raises_and_all_is_where_it_was(
    stage: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_host, to_device, failed = DeviceMemory._to_host, DeviceMemory._to_device, set[str]()

    def full(self: DeviceMemory, side: str, error: Exception) -> None:
        if self._transport.rank == 1 and side not in failed:
            failed.add(side)
            raise error

    def copied_to_host(self: DeviceMemory) -> Any:
        full(self, "host", ValueError("offload: 7 bytes of the host's memory cannot be pinned"))
        return to_host(self)

    def copied_to_device(self: DeviceMemory) -> Any:
        full(self, "device", torch.OutOfMemoryError("7 bytes are missing"))
        return to_device(self)

    monkeypatch.setattr(DeviceMemory, "_to_host", copied_to_host)
    monkeypatch.setattr(DeviceMemory, "_to_device", copied_to_device)

    def run(transport: Transport) -> tuple[str, str, nn.Module]:
        model, optimizer = build(stage, transport)
        no_host = error_of(optimizer.offload)
        optimizer.offload()
        no_device = error_of(getattr(optimizer, call))
        optimizer.reload()
        train(model, optimizer, range(2))
        optimizer.close()
        return no_host, no_device, model

    for no_host, no_device, model in on_threads(2, run, timeout=BOUND):
        assert "offload(): offload: 7 bytes of the host's memory cannot be pinned" in no_host
        assert "reload(): rank 1: 7 bytes are missing; all is on the host still" in no_device
        same_as_plain(model, range(2))


# -- what moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_keeps_the_memory_that_is_left_and_the_hosts_is_used_again(stage: int, left: list[Tensor]) -> None:
    model, optimizer = build(stage)
    ShardedAverage(optimizer).update_parameters()
    train(model, optimizer, range(1))
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


def test_an_average_and_a_checkpoint_are_those_of_a_training_that_lends_nothing(tmp_path: Path) -> None:
    found = []
    for lends in (False, True):
        model, optimizer = build(3)
        average = ShardedAverage(optimizer)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            average.update_parameters()
            if lends:
                optimizer.offload()
                optimizer.reload()
        save(tmp_path / f"{lends}", optimizer)
        other, second = build(1)
        ShardedAverage(second)
        load(tmp_path / f"{lends}", second)
        second.close()
        found.append((average.gather(None), other))
    (plain, restored), (lent, restored_too) = found
    assert plain is not None
    assert lent is not None
    for name, value in plain.items():
        assert_same_bits(value, lent[name], name)
    assert_same_model(restored, restored_too)
