"""Any bytes of a file are read by any number of threads, in pieces; a broken block is an error each time."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zero
from zero import CheckpointError
from zero.checkpoint import files
from zero.checkpoint.format.manifest import FileSums
from zero.checkpoint.read.file_reader import FileReader, each_block, threads_of_rank

from ..support.limits import BOUND

MORE = settings(max_examples=5 * settings().max_examples)


@pytest.mark.parametrize("threads", [1, 2, 3])
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


@pytest.mark.parametrize("most", [1, 3, 7, 1 << 20])
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


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
@MORE
def test_any_bytes_of_a_file_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, block_bytes: int, begin: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("file")
    (folder / "a").write_bytes(data)
    sums = FileSums(len(data), tuple(zlib.crc32(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)))
    begin = min(begin, len(data))
    end = min(begin + length, len(data))
    with FileReader(folder, "a", sums, block_bytes) as reader:
        assert reader.read(begin, end - begin) == data[begin:end]
        reader.verify(0, reader.blocks)
        assert [reader.span(block) for block in range(reader.blocks)] == [
            (low, min(block_bytes, len(data) - low)) for low in range(0, len(data), block_bytes)
        ]


def test_a_broken_block_is_found_when_it_is_touched_and_every_time(tmp_path: Path) -> None:
    data = bytearray(range(100))
    sums = FileSums(100, tuple(zlib.crc32(data[i : i + 10]) for i in range(0, 100, 10)))
    data[35] ^= 1
    (tmp_path / "a").write_bytes(data)
    with FileReader(tmp_path, "a", sums, 10) as reader:
        assert reader.read(0, 30) == data[:30]
        assert reader.read(40, 60) == data[40:]
        for begin, length in ((30, 10), (30, 1), (39, 5), (25, 6), (0, 100), (39, 1)):
            with pytest.raises(CheckpointError, match="a is broken at block 3"):
                reader.read(begin, length)


def test_a_parameter_without_saved_states_begins_anew_over_the_states_it_had(tmp_path: Path) -> None:
    def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, *used: int) -> None:
        torch.stack([(model[number] ** 2).sum() for number in used]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def build() -> nn.ParameterList:
        return nn.ParameterList([torch.arange(5.0), torch.arange(7.0), torch.arange(3.0)])

    model, plain = build(), build()
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, lr=0.125)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.125)
    train(model, optimizer, 0, 2)
    zero.save(tmp_path / "saved", optimizer)
    train(model, optimizer, 0, 1, 2)  # number 1 has states now, in the memory of its neighbours'
    zero.load(tmp_path / "saved", optimizer)
    assert set(optimizer.state_dict()["state"]) == {0, 2}
    train(plain, reference, 0, 2)
    for used in ((1,), (0, 1, 2)):
        train(model, optimizer, *used)
        train(plain, reference, *used)
    for ours, theirs in zip(model, plain, strict=True):
        assert torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32))
