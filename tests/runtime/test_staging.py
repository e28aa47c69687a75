"""States in the host's memory that a device updates: the same bits, overlapped copies, and bounded memory.

There is no device here: the CPU takes its place. That copies on a side stream are awaited is shown by
`test_streams_are_ordered`; `test_cuda` runs the same on a GPU, if there is one.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
from torch import nn

from collectives import solo
from zero import Offload, ZeroOptimizer, setup
from zero.runtime.flat_states import BucketStates
from zero.runtime.offload import DiskOffload, HostOffload, OffloadBackend, OffloadedStates

from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model
from ..support.programs import Program, check, locked_build
from ..support.rows import without

CPU = torch.device("cpu")
ROWS = {
    "1": Program(2, 1, "adagrad", offload=Offload("cpu")),
    "2 fused": Program(2, 2, "adamw fused", offload=Offload("cpu")),
    "3 in bf16": Program(1, 3, "adamw", precision=PRECISIONS["bf16"], offload=Offload("cpu")),
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy states for each step, as if parameters were on a device."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: HostOffload(CPU))


@pytest.mark.parametrize("row", without(ROWS, "1", "2 fused"))
def test_states_that_are_copied_for_a_step_change_no_bit(row: str) -> None:
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


EVENTS = {"prefetch": "fetch", "plan": "begin", "adopt_states": "stepped", "evict": "back", "free_copies": "free"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record what is done with the states of a bucket, with its number."""
    events: list[tuple[str, int]] = []

    def note(name: str, event: str) -> None:
        done = getattr(BucketStates, name)

        def noted(self: BucketStates, *arguments: Any) -> Any:
            store = self._store  # there is none in a trial of the class
            if store is not None and (store.staged or event != "free"):
                events.append((event, self.bucket.index))
            return done(self, *arguments)

        monkeypatch.setattr(BucketStates, name, noted)

    for name, event in EVENTS.items():
        note(name, event)
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


def test_a_block_is_pinned_until_its_owner_and_its_copies_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be pinned is an error, and what was pinned before is used on."""
    runtime = Mock()
    runtime.cudaHostRegister.side_effect = (0, 2)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    gpu = torch.device("cuda", 1)
    host = HostOffload(gpu)
    host.reserve([(1000, torch.float32)])
    with pytest.raises(
        ValueError, match=r"offload: 4,032 bytes of the host's memory cannot be pinned \(CUDA error 2\)"
    ):
        host.reserve([(1000, torch.float32)])
    tensor = host.empty(1000, torch.float32)
    address = tensor.data_ptr()
    assert runtime.mock_calls == [call.cudaHostRegister(address, 4032, 0), call.cudaHostRegister(ANY, 4032, 0)]
    del host
    gc.collect()
    assert runtime.mock_calls[2:] == [call.synchronize(gpu), call.cudaHostUnregister(address)]
    assert not tensor.count_nonzero(), "it is still memory"
