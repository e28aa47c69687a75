"""The writer of chunks: whatever their size and place, the bytes are in the file, and their checksums are those."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero.checkpoint import files
from zero.checkpoint.format.checksums import BLOCK_BYTES, block_sums, split
from zero.checkpoint.format.tensorfile import PAGE
from zero.checkpoint.write.chunk_writer import SMALLEST_DIRECT, ChunkWriter

SIZES = (1, PAGE - 1, 3 * SMALLEST_DIRECT, 5, 2 * SMALLEST_DIRECT + PAGE, 2 * PAGE + 7, SMALLEST_DIRECT, 100)


def _put(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


@pytest.mark.assumes("pwrite")
@pytest.mark.parametrize("how", ["direct", "refused", "impossible"])
def test_all_bytes_are_written_at_any_place(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``refused``: a file system opens a file for direct writes and takes none of them."""
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
                writer.write("a", low, high - low, partial(_put, expected[low:high]))
            begin += size
        writer.finish()
    finally:
        writer.close()
    assert (tmp_path / "a").read_bytes() == data
    assert block_sums(writer.fragments["a"], len(data), BLOCK_BYTES) == [zlib.crc32(data)]
