"""CRC-32s of blocks are those of the bytes, whatever chunks were written at whatever places."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero.checkpoint import files
from zero.checkpoint.format.tensorfile import BLOCK_BYTES, PAGE, Fragment, block_sums, split
from zero.checkpoint.write.save_folder import SMALLEST_DIRECT, ChunkWriter

BLOCK = 100
DATA = bytes(range(250))
MORE = settings(max_examples=5 * settings().max_examples)


def fragments_of(data: bytes, cuts: list[int], block_bytes: int) -> list[Fragment]:
    """Return the fragments of a file that is cut at these bytes, and between its blocks."""
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [
        Fragment(low, high - low, zlib.crc32(data[low:high]))
        for begin, end in itertools.pairwise(bounds)
        for low, high in split(begin, end, block_bytes)
    ]


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
    assert all(part.begin // block_bytes == (part.begin + part.length - 1) // block_bytes for part in fragments)
    fragments += [Fragment(0, 0, 0), Fragment(len(data), 0, 0)]  # those without bytes change nothing
    order.shuffle(fragments)
    expected = [zlib.crc32(data[begin : begin + block_bytes]) for begin in range(0, len(data), block_bytes)]
    assert block_sums(fragments, len(data), block_bytes) == expected


def crossing(begin: int, length: int) -> list[Fragment]:
    bounds = [(0, begin), (begin, begin + length), (begin + length, 250)]
    return [Fragment(low, high - low, zlib.crc32(DATA[low:high])) for low, high in bounds]


PARTS = fragments_of(DATA, [30, 150], BLOCK)  # 0 30 100 150 200 250
REFUSED = [
    ([PARTS[0], *PARTS[2:]], 250, "bytes 30 to 100 were not written"),
    (PARTS[1:], 250, "bytes 0 to 30 were not written"),
    ([*PARTS, PARTS[1]], 250, "bytes 30 to 100 were written twice"),
    ([PARTS[0], replace(PARTS[1], begin=29), *PARTS[2:]], 250, "bytes 29 to 30 were written twice"),
    (PARTS[:-1], 250, "200 bytes were written instead of 250"),
    (PARTS, 249, "250 bytes were written instead of 249"),
    ([], 1, "0 bytes were written instead of 1"),
    (crossing(0, 250), 250, "the fragment at byte 0 crosses a border"),
    (crossing(0, 101), 250, "the fragment at byte 0 crosses a border"),
    (crossing(30, 100), 250, "the fragment at byte 30 crosses a border"),
]


@pytest.mark.parametrize(("fragments", "nbytes", "why"), REFUSED)
def test_what_does_not_tile_the_file_is_an_error_that_names_the_bytes(
    fragments: list[Fragment], nbytes: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        block_sums(fragments, nbytes, BLOCK)


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
        begin = 0
        for size in SIZES:
            for low, high in split(begin, begin + size, BLOCK_BYTES):
                writer.write("a", low, high - low, partial(copy, expected[low:high]))
            begin += size
        writer.finish()
    finally:
        writer.close()
    assert (tmp_path / "a").read_bytes() == data
    assert block_sums(writer.fragments["a"], len(data), BLOCK_BYTES) == [zlib.crc32(data)]
