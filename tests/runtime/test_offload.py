"""States and gradients that leave a device's memory: the same bits, overlapped copies, bounded memory, errors.

The CPU takes the place of a device; `test_cuda` runs the same on a GPU, if there is one.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads, solo
from collectives.pool import holders
from zero import Offload, ZeroOptimizer
from zero.runtime.flat_states import BucketStates
from zero.runtime.offload import HostOffload, OffloadedStates

from ..dials import loops
from ..dials.record import config_with
from ..support.errors import error_of
from ..support.machine.program import Backward, Clip, Divide
from ..support.machine.ranks import STATES
from ..support.machine.run import run
from ..support.models import build, odd_batches, odd_loss
from ..support.parts import parts_of
from ..support.plain import assert_same_states
from ..support.rows import only, rows
from ..support.sides import OnRank, Side, same_as_plain

CPU = torch.device("cpu")
SMALL = 0.005  # MiB: several parameters in a bucket, and several buckets
OFF = Backward(9, sync=False)
LOOP = [*(OFF, *loops.step(1, Clip(0.3, 1.0))), *(OFF, *loops.step(2, clear="zeros", last=False)), Divide(7.5)]
LOOP += [
    *loops.step(3, OFF, clear="module zeros"),
    *loops.step(4, OFF, Backward(5), OFF, clear="module"),
    *loops.step(6),
]
HOST, DISK = STATES["states on the host"], Offload("/tmp")
ON_HOST = {"offload": "states on the host"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "1 on disk": {"stage": 1, "world_size": 2, "offload": True},
    "1": {"stage": 1, "world_size": 2, "optimizer": "adagrad", **ON_HOST},
    "2 fused": {"stage": 2, "world_size": 2, "optimizer": "adamw fused", **ON_HOST},
    "3 in bf16": {"stage": 3, "precision": "bf16", **ON_HOST},
    "0, memory is cheap": {"stage": 0},
    "2, memory is cheap": {"stage": 2, "world_size": 2},
    "0 in bf16, memory is cheap": {"stage": 0, "precision": "bf16"},
    "3 in bf16, memory is cheap": {"stage": 3, "world_size": 2, "precision": "bf16"},
}


@pytest.fixture
def elsewhere(copied_from_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy states for each step, also those on disk."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)


@pytest.fixture
def memory_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back what no backward needs, as on an accelerator, where memory is taken and given in microseconds."""
    for module in ("collectives.pool", "zero.runtime.accumulator"):
        monkeypatch.setattr(f"{module}.worth_keeping", lambda device: False)


@pytest.mark.parametrize("name", only(PROGRAMS, "1 on disk", "3 in bf16", "0 in bf16, memory is cheap"))
def test_what_leaves_a_devices_memory_changes_no_bit(name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("memory_is_cheap" if "cheap" in name else "elsewhere")
    run(config_with(PROGRAMS[name]), *LOOP)


class Replacing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p]
                    kept["m"] = 0.5 * kept["m"] + p.grad if "m" in kept else p.grad.clone()
                    p.sub_(kept["m"], alpha=group["lr"])


def take_step(side: Side, step: int) -> None:
    side.train(lambda model, rank: odd_loss(model, odd_batches(1, 10 * step + rank)[0]))
    side.step()
    side.clear()


@pytest.mark.parametrize("staged", [False, True])
def test_states_that_a_class_makes_anew_are_those_that_are_kept(
    tmp_path: Path, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(side: Side) -> None:
        for step in range(4):
            take_step(side, step)
            if isinstance(side, OnRank):
                before, parameters = side.optimizer.state_dict(), side.optimizer.param_groups[0]["params"]
                live = {index: dict(side.optimizer.state[parameters[index]]) for index in before["state"]}
                side.optimizer.load_state_dict({**before, "state": live})
                assert_same_states(side.optimizer.state_dict(), before)

    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: staged)
    same_as_plain(loop, build, Replacing, 1, lr=0.1, settings={"stage": 1, "offload": Offload(tmp_path)})


class Interrupted(torch.optim.AdamW):
    """An optimizer that is interrupted once, after some buckets."""

    left = 0

    def step(self, closure: Any = None) -> Any:
        Interrupted.left -= 1
        if Interrupted.left == 0:
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.usefixtures("elsewhere")
def test_what_an_interrupted_step_left_is_no_state_of_the_next(on_disk: bool) -> None:
    def loop(side: Side) -> None:
        for step in range(2):
            take_step(side, step)
        if isinstance(side, OnRank):
            weights = {name: value.clone() for name, value in side.model.state_dict().items()}
            states = side.optimizer.state_dict()
            take_step(side, 2)
            Interrupted.left = 4
            with pytest.raises(KeyboardInterrupt):
                take_step(side, 4)
            assert Interrupted.left == 0
            side.clear()
            side.model.load_state_dict(weights)
            side.optimizer.load_state_dict(states)
        for step in range(2, 4):
            take_step(side, step)

    settings = {"stage": 0, "bucket_cap_mb": 0.0005, "offload": DISK if on_disk else HOST}
    same_as_plain(loop, build, Interrupted, 1, lr=1e-2, settings=settings)


EVENTS = {"prefetch": "fetch", "plan": "begin", "adopt_states": "stepped", "evict": "back", "free_copies": "free"}


@pytest.mark.usefixtures("elsewhere")
def test_one_bucket_arrives_and_one_leaves_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[str, int]]()  # what is done with the states of a bucket, and its number

    def noting(done: Any, event: str) -> Any:
        def noted(self: BucketStates, *arguments: Any) -> Any:
            store = self._store  # there is none in a trial of the class
            if store is not None and (store.on_device or event != "free"):
                told.append((event, self.bucket.index))
            return done(self, *arguments)

        return noted

    for name, event in EVENTS.items():
        monkeypatch.setattr(BucketStates, name, noting(getattr(BucketStates, name), event))
    optimizer = ZeroOptimizer(model := build(), process_group=solo(), offload=HOST, bucket_cap_mb=0.0005)
    for step in range(3):
        told.clear()
        take_step(OnRank(model, optimizer), step)
    assert max(Counter(told).values()) == 1
    place, fetched = {event: number for number, event in enumerate(told)}, [b for event, b in told if event == "fetch"]
    assert len(fetched) > 4
    here: set[int] = set()
    for event, bucket in told:
        if event == "fetch":
            here.add(bucket)
        elif event == "free":
            here.remove(bucket)
        assert len(here) <= 3
    assert not here
    for bucket in fetched:
        assert place["fetch", bucket] < place["begin", bucket] < place["stepped", bucket] < place["back", bucket]
    for bucket, following in itertools.pairwise(fetched):
        assert place["fetch", following] < place["begin", bucket]
        assert place["stepped", following] < place["free", bucket]  # the copy back is not awaited earlier


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_between_steps_no_page_of_the_file_is_mapped_and_describe_says_what_is_elsewhere(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(model := nn.Linear(64, 64), process_group=solo(), offload=Offload(tmp_path))
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    mapped = rf"{re.escape(str(tmp_path))}.* \(deleted\)\n(?:.*\n)*?Rss: +(\d+) kB"
    assert set(re.findall(mapped, Path("/proc/self/smaps").read_text())) == {"0"}
    found = optimizer.describe()
    assert found.offloaded_bytes >= 8 * (64 * 64 + 64)
    assert f"elsewhere      {found.offloaded_bytes:>14,}" in str(found)
    with pytest.warns(UserWarning, match="the parameters are on the CPU: nothing to do"):
        optimizer = ZeroOptimizer(nn.Linear(2, 2), offload=HOST)
    assert optimizer.describe().offloaded_bytes == 0


def test_states_of_an_option_from_a_dict_are_on_disk_too(tmp_path: Path) -> None:
    model, arguments = nn.Linear(8, 8), {"partition": "parameter", "offload": Offload(tmp_path)}
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=solo(), **arguments)  # type: ignore[arg-type]
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    optimizer.load_state_dict(saved)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.describe().offloaded_bytes >= 4 * 72


def held(transport: Transport, stage: int, divisor: float | None = None) -> list[int]:
    arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "divisor": divisor}
    optimizer = ZeroOptimizer(model := build(), bucket_cap_mb=SMALL, **arguments)
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
    return found


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 0), (1, 2)], [(2, 0), (2, 1), (2, 3)]))
@pytest.mark.usefixtures("memory_is_cheap")
def test_between_steps_no_gradient_and_no_scratch_takes_memory(world_size: int, stage: int) -> None:
    """One rank that divides by 1 keeps sum and mean once."""
    for found in on_threads(world_size, lambda transport: held(transport, stage)):
        assert len(set(found)) == 1
        assert found[0] > 0
    if (world_size, stage) == (1, 0):
        assert [2 * each for each in found] == held(solo(), 0, 3.0)


@pytest.mark.parametrize("kept", [{}, {"parameters": "cpu"}])
@pytest.mark.usefixtures("copied_from_the_host")
def test_no_room_is_reserved_for_states_and_sums_of_what_is_frozen(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the base of an adapter. If it is trained after all, its states get room then."""
    reserved = list[int]()
    reserve = HostOffload.reserve

    def noting(self: HostOffload, wanted: Any) -> None:
        listed = [*wanted]
        reserved.append(sum(numel for numel, _ in listed))
        reserve(self, listed)

    def frozen() -> Any:
        model = build()
        model.first.weight.requires_grad_(False)
        return model

    def loop(side: Side) -> None:
        take_step(side, 0)
        if isinstance(side, OnRank):
            found = side.optimizer.describe().buckets
            trained = sum(bucket.bounds[-1] for bucket in found if bucket.trainable)
            weights = [sum(bucket.bounds[-1] for bucket in found)] if kept else []
            assert reserved == [(3 if kept else 2) * trained, *weights]
            assert trained < sum(bucket.bounds[-1] for bucket in found)
        side.model.first.weight.requires_grad_(True)
        for step in (1, 2):
            take_step(side, step)
        if isinstance(side, OnRank):
            described = side.optimizer.describe()
            assert sum(bucket.optimizer_bytes for bucket in described.buckets) == described.bytes["optimizer"]

    monkeypatch.setattr(HostOffload, "reserve", noting)
    settings = {"stage": 3, "bucket_cap_mb": 0.0005, "offload": Offload("cpu", **kept)}
    same_as_plain(loop, frozen, torch.optim.AdamW, 1, lr=0.1, settings=settings)


def test_reserved_states_lie_in_one_block_of_their_length() -> None:
    wanted = [(100, torch.float32), (7, torch.bfloat16), (0, torch.float32), (33, torch.float64)]
    host = HostOffload(CPU)
    host.reserve(wanted)
    tensors = [host.empty(*each) for each in wanted]
    assert [(tensor.numel(), tensor.dtype) for tensor in tensors] == wanted
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()} == {tensors[0].data_ptr()}
    assert tensors[0].untyped_storage().nbytes() == 448 + 64 + 320
    for number, tensor in enumerate(tensors):
        assert not tensor.count_nonzero()
        tensor.fill_(number + 1)
    assert all(tensor.eq(number + 1).all() for number, tensor in enumerate(tensors)), "they do not overlap"
    later = host.empty(5, torch.float32)
    assert later.untyped_storage().data_ptr() != tensors[0].data_ptr()
    host.reserve([(64, torch.float32), (64, torch.float32)])
    host.reserve([(16, torch.float32)])
    spaces = [host.empty(n, torch.float32).untyped_storage().nbytes() for n in (64, 16, 64)]
    assert spaces == [512, 64, 512], "what was reserved before something else is still there"


def test_a_block_is_pinned_until_its_owner_and_its_copies_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, gpu = Mock(), torch.device("cuda", 1)
    runtime.cudaHostRegister.side_effect = (0, 2)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = HostOffload(gpu)
    host.reserve([(1000, torch.float32)])
    with pytest.raises(ValueError, match=r"offload: 4,032 bytes of the host's memory cannot be pinned \(CUDA error 2"):
        host.reserve([(1000, torch.float32)])
    tensor = host.empty(1000, torch.float32)
    address = tensor.data_ptr()
    assert runtime.mock_calls == [call.cudaHostRegister(address, 4032, 0), call.cudaHostRegister(ANY, 4032, 0)]
    del host
    gc.collect()
    assert runtime.mock_calls[2:] == [call.synchronize(gpu), call.cudaHostUnregister(address)]
    assert not tensor.count_nonzero(), "it is still memory"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_before_anything_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, is_full = os.posix_fallocate, threading.local()
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *given: (full if getattr(is_full, "now", False) else reserve)(*given)
    )

    def program(transport: Transport) -> str:
        is_full.now, model = transport.rank == 1, build()
        memory = [parameter.data_ptr() for parameter in model.parameters()]
        said = error_of(ZeroOptimizer, model, process_group=transport, offload=Offload(tmp_path))
        assert [parameter.data_ptr() for parameter in model.parameters()] == memory
        return said

    told = on_threads(2, program)
    assert told[0].startswith("ValueError: rank 1: offload: ")
    assert all("do not fit into" in text and "No space left on device" in text for text in told)


def test_a_further_group_has_room_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the folder is gone is no matter until there is no room."""
    (folder := tmp_path / "folder").mkdir()
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = ZeroOptimizer(model[0].parameters(), module=model, stage=3, offload=Offload(folder))
    folder.rmdir()
    before, further = optimizer.describe().offloaded_bytes, list(model[1].parameters())
    with pytest.raises(ValueError, match="is not a parameter of the module"):
        optimizer.add_param_group({"params": [*further, nn.Parameter(torch.ones(2))]})
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ValueError, match=r"do not fit into .* free .No space left"):
            optimizer.add_param_group({"params": further})
    assert optimizer.describe().offloaded_bytes == before
    optimizer.add_param_group({"params": further})
    assert optimizer.describe().offloaded_bytes == 2 * before
