"""Small trainings that save, checkpoints that were forged, and a writer that takes as many chunks as a test allows.

Knows: how a checkpoint is laid out, `Snapshot.take`, where the size of blocks is used. Does not know: what is tested.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint.folder.directory import check_visible
from zero.checkpoint.format.extents import Chunk
from zero.checkpoint.format.manifest import NAME, FileSums, Manifest, index_file
from zero.checkpoint.format.tensorfile import TensorEntry, header_bytes, header_length, parse_header
from zero.checkpoint.single import save_one
from zero.checkpoint.write import capture
from zero.checkpoint.write.saver import SaveRequest

from ..support.limits import PATIENT
from ..support.models import build, odd_batches, odd_loss

BLOCK = 4096
MODEL, OPTIMIZER = "model/model-00001-of-00001.safetensors", "optimizer/optimizer-00001-of-00001.safetensors"
INDEX = "model/model.safetensors.index.json"
OF_RANK = "ranks/rank-00000.safetensors"


class Training:
    """A model with all kinds of parameters, in many buckets, on one rank."""

    def __init__(self, transport: Any = None, stage: int = 0, cls: Any = torch.optim.AdamW, **arguments: Any) -> None:
        self.model = build(0)
        arguments = {"bucket_cap_mb": 0.0005, "lr": 1e-2, **arguments}
        self.optimizer = ZeroOptimizer(self.model, cls, stage=stage, process_group=transport, **arguments)
        self.rank, self.world_size = self.optimizer.rank, self.optimizer.world_size
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def backward(self, number: int) -> None:
        batch = odd_batches(self.world_size, number, extra=False)[self.rank]
        odd_loss(self.model, (batch[0], number % 2 == 1)).backward()  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_rank_0(self, act: Any) -> None:
        """Call a function on rank 0, after what all ranks did before, and before what they do next."""
        self.optimizer.exchange(b"")
        if self.rank == 0:
            act()
        self.optimizer.exchange(b"")


def plain_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict(None)
    return optimizer.state_dict()


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        odd_loss(model, odd_batches(2, step)[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


# -- what was saved ----------------------------------------------------------------------------------------------------


def save_small(path: Path, optimizer: ZeroOptimizer, **request: Any) -> None:
    whole = {"step": 3, "state": {"epoch": 1}, "rank_state": None, "blocking": True, "block_bytes": BLOCK, **request}
    whole["in_parts"] = check_visible(optimizer, path.parent, None)
    save_one(optimizer, SaveRequest(path, **whole))


def saved(folder: Path, optimizer: ZeroOptimizer, *steps: int) -> None:
    with CheckpointManager(folder, optimizer) as checkpoints:
        for step in steps:
            checkpoints.save(step, blocking=True)


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def names(*steps: int) -> list[str]:
    return [".lock", *(f"step-{step:08d}" for step in steps)]


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def aside(folder: Path) -> list[str]:
    """Return the names of what was set aside, without the nonce."""
    return [name.rpartition("-")[0] for name in entries(folder) if name.startswith("abandoned-")]


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def files_of(folder: Path) -> list[str]:
    return [path for path in tree(folder) if (folder / path).is_file()]


# -- what was forged ---------------------------------------------------------------------------------------------------


def break_one(folder: Path, step: int) -> None:
    path = step_folder(folder, step) / MODEL
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def forge(folder: Path, **changes: Any) -> None:
    """Make the manifest that of the files as they are now, and change its fields."""
    manifest = replace(Manifest.from_bytes((folder / NAME).read_bytes()), **changes)
    files = {}
    for path in changes.get("files", manifest.files):
        data = (folder / path).read_bytes()
        blocks = range(0, len(data), manifest.block_bytes)
        files[path] = FileSums(len(data), tuple(zlib.crc32(data[i : i + manifest.block_bytes]) for i in blocks))
    (folder / NAME).write_bytes(replace(manifest, files=files).to_bytes())


def add_averages(folder: Path, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
    paths = list(Manifest.from_bytes((folder / NAME).read_bytes()).files)
    for name, tensors in averages.items():
        path = f"averages/{name}/{name}-00001-of-00001.safetensors"
        (folder / path).parent.mkdir(parents=True)
        save_file(dict(tensors), folder / path)
        index = folder / index_file(f"averages/{name}")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.rpartition("/")[2])}))
        paths += [path, f"averages/{name}/{index.name}"]
    forge(folder, files=dict.fromkeys(paths))


def rewrite_header(path: Path, entries: list[TensorEntry] | None = None, **metadata: str) -> None:
    data = path.read_bytes()
    length = header_length(data[:8], len(data))
    found = parse_header(data[8 : 8 + length], len(data))
    head = header_bytes(found.tensors if entries is None else entries, {**found.metadata, **metadata})
    path.write_bytes(head + data[found.data :])


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def edit_manifest(folder: Path, **changes: Any) -> None:
    found = {**json.loads((folder / NAME).read_bytes()), **changes}
    found.pop("sha256")
    (folder / NAME).write_bytes(manifest_text({**found, "sha256": digest(found)}))


def manifest_text(found: dict[str, Any]) -> bytes:
    """Return these keys as a manifest has them: a line for each."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


class Taker:
    """Lets the thread of each rank take so many chunks of a save, and no more. A blocking save takes all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._allowed: dict[int, float] = {}
        self.taken: Counter[int] = Counter()  # how many chunks each rank has taken
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
        with self._changed:
            self._allowed[rank] = math.inf
            self._changed.notify_all()

    def wait_until(self, rank: int, count: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.taken[rank] >= count, PATIENT)
            assert done, f"rank {rank} has taken {self.taken[rank]} chunks"
