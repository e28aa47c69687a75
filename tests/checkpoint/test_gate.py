"""An update waits for the copy of its own bucket alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zero.checkpoint.format.extents import Chunk, Part
from zero.checkpoint.write.capture import Snapshot

from ..support.limits import PATIENT


def test_an_update_waits_for_the_copy_of_its_own_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {("m", bucket): torch.full((4,), bucket, dtype=torch.uint8) for bucket in (0, 1)}
    chunks = [Chunk("a file", 0, (Part(("m", bucket), 0, 0, 4),)) for bucket in (0, 1)]
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
