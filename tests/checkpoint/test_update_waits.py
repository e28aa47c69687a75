"""An update that has waited for the disk waits also for the chunk that is in hand by then."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from zero.checkpoint.format.extents import Chunk, Part
from zero.checkpoint.write.snapshot import Snapshot

LARGE, SMALL = 64, 8
PATIENCE = 10.0  # seconds, for threads that would hang


def _chunk(name: str, begin: int, nbytes: int) -> Chunk:
    return Chunk(0, begin, (Part((name, 0), 0, begin, nbytes),))


@pytest.mark.parametrize("attempt", range(3))  # whether the update or the writer goes on first is not decided here
def test_an_update_that_waited_for_room_does_not_change_a_chunk_in_hand(
    monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    large, small = torch.full((LARGE,), 1, dtype=torch.uint8), torch.full((SMALL,), 2, dtype=torch.uint8)
    chunks = [_chunk("large", 0, LARGE), _chunk("small", LARGE, SMALL)]
    live = {("large", 0): (0, lambda: large), ("small", 0): (0, lambda: small)}
    snapshot = Snapshot({}, live, chunks, staging_bytes=LARGE - 1)  # room for the small one alone
    updated = threading.Event()

    def update() -> None:
        snapshot.before_update(0)
        small.fill_(9)
        updated.set()

    copy = np.concatenate

    def slow(parts: Any, *, out: Any) -> Any:
        if len(out) == SMALL:
            updated.wait(0.02)  # an update that does not wait for this chunk comes first
        return copy(parts, out=out)

    monkeypatch.setattr(np, "concatenate", slow)
    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    while not snapshot._changed._waiters:  # type: ignore[attr-defined]  # until it waits for room
        assert thread.is_alive()
    written = torch.zeros(LARGE + SMALL, dtype=torch.uint8)
    for chunk in chunks:
        snapshot.take(chunk, written[chunk.begin : chunk.begin + chunk.nbytes])
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert written.tolist() == [1] * LARGE + [2] * SMALL
