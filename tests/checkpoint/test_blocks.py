"""Ranks write each byte once, in whole tensors; a load reads each block twice, compares it, and keeps two in memory."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.format.extents import Writers
from zero.checkpoint.format.tensorfile import BLOCK_BYTES, PAGE, block_sums, split
from zero.checkpoint.read import loader, restorer
from zero.checkpoint.read.loader import PartReader
from zero.checkpoint.read.reader import FileReader, each_block, threads_of_rank
from zero.checkpoint.write.capture import Snapshot
from zero.checkpoint.write.save_folder import SMALLEST_DIRECT, ChunkWriter
from zero.core.buckets import build
from zero.core.layout import Dtypes, Layout, ParameterSpec
from zero.core.stage import STAGES, Placement

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_value
from .saved import BLOCK, MODEL, OPTIMIZER, plain_dict, save_small

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [Dtypes.all(FP32), Dtypes.all(BF16), Dtypes(BF16, FP32, FP32, FP32)]
SPECS = [
    ParameterSpec((f"p{index}",), (numel,), (1,), dtypes, "cpu", index % 5 != 3, 0, index)
    for index, (dtypes, numel) in enumerate(itertools.product(DTYPES, (300, 0, 1, 67)))
]


def topologies() -> Iterator[tuple[Layout, Writers]]:
    for stage, world, nbytes in itertools.product(STAGES.values(), (1, 2, 3, 6), (1, 400, 1 << 20)):
        for shards in [each for each in (1, 2, 3) if world % each == 0] if stage.states is Placement.SHARD else [world]:
            yield build(SPECS, shards, nbytes), Writers(stage, world, shards)


def test_a_rank_writes_only_what_it_holds_and_ranks_that_hold_the_same_write_equal_shares() -> None:
    for writers, bucket in ((writers, bucket) for layout, writers in topologies() for bucket in layout.buckets):
        shares: dict[tuple[int, int], list[int]] = {}
        written, first = Counter[int](), Counter[int]()
        for rank in range(writers.world_size):
            begin, end = writers.interval(bucket, rank)
            low, high = writers.stage.update_interval(bucket, rank % writers.shards)
            assert low <= begin <= end <= high
            shares.setdefault((low, high), []).append(end - begin)
            written.update(range(begin, end))
            first.update(writers.first_of(bucket, rank))
        for found in shares.values():
            assert max(found) - min(found) <= bucket.dtypes.alignment
        assert written == Counter(range(bucket.numel))
        assert first == Counter(range(len(bucket.slots))), "each slot has one rank that writes its first element"


SIZES = (1, PAGE - 1, 3 * SMALLEST_DIRECT, 5, 2 * SMALLEST_DIRECT + PAGE, 2 * PAGE + 7, SMALLEST_DIRECT, 100)


@pytest.mark.parametrize("how", ["direct", "refused", "impossible"])
def test_all_bytes_are_written_at_any_place(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``refused``: a file system opens a file for direct writes and takes none of them."""

    def copy(source: Tensor, out: Tensor) -> None:
        out.copy_(source)

    write_at = files.write_at

    def refusing(number: int, data: memoryview, offset: int) -> None:
        if fcntl.fcntl(number, fcntl.F_GETFL) & files.DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        write_at(number, data, offset)

    if how == "refused":
        monkeypatch.setattr(files, "write_at", refusing)
    elif how == "impossible":
        monkeypatch.setattr(files, "DIRECT", 0)
    expected = torch.randint(256, (sum(SIZES),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = expected.numpy().tobytes()
    files.create(tmp_path / "a", len(data))
    writer = ChunkWriter(tmp_path, 0, BLOCK_BYTES)
    try:
        for begin, end in itertools.pairwise(itertools.accumulate(SIZES, initial=0)):
            for low, high in split(begin, end, BLOCK_BYTES):
                writer.write("a", low, high - low, partial(copy, expected[low:high]))
        writer.finish()
    finally:
        writer.close()
    assert (tmp_path / "a").read_bytes() == data
    assert block_sums(writer.fragments["a"], len(data), BLOCK_BYTES) == [zlib.crc32(data)]
    first, second, *rest = writer.fragments["a"]
    for wrong, block_bytes, why in (
        ([first, *rest], BLOCK_BYTES, "bytes 1 to 4096 were not written"),
        ([first, second, second, *rest], BLOCK_BYTES, "bytes 1 to 4096 were written twice"),
        ([first, second], BLOCK_BYTES, "4096 bytes were written instead of"),
        ([first, second, *rest], 100, "the fragment at byte 1 crosses a border"),
    ):
        assert why in error_of(block_sums, wrong, len(data), block_bytes)


def test_blocks_are_read_by_several_threads_and_by_one_where_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, together = list[int](), threading.Barrier(3)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def one(block: int) -> None:
        together.wait(BOUND)
        read.append(block)

    each_block(range(3), one, 3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    each_block(range(3, 7), read.append, 3)
    assert sorted(read) == list(range(7))
    assert threads_of_rank(100_000) == 1


def trained(model: nn.Module, **arguments: object) -> ZeroOptimizer:
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, **arguments)  # type: ignore[arg-type]
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Reads:
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


@pytest.mark.first(0)
@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_together_read_each_byte_twice(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to verify it before anything changes, once to load it. Blocks of many tensors, too; so does a reader."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64), *(nn.LayerNorm(64) for _ in range(40)))

    saved = trained(model())
    save_small(tmp_path / "a", saved, state=None)
    whole = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*") if path.is_file())
    reads = Reads(monkeypatch)

    def program(transport: Transport) -> tuple[str, Any]:
        optimizer = trained(model(), stage=stage, process_group=transport)
        zero.load(tmp_path / "a", optimizer, rng=False)
        return optimizer.check_replicas(), plain_dict(optimizer)["state"]

    for digest, states in on_threads(4, program):
        assert digest == saved.check_replicas()
        assert_same_value(states, plain_dict(saved)["state"], "states")
    assert 1.8 * whole < reads.nbytes < 2.3 * whole, "headers, indices and the caller's state are read by every rank"
    of_weights = [count for (_, path, block), count in reads.blocks.items() if path in (MODEL, OPTIMIZER) and block > 3]
    assert max(of_weights) == 2, "verified and loaded"
    reads, checkpoint = Reads(monkeypatch), zero.open_checkpoint(tmp_path / "a")
    assert len(checkpoint.model_state_dict()) == 84
    assert sum(reads.blocks.values()) <= 2 * len(checkpoint.manifest.files[MODEL].crc32)


@pytest.mark.first(1)
@pytest.mark.parametrize("rows", [512, 700], ids=["", "grown"])
def test_a_load_needs_no_memory_but_two_blocks(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a save none but that of the parameters, few blocks and what a rank has."""
    turns, peaks = itertools.count(1), list[int]()

    def measure(of: Any, name: str) -> None:
        call = getattr(of, name)

        def measured(*arguments: Any) -> None:
            call(*arguments)
            if next(turns) % 20 == 0:  # to find all storages takes long
                peaks.append(sum(live_storages().values()))

        monkeypatch.setattr(of, name, measured)

    measure(Snapshot, "take")
    measure(PartReader, "_read_block")
    monkeypatch.setattr(loader, "threads_of_rank", lambda _: 1)
    model = nn.Linear(64, 512)
    saving, optimizer = trained(model), trained(nn.Linear(64, rows))
    before = sum(live_storages().values())
    save_small(tmp_path / "a", saving)
    assert len(peaks) > 3
    assert max(peaks) <= before + 4 * sum(p.numel() for p in model.parameters()) + 8 * BLOCK
    peaks.clear()
    before = sum(live_storages().values())
    zero.load(tmp_path / "a", optimizer, resize=lambda *_: True)
    assert len(peaks) > 3
    assert max(peaks) <= before + 2 * BLOCK
