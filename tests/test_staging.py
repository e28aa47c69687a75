"""States in the host's memory that a device steps: the same bits, copied beside its work, and no more than it needs.

The device here is the CPU, where a copy is done when the call returns. That the host waits for none is shown by the
order of what it tells the device; `test_cuda` has a GPU do it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import Offload, ZeroOptimizer, assembly
from zero.offload import Pinned
from zero.runs import BucketStates
from zero.staging import Staging

from .models import odd_batches, odd_loss
from .narrowed import PRECISIONS
from .programs import Program, locked_build
from .test_sharding_factor import STEPS, check

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(assembly, "keeper_of", lambda offload, device: Pinned())


@ALL
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw fused", "adagrad"])
def test_states_that_are_copied_ahead_change_no_bit(stage: int, precision: str, optimizer: str) -> None:
    mixed = PRECISIONS[precision] if precision else None
    check(Program(2, stage, optimizer, steps=STEPS, precision=mixed, offload=Offload("cpu")))


def trained(optimizer: torch.optim.Optimizer, model: Any, steps: int) -> None:
    for step in range(steps):
        odd_loss(model, odd_batches(1, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(model: nn.Module, optimizer_class: type[torch.optim.Optimizer]) -> ZeroOptimizer:
    return ZeroOptimizer(
        model, optimizer_class, process_group=solo(), bucket_cap_mb=0.0005, lr=1e-2, offload=Offload("cpu")
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the host tells the device, with the number of the bucket."""
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}

    def note(kind: type[Any], name: str, event: str) -> None:
        done = getattr(kind, name)

        def noted(self: Any, *arguments: Any) -> Any:
            if kind is BucketStates:
                numbers[id(self._staging)] = self.bucket.index
            if kind is BucketStates or self.tensors or name == "fetch":
                events.append((event, numbers.get(id(self if kind is Staging else self._staging), -1)))
            return done(self, *arguments)

        monkeypatch.setattr(kind, name, noted)

    note(BucketStates, "plan", "begin")
    note(BucketStates, "harvest", "stepped")
    note(Staging, "fetch", "fetch")
    note(Staging, "put_back", "back")
    note(Staging, "let_go", "free")
    return events


def test_the_next_bucket_is_fetched_and_the_last_goes_back_while_one_is_stepped(told: list[tuple[str, int]]) -> None:
    model = locked_build(0)
    optimizer = build(model, torch.optim.AdamW)
    trained(optimizer, model, 2)
    told.clear()
    trained(optimizer, model, 1)
    place = {event: number for number, event in enumerate(told)}
    assert max(Counter(told).values()) == 1
    here: set[int] = set()
    for event, bucket in told:
        if event == "fetch":
            here.add(bucket)
        elif event == "free":
            here.remove(bucket)
        assert len(here) <= 3
    assert not here
    fetched = [bucket for event, bucket in told if event == "fetch"]
    assert len(fetched) > 4
    for bucket in fetched:
        assert place["fetch", bucket] < place["begin", bucket] < place["stepped", bucket] < place["back", bucket]
    for bucket, following in itertools.pairwise(fetched):
        assert place["fetch", following] < place["begin", bucket]
        assert place["stepped", following] < place["free", bucket]  # nobody waits before for what is on its way back


# -- lines of work -----------------------------------------------------------------------------------------------------


class Line:
    """What a device was told, in the place of a stream."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_stream(self, other: Line) -> None:
        self._told.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self._told.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self._told.append("on main")


def test_copies_come_after_what_they_read_and_before_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    main = Line("main", told)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    staging = Staging(torch.device("cpu"))
    monkeypatch.setattr(staging, "_stream", Line("side", told))
    copy = Tensor.copy_

    def copied(*arguments: Any, **options: Any) -> Tensor:
        told.append("copy")
        return copy(*arguments, **options)

    monkeypatch.setattr(Tensor, "copy_", copied)
    kept = {"m": torch.arange(3.0)}
    staging.fetch(kept)
    assert told == ["side waits for main", "on side", "copy", "on main"]
    told.clear()
    staging.wait()
    staging.tensors["m"] += 1
    staging.put_back(kept)
    assert told == ["main waits for side", "side waits for main", "on side", "copy", "on main"]
    told.clear()
    staging.let_go()
    staging.let_go()
    assert told == ["main waits for side"]
    assert kept["m"].tolist() == [1.0, 2.0, 3.0]
