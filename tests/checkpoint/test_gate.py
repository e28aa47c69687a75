"""An update waits for the copy of its own bucket alone, and copies are dropped as soon as they were taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zero.checkpoint.format.extents import Chunk, Part
from zero.checkpoint.write.snapshot import Snapshot

from ..support.limits import PATIENT


def chunk_of(*parts: tuple[str, int, int, int]) -> Chunk:
    """Return a chunk of (name, bucket, offset, bytes)."""
    return Chunk("a file", 0, tuple(Part((name, bucket), offset, 0, nbytes) for name, bucket, offset, nbytes in parts))


def test_an_update_waits_for_the_copy_of_its_own_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {("m", bucket): torch.full((4,), bucket, dtype=torch.uint8) for bucket in (0, 1)}
    chunks = [chunk_of(("m", 0, 0, 4)), chunk_of(("m", 1, 0, 4))]
    made = Snapshot({}, {key: (key[1], lambda value=value: value) for key, value in live.items()}, chunks)  # type: ignore[misc]
    copying, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []
    concatenate, wait_for = np.concatenate, made._changed.wait_for

    def slow(*arguments: Any, **options: Any) -> Any:
        copying.set()
        assert go_on.wait(PATIENT)
        order.append("copied")
        return concatenate(*arguments, **options)

    def noted_wait(holds: Callable[[], bool], timeout: float | None = None) -> bool:
        if not holds():
            waiting.set()
        return wait_for(holds, PATIENT)

    monkeypatch.setattr(made._changed, "wait_for", noted_wait)
    out = torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(np, "concatenate", slow)
    thread = threading.Thread(target=made.take, args=(chunks[0], out))
    thread.start()
    assert copying.wait(PATIENT)
    made.before_update(1)
    live["m", 1].fill_(9)
    assert not waiting.is_set()

    def update() -> None:
        made.before_update(0)
        order.append("updated")
        live["m", 0].fill_(9)

    updating = threading.Thread(target=update)
    updating.start()
    assert waiting.wait(PATIENT)
    go_on.set()
    thread.join(PATIENT)
    updating.join(PATIENT)
    assert order == ["copied", "updated"]
    assert out.tolist() == [0] * 4
    made.take(chunks[1], out)
    assert out.tolist() == [1] * 4


def test_copies_are_dropped_as_soon_as_they_were_taken() -> None:
    source = torch.arange(8, dtype=torch.uint8)
    chunks = [chunk_of(("m", 3, 0, 4)), chunk_of(("m", 3, 4, 4))]
    made = Snapshot({}, {("m", 3): (3, lambda: source)}, chunks)
    out = torch.zeros(4, dtype=torch.uint8)
    made.take(chunks[0], out)
    made.before_update(3)
    source.fill_(9)
    assert list(made._staged) == [("m", 3)]
    made.take(chunks[1], out)
    assert out.tolist() == [4, 5, 6, 7]
    assert made._staged == {}
    made.before_update(3)
    assert made._staged == {}, "nothing is left to take"
