"""A load reads each byte twice, a block of many tensors once, and needs no memory but two blocks."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.checkpoint.read import loader, restorer
from zero.checkpoint.read.file_reader import FileReader
from zero.checkpoint.read.loader import PartReader

from .saved import BLOCK, MODEL, save_small


def _trained(model: nn.Module, **arguments: object) -> ZeroOptimizer:
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, **arguments)  # type: ignore[arg-type]
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Reads:
    """Counts the blocks that each rank reads, with one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: Counter[tuple[int, str, int]] = Counter()
        self.nbytes = 0
        self._lock = threading.Lock()
        read_block = FileReader.read_block

        def counted(this: FileReader, block: int, *pieces: memoryview) -> None:
            with self._lock:
                self.blocks[threading.get_ident(), this.path, block] += 1
                self.nbytes += sum(map(len, pieces))
            read_block(this, block, *pieces)

        monkeypatch.setattr(FileReader, "read_block", counted)
        for module in (loader, restorer):
            monkeypatch.setattr(module, "threads_of_rank", lambda _: 1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_together_read_each_byte_twice(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to verify it before anything changes, once to load it."""
    save_small(tmp_path / "a", _trained(nn.Linear(64, 1024)), state=None)
    whole = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*") if path.is_file())
    reads = Reads(monkeypatch)

    def program(transport: Transport) -> None:
        zero.load(tmp_path / "a", _trained(nn.Linear(64, 1024), stage=stage, process_group=transport), rng=False)

    on_threads(4, program)
    assert 1.8 * whole < reads.nbytes < 2.3 * whole, "headers, indices and the caller's state are read by every rank"


def test_a_rank_reads_a_block_of_many_tensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: Transport) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), *(nn.LayerNorm(64) for _ in range(40)))
        optimizer = _trained(model, stage=3, process_group=transport, bucket_cap_mb=0.001)
        save_small(tmp_path / "a", optimizer)
        optimizer.exchange(b"")
        with pytest.MonkeyPatch.context() as patch:
            reads = Reads(patch) if transport.rank == 0 else None
            optimizer.exchange(b"")
            zero.load(tmp_path / "a", optimizer)
            optimizer.exchange(b"")
            if reads is not None:
                found.update(reads.blocks)

    found: Counter[tuple[int, str, int]] = Counter()
    on_threads(2, program)
    of_weights = {place: count for place, count in found.items() if place[1].startswith(("model/", "optimizer/"))}
    assert len(of_weights) > 30
    assert max(count for (_, path, block), count in of_weights.items() if block) == 2, "verified and loaded"


def test_small_tensors_of_one_block_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    save_small(tmp_path / "a", ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    reads = Reads(monkeypatch)
    checkpoint = zero.open_checkpoint(tmp_path / "a")
    assert len(checkpoint.model_state_dict()) == 80
    assert sum(reads.blocks.values()) <= 2 * len(checkpoint.manifest.files[MODEL].crc32)


def test_a_load_needs_no_memory_but_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = _trained(nn.Linear(64, 512))
    save_small(tmp_path / "a", optimizer)
    blocks = 0
    peaks: list[int] = []
    read_block = PartReader._read_block

    def measured(this: PartReader, *arguments: object) -> None:
        nonlocal blocks
        read_block(this, *arguments)  # type: ignore[arg-type]
        blocks += 1
        if blocks % 20 == 0:  # to find all storages takes long
            peaks.append(sum(live_storages().values()))

    monkeypatch.setattr(PartReader, "_read_block", measured)
    monkeypatch.setattr(loader, "threads_of_rank", lambda _: 1)
    before = sum(live_storages().values())
    zero.load(tmp_path / "a", optimizer)
    assert len(peaks) > 3
    assert max(peaks) <= before + 2 * BLOCK
