"""Ranks write each byte once, in whole tensors; a load reads each block twice, compares it, and keeps two in memory."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.format.extents import Writers, plan_files
from zero.checkpoint.format.tensorfile import BLOCK_BYTES, PAGE, Fragment, TensorEntry, block_sums, parse_header, split
from zero.checkpoint.read import loader, restorer
from zero.checkpoint.read.loader import PartReader
from zero.checkpoint.read.reader import FileReader, each_block, threads_of_rank
from zero.checkpoint.write.save_folder import SMALLEST_DIRECT, ChunkWriter
from zero.core.buckets import build
from zero.core.layout import Dtypes, Layout, ParameterSpec
from zero.core.stage import STAGES, Placement

from ..support.limits import BOUND
from ..support.plain import assert_same_value
from .saved import BLOCK, MODEL, OPTIMIZER, plain_dict, save_small

MORE = settings(max_examples=5 * settings().max_examples)

# -- who writes what ---------------------------------------------------------------------------------------------------


FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [Dtypes.all(FP32), Dtypes.all(torch.float64), Dtypes.all(BF16), Dtypes(BF16, FP32, FP32, FP32)]


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Layout, Writers]:
    """Draw a layout, and the ranks that save it."""
    specs = []
    for index, numel in enumerate(draw(st.lists(st.integers(0, 300), min_size=1, max_size=7))):
        dtypes, trainable = draw(st.sampled_from(DTYPES)), draw(st.booleans())
        specs.append(ParameterSpec((f"p{index}",), (numel,), (1,), dtypes, "cpu", trainable, 0, index))
    world = draw(st.integers(1, 7))
    stage = STAGES[draw(st.integers(0, 3))]
    factors = [factor for factor in range(1, world + 1) if world % factor == 0]
    shards = draw(st.sampled_from(factors)) if stage.states is Placement.SHARD else world
    return build(specs, shards, draw(st.sampled_from([1, 100, 400, 1000, 1 << 20]))), Writers(stage, world, shards)


@given(topologies())
@MORE
def test_a_rank_writes_only_what_it_holds_and_ranks_that_hold_the_same_write_equal_shares(
    topology: tuple[Layout, Writers],
) -> None:
    layout, writers = topology
    for bucket in layout.buckets:
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


entry_lists = st.lists(st.integers(0, 40), max_size=8).map(
    lambda sizes: [TensorEntry(f"t{number}", "F32", (size,)) for number, size in enumerate(sizes)]
)


@given(entry_lists, st.integers(1, 300))
@MORE
def test_files_hold_whole_tensors_in_order_and_no_more_than_they_may(tensors: list[TensorEntry], most: int) -> None:
    files = plan_files("averages/ema", tensors, {"a": "b"}, most)
    assert [(e.name, e.shape) for file in files for e in file.tensors] == [(e.name, e.shape) for e in tensors]
    for number, file in enumerate(files, start=1):
        assert file.path == f"averages/ema/ema-{number:05d}-of-{len(files):05d}.safetensors"
        assert file.folder == "averages/ema"
        with_bytes = [entry for entry in file.tensors if entry.nbytes]
        assert file.nbytes - file.data <= most or len(with_bytes) == 1
        read = parse_header(file.header[8:], file.nbytes)
        assert (read.data, read.tensors, read.metadata) == (file.data, file.tensors, {"format": "pt", "a": "b"})
        if number < len(files):
            assert file.nbytes - file.data + files[number].tensors[0].nbytes > most, "it had room for the next one"


# -- what is written ---------------------------------------------------------------------------------------------------


def fragments_of(data: bytes, cuts: list[int], block_bytes: int) -> list[Fragment]:
    """Return the fragments of a file that is cut at these bytes, and between its blocks."""
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [
        Fragment(low, high - low, zlib.crc32(data[low:high]))
        for begin, end in itertools.pairwise(bounds)
        for low, high in split(begin, end, block_bytes)
    ]


def sums_of(data: bytes, block_bytes: int) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[begin : begin + block_bytes]) for begin in range(0, len(data), block_bytes))


@given(
    st.binary(max_size=300),
    st.lists(st.integers(1, 299), max_size=6),
    st.sampled_from([1, 7, 64, 100, 299, 300, 4096]),
    st.randoms(use_true_random=False),
)
@MORE
def test_the_checksums_of_blocks_do_not_depend_on_the_cuts(
    data: bytes, cuts: list[int], block_bytes: int, order: random.Random
) -> None:
    fragments = fragments_of(data, cuts, block_bytes)
    fragments += [Fragment(0, 0, 0), Fragment(len(data), 0, 0)]  # those without bytes change nothing
    order.shuffle(fragments)
    assert tuple(block_sums(fragments, len(data), block_bytes)) == sums_of(data, block_bytes)


DATA = bytes(range(250))
PARTS = fragments_of(DATA, [30, 150], 100)  # 0 30 100 150 200 250
REFUSED = [
    ([PARTS[0], *PARTS[2:]], 250, "bytes 30 to 100 were not written"),
    (PARTS[1:], 250, "bytes 0 to 30 were not written"),
    ([*PARTS, PARTS[1]], 250, "bytes 30 to 100 were written twice"),
    ([PARTS[0], replace(PARTS[1], begin=29), *PARTS[2:]], 250, "bytes 29 to 30 were written twice"),
    (PARTS[:-1], 250, "200 bytes were written instead of 250"),
    (PARTS, 249, "250 bytes were written instead of 249"),
    ([], 1, "0 bytes were written instead of 1"),
    (fragments_of(DATA, [], 250), 250, "the fragment at byte 0 crosses a border"),
    (fragments_of(DATA, [101], 250), 250, "the fragment at byte 0 crosses a border"),
    (fragments_of(DATA, [30, 130], 250), 250, "the fragment at byte 30 crosses a border"),
]


@pytest.mark.parametrize(("fragments", "nbytes", "why"), REFUSED)
def test_what_does_not_tile_the_file_is_an_error_that_names_the_bytes(
    fragments: list[Fragment], nbytes: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        block_sums(fragments, nbytes, 100)


SIZES = (1, PAGE - 1, 3 * SMALLEST_DIRECT, 5, 2 * SMALLEST_DIRECT + PAGE, 2 * PAGE + 7, SMALLEST_DIRECT, 100)


@pytest.mark.assumes("pwrite")
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


# -- what is read ------------------------------------------------------------------------------------------------------


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
    save_small(tmp_path / "a", trained(nn.Linear(64, 512)))
    optimizer = trained(nn.Linear(64, rows))
    turns, peaks, read_block = itertools.count(1), list[int](), PartReader._read_block

    def measured(this: PartReader, *arguments: object) -> None:
        read_block(this, *arguments)  # type: ignore[arg-type]
        if next(turns) % 20 == 0:  # to find all storages takes long
            peaks.append(sum(live_storages().values()))

    monkeypatch.setattr(PartReader, "_read_block", measured)
    monkeypatch.setattr(loader, "threads_of_rank", lambda _: 1)
    before = sum(live_storages().values())
    zero.load(tmp_path / "a", optimizer, resize=lambda *_: True)
    assert len(peaks) > 3
    assert max(peaks) <= before + 2 * BLOCK
