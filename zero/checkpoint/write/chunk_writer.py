"""Writes the chunks of one rank into files, and forms their checksums.

Knows: page alignment, direct writes, fragments, and file systems that write a file from its beginning to its end alone,
so that ranks cannot share one. Does not know: what the bytes are, when a save is complete.

    parts/rank-00000, parts/rank-00001, ...      there: the chunks of each rank, one after the other; rank 0 makes the
                                                 files of the checkpoint from them

A chunk passes through one page-aligned buffer. Its whole pages are written past the kernel's page cache (O_DIRECT),
which takes a fifth of the CPU time; its ragged ends, and everything on a file system that refuses, through the cache.
The checksum is that of the buffer, so it is that of what was written.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .. import files
from ..format.checksums import Fragment, split
from ..format.tensorfile import PAGE

PARTS = "parts"
SMALLEST_DIRECT = 64 * 1024  # below, two system calls cost more than the copy into the cache


class Writer(ABC):
    """Writes chunks. They are on the disk after `finish`."""

    def __init__(self, folder: Path, rank: int, block_bytes: int) -> None:
        """``folder``: of the save. ``block_bytes``: of the largest chunk."""
        self._folder, self._rank, self._block_bytes = folder, rank, block_bytes
        self._memory = mmap.mmap(-1, block_bytes + PAGE)
        self._view = memoryview(self._memory)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._open = ExitStack()
        self.fragments: dict[str, list[Fragment]] = {}
        self.nbytes = 0

    def write(self, path: str, begin: int, nbytes: int, fill: Callable[[Tensor], None]) -> None:
        """Write ``nbytes`` at ``begin`` of the file ``path``. ``fill``: puts the bytes into a 1-D uint8 tensor."""
        place = begin % PAGE
        fill(self._buffer[place : place + nbytes])
        data = self._view[place : place + nbytes]
        fragment = Fragment(begin, nbytes, zlib.crc32(data), self._rank, self.nbytes)
        self.fragments.setdefault(path, []).append(fragment)
        self._put(path, begin, data)
        self.nbytes += nbytes

    @abstractmethod
    def _put(self, path: str, begin: int, data: memoryview) -> None:
        """Write the bytes of a chunk."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write the first bytes of the file ``path``."""
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for begin, end in split(0, len(data), self._block_bytes):
            self.write(path, begin, end - begin, partial(_copy, whole[begin:end]))

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that was written is on the disk."""

    def close(self) -> None:
        """Close what is open. Called also after an error."""
        self._open.close()
        del self._buffer
        self._view.release()


class ChunkWriter(Writer):
    """Writes each chunk at its place in its file, file after file."""

    _path: str | None = None
    _file = _direct = -1

    def _put(self, path: str, begin: int, data: memoryview) -> None:
        if path != self._path:
            self._begin(path)
        low = -(-begin // PAGE) * PAGE
        high = (begin + len(data)) // PAGE * PAGE
        if self._direct < 0 or high - low < SMALLEST_DIRECT:
            files.write_at(self._file, data, begin)
            return
        try:
            files.write_at(self._direct, data[low - begin : high - begin], low)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system asks for another alignment
                raise
            self._direct = -1
            files.write_at(self._file, data, begin)
            return
        files.write_at(self._file, data[: low - begin], begin)
        files.write_at(self._file, data[high - begin :], high)

    def _begin(self, path: str) -> None:
        self._open.close()
        self._path, self._direct = path, -1
        self._file = self._open.enter_context(files.opened(self._folder / path))
        if files.DIRECT:
            with suppress(OSError):  # not on this file system
                self._direct = self._open.enter_context(files.opened(self._folder / path, os.O_WRONLY | files.DIRECT))

    def finish(self) -> None:
        files.sync_files([self._folder / path for path in self.fragments])


class PartWriter(Writer):
    """Writes chunks one after the other into a new file."""

    def __init__(self, folder: Path, rank: int, block_bytes: int) -> None:
        super().__init__(folder, rank, block_bytes)
        self._file = self._open.enter_context(files.opened(part_of(folder, rank), files.NEW))

    def _put(self, path: str, begin: int, data: memoryview) -> None:
        files.write_at(self._file, data, self.nbytes)

    def finish(self) -> None:
        files.sync(self._file)


def part_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's part."""
    return folder / PARTS / f"rank-{rank:05d}"


def put_together(folder: Path, paths: Sequence[str], fragments: Mapping[str, Sequence[Fragment]]) -> None:
    """Make the files of a checkpoint from the parts of all ranks, and remove these. The files are on the disk then.

    Raises `OSError` also if a part does not have the bytes that its rank has written.
    """
    with ExitStack() as opening:
        parts: dict[int, int] = {}
        for path in paths:
            with files.opened(folder / path, files.NEW) as number:
                for fragment in sorted(fragments.get(path, ())):
                    if fragment.rank not in parts:
                        name = f"{PARTS}/{part_of(folder, fragment.rank).name}"
                        parts[fragment.rank] = opening.enter_context(files.read_only(folder, name))
                    data = bytearray(fragment.length)
                    files.read_at(parts[fragment.rank], memoryview(data), fragment.place)
                    if zlib.crc32(data) != fragment.crc32:
                        raise OSError(f"{part_of(folder, fragment.rank)} does not have what its rank has written")
                    files.write_at(number, memoryview(data), fragment.begin)
                files.sync(number)
    for part in (folder / PARTS).iterdir():
        files.remove(part)
    files.remove_folder(folder / PARTS)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)
