"""The plan of a checkpoint: the ranks together write every byte of every file once, whatever the topology."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.format.extents import (
    Chunk,
    FilePlan,
    Part,
    Writers,
    chunks,
    is_row_major,
    plan_files,
    slot_part,
)
from zero.checkpoint.format.tensorfile import TensorEntry, parse_header
from zero.core.buckets import build
from zero.core.layout import BucketSpec, Dtypes, Layout, ParameterSpec
from zero.core.stage import STAGES, Placement
from zero.core.statetree import NAMES

MORE = settings(max_examples=5 * settings().max_examples)
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [Dtypes.all(FP32), Dtypes.all(torch.float64), Dtypes.all(BF16), Dtypes(BF16, FP32, FP32, FP32)]
BLOCKS = [64, 100, 1000, 4096, 1 << 20]


@st.composite
def specs(draw: st.DrawFn) -> list[ParameterSpec]:
    found = []
    for index in range(draw(st.integers(1, 7))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        order = list(range(len(shape)))
        if draw(st.integers(0, 3)) == 0:
            order = draw(st.permutations(order))
        dtypes, trainable = draw(st.sampled_from(DTYPES)), draw(st.booleans())
        stride = torch.empty_permuted(shape, order).stride()
        found.append(ParameterSpec((f"p{index}",), shape, stride, dtypes, "cpu", trainable, 0, index))
    return found


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Layout, Writers]:
    """Draw a layout, and the ranks that save it."""
    world = draw(st.integers(1, 7))
    stage = STAGES[draw(st.integers(0, 3))]
    factors = [factor for factor in range(1, world + 1) if world % factor == 0]
    shards = draw(st.sampled_from(factors)) if stage.states is Placement.SHARD else world
    layout = build(draw(specs()), shards, draw(st.sampled_from([1, 100, 400, 1000, 1 << 20])))
    return layout, Writers(stage, world, shards)


# -- who writes what ---------------------------------------------------------------------------------------------------


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


# -- which bytes -------------------------------------------------------------------------------------------------------


class Written:
    """Files of which each byte may be written once, after the header."""

    def __init__(self, files: list[FilePlan]) -> None:
        self.data: dict[str, list[int | None]] = {file.path: [None] * file.nbytes for file in files}
        for file in files:
            self.data[file.path][: file.data] = file.header

    def write(self, chunk: Chunk, memory: dict[tuple[str, int], bytes]) -> None:
        place, data = chunk.begin, self.data[chunk.path]
        for part in chunk.parts:
            assert part.begin == place
            found = memory[part.source][part.offset : part.offset + part.nbytes]
            assert len(found) == part.nbytes > 0
            assert data[place : place + part.nbytes] == [None] * part.nbytes, "written twice, or behind the end"
            data[place : place + part.nbytes] = found
            place += part.nbytes
        assert place == chunk.begin + chunk.nbytes


def values_of(spec: ParameterSpec, itemsize: int) -> tuple[bytes, bytes]:
    """Return the bytes of a parameter in the order of its memory and in the order of a file; all elements differ."""
    places = torch.arange(spec.numel).as_strided(spec.shape, spec.stride).reshape(-1) if spec.numel else torch.empty(0)
    elements = [(1000 * spec.index + place).to_bytes(8, "big")[-itemsize:] for place in range(spec.numel)]
    return b"".join(elements), b"".join(elements[int(place)] for place in places)


def memory_of_bucket(bucket: BucketSpec, layout: Layout, itemsize: int) -> bytes:
    """Return the bytes of a whole bucket. Padding is 0xEE."""
    data = bytearray(b"\xee" * (bucket.numel * itemsize))
    for slot in bucket.slots:
        inside, _ = values_of(layout.parameters[slot.parameter], itemsize)
        data[slot.offset * itemsize : slot.end * itemsize] = inside
    return bytes(data)


@given(topologies(), st.sampled_from(["param_dtype", "master_dtype"]), st.sampled_from(BLOCKS), st.integers(1, 3000))
@MORE
def test_all_ranks_together_write_every_byte_of_the_tensors_once(
    topology: tuple[Layout, Writers], which: str, block_bytes: int, max_bytes: int
) -> None:
    layout, writers = topology
    entries = [TensorEntry(s.name, NAMES[getattr(s.dtypes, which)], s.shape) for s in layout.parameters]
    files = plan_files("model", entries, {}, max_bytes)
    disk = Written(files)
    for rank in range(writers.world_size):
        memory: dict[tuple[str, int], bytes] = {}
        parts: dict[tuple[str, str], list[Part]] = {}
        for bucket in layout.buckets:
            itemsize = bucket.dtypes.itemsize(which)
            interval = writers.interval(bucket, rank)
            source = ("bucket", bucket.index)
            memory[source] = memory_of_bucket(bucket, layout, itemsize)[interval[0] * itemsize : interval[1] * itemsize]
            for piece in writers.pieces(bucket, rank):
                spec = layout.parameters[bucket.slots[piece.slot].parameter]
                if is_row_major(spec):
                    if piece.numel:
                        parts["model", spec.name] = [slot_part(source, piece, bucket, interval, itemsize)]
                elif piece.slot in writers.first_of(bucket, rank):
                    memory[spec.name, 0] = values_of(spec, itemsize)[1]
                    parts["model", spec.name] = [Part((spec.name, 0), 0, 0, len(memory[spec.name, 0]))]
        found = chunks(files, parts, block_bytes)
        assert [(chunk.path, chunk.begin) for chunk in found] == sorted((chunk.path, chunk.begin) for chunk in found)
        for chunk in found:
            assert chunk.begin // block_bytes == (chunk.begin + chunk.nbytes - 1) // block_bytes, "crosses a border"
            disk.write(chunk, memory)
    for spec in layout.parameters:
        whole = torch.empty_strided(spec.shape, spec.stride, device="meta")
        assert is_row_major(spec) == whole.is_contiguous()
    for file in files:
        for entry in file.tensors:
            spec = layout.parameters[int(entry.name[1:])]
            written = disk.data[file.path][file.data + entry.begin : file.data + entry.end]
            assert written == list(values_of(spec, getattr(spec.dtypes, which).itemsize)[1]), entry
        assert None not in disk.data[file.path]


def test_neighbours_in_a_file_are_one_chunk_also_from_several_sources() -> None:
    entries = [TensorEntry(name, "F32", (4,)) for name in "abcd"]
    (file,) = plan_files("model", entries, {}, 1000)
    parts = {("model", name): [Part((name, 0), 8, 0, 16)] for name in "abd"}
    found = chunks([file], parts, 4096)
    assert [(chunk.begin - file.data, chunk.nbytes, len(chunk.parts)) for chunk in found] == [(0, 32, 2), (48, 16, 1)]
    assert found[1].parts == (Part(("d", 0), 8, file.data + 48, 16),)


# -- files -------------------------------------------------------------------------------------------------------------

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
