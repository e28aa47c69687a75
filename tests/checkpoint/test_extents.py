"""The plan of a checkpoint: the ranks together write every element once, whatever the topology, in whole tensors."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.format.extents import Writers, plan_files
from zero.checkpoint.format.tensorfile import TensorEntry, parse_header
from zero.core.buckets import build
from zero.core.layout import Dtypes, Layout, ParameterSpec
from zero.core.stage import STAGES, Placement

MORE = settings(max_examples=5 * settings().max_examples)
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
