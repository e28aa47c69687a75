"""Small trainings that save, and a writer that takes as many chunks as a test allows.

Knows: `Snapshot.take`, and where the size of blocks is used. Does not know: what is tested.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import manager, single
from zero.checkpoint.folder.directory import LEASE
from zero.checkpoint.format.extents import Chunk
from zero.checkpoint.write import capture
from zero.checkpoint.write.saver import SaveRequest

from ..support.limits import PATIENT
from ..support.models import odd_batches, odd_loss
from ..support.programs import locked_build


def small_blocks(monkeypatch: pytest.MonkeyPatch, nbytes: int = 512) -> None:
    """Let checkpoints have small blocks, so that small models have many chunks."""
    monkeypatch.setattr(manager, "SaveRequest", partial(SaveRequest, block_bytes=nbytes))
    monkeypatch.setattr(single, "SaveRequest", partial(SaveRequest, block_bytes=nbytes))


class Training:
    """A model with all kinds of parameters, in many buckets, on one rank."""

    def __init__(self, transport: Any, stage: int, cls: Any = torch.optim.AdamW, **arguments: Any) -> None:
        self.model = locked_build(0)
        arguments = {"bucket_cap_mb": 0.0005, "lr": 1e-2, **arguments}
        self.optimizer = ZeroOptimizer(self.model, cls, stage=stage, process_group=transport, **arguments)
        self.rank, self.world_size = self.optimizer.rank, self.optimizer.world_size

    def backward(self, number: int) -> None:
        batch = odd_batches(self.world_size, number, extra=False)[self.rank]
        odd_loss(self.model, (batch[0], number % 2 == 1)).backward()  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        """Train one step, with the batch of this number."""
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> dict[str, Any]:
        """Return the whole plain dict. All ranks."""
        self.optimizer.consolidate_state_dict(None)
        return self.optimizer.state_dict()


class Taker:
    """Lets the thread of each rank take so many chunks of a save, and no more. A blocking save takes all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._allowed: dict[int, float] = {}
        self.taken: Counter[int] = Counter()  # how many chunks each rank has taken
        self._buckets: dict[int, list[set[int]]] = {}  # of which a rank has taken states, by chunk
        take = capture.Snapshot.take

        def wrapped(this: capture.Snapshot, chunk: Chunk, out: Tensor) -> None:
            name = threading.current_thread().name
            if not name.startswith("zero-checkpoint"):
                take(this, chunk, out)
                return
            rank = int(name.rpartition(" ")[2])
            with self._changed:
                may = self._changed.wait_for(lambda: self.taken[rank] < self._allowed.get(rank, math.inf), PATIENT)
                assert may, "never released"
            buckets = {this._live[source][0] for source in chunk.sources if source in this._live}
            self._buckets.setdefault(rank, []).append(buckets)
            take(this, chunk, out)
            with self._changed:
                self.taken[rank] += 1
                self._changed.notify_all()

        monkeypatch.setattr(capture.Snapshot, "take", wrapped)

    def begin(self, rank: int, count: float) -> None:
        """Begin to count anew, and allow a rank so many chunks."""
        with self._changed:
            self._allowed[rank], self.taken[rank] = count, 0

    def release(self, rank: int) -> None:
        """Allow a rank all that is left."""
        with self._changed:
            self._allowed[rank] = math.inf
            self._changed.notify_all()

    def wait_until(self, rank: int, count: int) -> None:
        """Return when the rank's thread has taken so many chunks."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.taken[rank] >= count, PATIENT)
            assert done, f"rank {rank} has taken {self.taken[rank]} chunks"

    def one_of_each_bucket(self, rank: int) -> list[int]:
        """Return, for each bucket, how many chunks of the last save a rank takes until it has one of its states."""
        taken = self._buckets[rank][-self.taken[rank] :]
        return [1 + next(n for n, of in enumerate(taken) if bucket in of) for bucket in sorted(set().union(*taken))]


def entries(folder: Path) -> list[str]:
    """Return the names in a folder, but for the file that stands for a lock on some file systems."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != LEASE)


def saved(folder: Path, optimizer: ZeroOptimizer, *steps: int) -> None:
    """Write checkpoints of these steps."""
    with CheckpointManager(folder, optimizer) as checkpoints:
        for step in steps:
            checkpoints.save(step, blocking=True)


def break_one(folder: Path, step: int) -> Path:
    """Change one byte of a checkpoint."""
    path = folder / f"step-{step:08d}" / "model" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def names(*steps: int) -> list[str]:
    """Return the entries of a folder that has these steps."""
    return [".lock", *(f"step-{step:08d}" for step in steps)]


def tree(folder: Path) -> list[str]:
    """Return the paths of everything below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
