"""States in the host's memory that a device updates: the same bits, overlapped copies, and bounded memory.

There is no device here: the CPU takes its place, and a copy on a side stream runs as late as possible, when it is
awaited. `test_cuda` runs the same on a GPU, if there is one.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import Offload, ZeroOptimizer, setup
from zero.runtime import staging
from zero.runtime.flat_states import BucketStates
from zero.runtime.offload import DiskOffload, HostOffload, OffloadBackend, OffloadedStates
from zero.runtime.staging import Staging

from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model
from ..support.programs import Program, check, locked_build

CPU = torch.device("cpu")
_HERE = threading.local()  # for each rank, which is a thread


def lines() -> list[Line]:
    found: list[Line] = vars(_HERE).setdefault("lines", [])
    return found


class Line:
    """A side stream, whose work runs when it is awaited. The main stream runs its work at once."""

    entered = False

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self._is_behind_main = False
        lines().append(self)

    def wait_stream(self, main: Main) -> None:
        self._is_behind_main = True

    def __enter__(self) -> None:
        assert self._is_behind_main
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self.entered = self._is_behind_main = False

    def run(self) -> None:
        for work in self.waiting:
            work()
        self.waiting = []


class Main:
    def wait_stream(self, line: Line) -> None:
        line.run()


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep states in pinned memory, for parameters on a device whose copies run late."""
    copy, empty, wait_for_copies, let_go = Tensor.copy_, torch.empty, BucketStates.wait_for_copies, Staging.let_go

    def copied(target: Tensor, source: Tensor, **options: Any) -> Tensor:
        line = next((line for line in lines() if line.entered), None)
        if line is None:
            return copy(target, source, **options)
        line.waiting.append(partial(copy, target, source))
        return target

    def emptied(*arguments: Any, **options: Any) -> Tensor:
        assert not any(line.entered for line in lines()), "memory is the main stream's"
        made = empty(*arguments, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def settled(states: BucketStates) -> None:
        wait_for_copies(states)
        for line in lines():
            line.run()

    def gone(self: Staging) -> None:
        let_go(self)
        line: Any = self._stream
        assert line is None or not line.waiting, "memory is given up that a copy is still to write"

    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: HostOffload(CPU))
    monkeypatch.setattr(staging, "_line_on", lambda device: Line())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Main())
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "empty", emptied)
    monkeypatch.setattr(BucketStates, "wait_for_copies", settled)
    monkeypatch.setattr(Staging, "let_go", gone)


ROWS = {
    "1": Program(2, 1, "adagrad", offload=Offload("cpu")),
    "2 fused": Program(2, 2, "adamw fused", offload=Offload("cpu")),
    "3 in bf16": Program(1, 3, "adamw", precision=PRECISIONS["bf16"], offload=Offload("cpu")),
}


@pytest.mark.parametrize("row", ROWS)
def test_states_that_are_copied_beside_a_step_change_no_bit(row: str) -> None:
    check(ROWS[row])


# -- the order ---------------------------------------------------------------------------------------------------------


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        odd_loss(model, odd_batches(1, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> ZeroOptimizer:
    options = {"offload": Offload("cpu"), "bucket_cap_mb": 0.0005, **options}
    return ZeroOptimizer(model, optimizer_class, process_group=solo(), lr=1e-2, **options)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the host's calls to the device, with the number of the bucket."""
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}

    def note(kind: type[Any], name: str, event: str) -> None:
        done = getattr(kind, name)

        def noted(self: Any, *arguments: Any) -> Any:
            if kind is BucketStates and self._store is not None:  # there is none in a trial of the class
                numbers[id(self._store._staging)] = self.bucket.index
                events.append((event, self.bucket.index))
            elif kind is Staging and (self.tensors or name == "fetch"):
                events.append((event, numbers.get(id(self), -1)))
            return done(self, *arguments)

        monkeypatch.setattr(kind, name, noted)

    note(BucketStates, "plan", "begin")
    note(BucketStates, "adopt_states", "stepped")
    note(Staging, "fetch", "fetch")
    note(Staging, "put_back", "back")
    note(Staging, "let_go", "free")
    return events


def test_one_bucket_arrives_and_one_leaves_while_one_is_stepped(told: list[tuple[str, int]]) -> None:
    model = locked_build(0)
    optimizer = build(model, torch.optim.AdamW)
    train(optimizer, model, range(2))
    told.clear()
    train(optimizer, model, range(1))
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


class Interrupted(torch.optim.AdamW):
    """An optimizer that is interrupted once, after some buckets."""

    left = 0

    def step(self, closure: Any = None) -> Any:
        Interrupted.left -= 1
        if Interrupted.left == 0:
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_an_interrupted_step_left_is_no_state_of_the_next(
    tmp_path: Path, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload_backend: OffloadBackend = DiskOffload(tmp_path) if on_disk else HostOffload(CPU)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: offload_backend)
    model, plain = locked_build(0), locked_build(0)
    optimizer = build(model, Interrupted, stage=0)
    train(optimizer, model, range(2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    train(optimizer, model, range(2, 4))
    Interrupted.left = 4
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, model, range(4, 5))
    assert Interrupted.left == 0
    optimizer.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    train(optimizer, model, range(2, 4))
    optimizer.close()
    train(torch.optim.AdamW(plain.parameters(), lr=1e-2), plain, range(4))
    assert_same_model(model, plain)


# -- pinned memory -----------------------------------------------------------------------------------------------------


class Runtime:
    """CUDA's runtime, as far as it pins memory. ``error``: what it returns; ``done``: what happened, in order."""

    def __init__(self) -> None:
        self.error, self.done, self.pinned = 0, list[str](), dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if not self.error:
            self.pinned[address] = nbytes
            self.done.append("register")
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.pinned[address]
        self.done.append("unregister")
        return 0


def test_reserved_states_lie_in_one_block_of_their_length() -> None:
    """Torch's allocator of pinned memory would round each up to a power of two."""
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
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number + 1).all(), "they do not overlap"
    later = host.empty(5, torch.float32)
    assert later.untyped_storage().data_ptr() != tensors[0].data_ptr()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.done.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_block_is_pinned_until_its_owner_and_its_copies_are_gone(runtime: Runtime) -> None:
    host = HostOffload(torch.device("cuda", 1))
    host.reserve([(1000, torch.float32)])
    tensor = host.empty(1000, torch.float32)
    assert runtime.pinned == {tensor.data_ptr(): 4032}
    del host
    gc.collect()
    assert not runtime.pinned
    assert runtime.done == ["register", "synchronize cuda:1", "unregister"]
    assert not tensor.count_nonzero(), "it is still memory"


def test_memory_that_cannot_be_pinned_is_an_error(runtime: Runtime) -> None:
    host = HostOffload(torch.device("cuda", 0))
    host.reserve([(16, torch.float32)])
    runtime.error = 2
    with pytest.raises(
        ValueError, match=r"offload: 4,032 bytes of the host's memory cannot be pinned \(CUDA error 2\)"
    ):
        host.reserve([(1000, torch.float32)])
    assert host.empty(16, torch.float32).data_ptr() in runtime.pinned
