"""The disk's own time for as many bytes as a checkpoint has: one process, one file or the same files.

Knows: system calls, clocks. Does not know: checkpoints.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

PIECE = 4 << 20  # bytes of one write or read


def write(folder: Path, nbytes: int, *, direct: bool) -> float:
    """Return the seconds in which ``nbytes`` are written into a new file that has its room, and are on the disk.

    ``direct``: past the page cache, in whole pages.
    """
    path = folder / "written"
    buffer = mmap.mmap(-1, PIECE)  # page-aligned, as O_DIRECT needs it
    buffer.write(os.urandom(PIECE))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0))
    try:
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(file, 0, room)
        os.fsync(file)
        data = memoryview(buffer)
        begin = time.perf_counter()
        for place in range(0, room, PIECE):
            os.pwrite(file, data[: min(PIECE, room - place)], place)
        os.fdatasync(file)
        return time.perf_counter() - begin
    finally:
        os.close(file)
        path.unlink()


def files_of(path: Path) -> list[Path]:
    """Return a file, or all files below a folder."""
    return [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())


def read(paths: Iterable[Path]) -> float:
    """Return the seconds in which files are read, into one buffer."""
    buffer = memoryview(bytearray(PIECE))
    begin = time.perf_counter()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        place = 0
        while count := os.preadv(file, [buffer], place):
            place += count
        os.close(file)
    return time.perf_counter() - begin


def drop(paths: Iterable[Path]) -> None:
    """Drop the pages of files from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
