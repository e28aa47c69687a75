"""Any bytes are read by any number of threads; a load reads each byte twice, and needs no memory but two blocks."""

from __future__ import annotations

import os
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import CheckpointError, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.format.manifest import FileSums
from zero.checkpoint.read import loader, restorer
from zero.checkpoint.read.loader import PartReader
from zero.checkpoint.read.reader import FileReader, each_block, threads_of_rank

from ..support.limits import BOUND
from .saved import BLOCK, MODEL, save_small

# -- threads, pieces, blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_each_block_is_read_once_by_as_many_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of_rank(1) >= 1
    assert threads_of_rank(100_000) == 1
    read: list[int] = []
    together = threading.Barrier(threads)

    def one(block: int) -> None:
        if block < threads:
            together.wait(BOUND)  # as many threads as are asked for are here at once
        read.append(block)

    each_block(range(20), one, threads)
    assert sorted(read) == list(range(20))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    read.clear()
    each_block(range(5), read.append, threads)
    assert read == list(range(5)), "read where no thread can be started"


def test_the_first_broken_block_is_named_and_no_thread_reads_any_more() -> None:
    begun, reading = threading.Barrier(2), threading.Event()
    late: list[int] = []

    def one(block: int) -> None:
        begun.wait(BOUND)
        if block == 1:
            reading.set()
            raise ValueError("the second block")
        assert reading.wait(BOUND)  # the other thread's block has failed first
        late.append(block)
        raise ValueError("the first block")

    with pytest.raises(ValueError, match="the first block"):
        each_block(range(8), one, 2)
    assert late == [0]


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_pieces_are_filled_one_after_the_other_also_by_short_reads(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(number % 251 for number in range(3_000))
    (tmp_path / "file").write_bytes(data)
    of_system = os.preadv

    def short(number: int, pieces: Sequence[memoryview], offset: int) -> int:
        room, few = most, []
        for piece in pieces[:most]:
            few.append(piece[:room])
            room -= len(few[-1])
        return of_system(number, few, offset)

    monkeypatch.setattr(os, "preadv", short)
    sizes = [5, 1, 2, *([1] * 1_500), 700, 300]
    pieces = [memoryview(bytearray(size)) for size in sizes]
    with files.read_only(tmp_path, "file") as number:
        assert files.read_pieces(number, pieces, 11) == sum(sizes)
        assert b"".join(pieces) == data[11 : 11 + sum(sizes)]
        beyond = [memoryview(bytearray(4)), memoryview(bytearray(4))]
        assert files.read_pieces(number, beyond, len(data) - 6) == 6
        assert b"".join(beyond) == data[-6:] + bytes(2)


@settings(max_examples=5 * settings().max_examples)
@given(
    st.binary(min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), st.integers(0, 120)
)
def test_any_bytes_are_read_and_those_of_a_broken_block_are_an_error_every_time(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, block_bytes: int, begin: int, length: int, changed: int
) -> None:
    folder = tmp_path_factory.mktemp("file")
    sums = FileSums(len(data), tuple(zlib.crc32(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)))
    (folder / "a").write_bytes(b"".join(bytes([byte ^ (at == changed)]) for at, byte in enumerate(data)))
    begin = min(begin, len(data))
    end = min(begin + length, len(data))
    with FileReader(folder, "a", sums, block_bytes) as reader:
        assert [reader.span(block) for block in range(reader.blocks)] == [
            (low, min(block_bytes, len(data) - low)) for low in range(0, len(data), block_bytes)
        ]
        broken, words = changed // block_bytes, f"a is broken at block {changed // block_bytes}"
        if begin < end and changed < len(data) and begin // block_bytes <= broken <= (end - 1) // block_bytes:
            for _ in range(2):
                with pytest.raises(CheckpointError, match=words):
                    reader.read(begin, end - begin)
        else:
            assert reader.read(begin, end - begin) == data[begin:end]
        if changed < len(data):
            with pytest.raises(CheckpointError, match=words):
                reader.verify(0, reader.blocks)
        else:
            reader.verify(0, reader.blocks)


# -- how often, and how much -------------------------------------------------------------------------------------------


def trained(model: nn.Module, **arguments: object) -> ZeroOptimizer:
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


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_together_read_each_byte_twice(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to verify it before anything changes, once to load it."""
    save_small(tmp_path / "a", trained(nn.Linear(64, 1024)), state=None)
    whole = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*") if path.is_file())
    reads = Reads(monkeypatch)

    def program(transport: Transport) -> None:
        zero.load(tmp_path / "a", trained(nn.Linear(64, 1024), stage=stage, process_group=transport), rng=False)

    on_threads(4, program)
    assert 1.8 * whole < reads.nbytes < 2.3 * whole, "headers, indices and the caller's state are read by every rank"


def test_a_rank_reads_a_block_of_many_tensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: Transport) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), *(nn.LayerNorm(64) for _ in range(40)))
        optimizer = trained(model, stage=3, process_group=transport, bucket_cap_mb=0.001)
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
    reads, checkpoint = Reads(monkeypatch), zero.open_checkpoint(tmp_path / "a")
    assert len(checkpoint.model_state_dict()) == 86
    assert sum(reads.blocks.values()) <= 2 * len(checkpoint.manifest.files[MODEL].crc32), "so does a reader"


@pytest.mark.first(1)
@pytest.mark.parametrize("rows", [512, 700], ids=["", "grown"])
def test_a_load_needs_no_memory_but_two_blocks(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path / "a", trained(nn.Linear(64, 512)))
    optimizer = trained(nn.Linear(64, rows))
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
    zero.load(tmp_path / "a", optimizer, resize=lambda *_: True)
    assert len(peaks) > 3
    assert max(peaks) <= before + 2 * BLOCK
