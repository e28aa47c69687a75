"""Reads by several threads, into many pieces of memory, and over states that an optimizer had before."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from zero.checkpoint import files
from zero.checkpoint.read.file_reader import each_block, threads_of_rank

PATIENCE = 30.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_block_is_read_once_by_as_many_threads(threads: int) -> None:
    read: list[int] = []
    together = threading.Barrier(threads)

    def one(block: int) -> None:
        if block < threads:
            together.wait(PATIENCE)  # as many threads as are asked for are here at once
        read.append(block)

    each_block(range(20), one, threads)
    assert sorted(read) == list(range(20))


def test_the_first_broken_block_is_named_and_no_thread_reads_any_more() -> None:
    begun, reading = threading.Barrier(2), threading.Event()
    late: list[int] = []

    def one(block: int) -> None:
        begun.wait(PATIENCE)
        if block == 1:
            reading.set()
            raise ValueError("the second block")
        assert reading.wait(PATIENCE)  # the other thread's block has failed first
        late.append(block)
        raise ValueError("the first block")

    with pytest.raises(ValueError, match="the first block"):
        each_block(range(8), one, 2)
    assert late == [0]


def test_blocks_are_read_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    read: list[int] = []
    each_block(range(5), read.append, 4)
    assert read == list(range(5))


def test_ranks_that_share_a_host_have_one_thread_each_when_they_are_many() -> None:
    assert threads_of_rank(1) >= 1
    assert threads_of_rank(100_000) == 1


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
