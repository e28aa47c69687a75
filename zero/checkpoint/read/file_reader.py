"""Reads one file of a checkpoint. Every block that is touched is compared with its checksum.

Knows: blocks, and which tensors one has, for errors. Does not know: the checkpoint. Follows no link below its folder.
Blocks may be read by several threads: Python's other threads run while one reads or sums a block.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from ...core.statetree import FormatError
from .. import files
from ..format.manifest import FileSums
from ..format.tensorfile import Header, header_length, parse_header

MOST_THREADS = 4  # of one process: more of them wait for the same disk
_Block = TypeVar("_Block")


class CheckpointError(ValueError):
    """A checkpoint is damaged, or a folder is no checkpoint."""


class FileReader:
    """Reads one file of a checkpoint. It is open inside a ``with`` block."""

    def __init__(self, folder: Path, path: str, sums: FileSums, block_bytes: int) -> None:
        self.path = path
        self._folder, self._file, self._sums, self._block = folder, folder / path, sums, block_bytes
        self._opened = ExitStack()
        self._number = -1
        self._buffer: memoryview | None = None
        self._kept = -1  # the block in the buffer

    def __enter__(self) -> FileReader:
        """Open the file. Raises `CheckpointError` unless it is a regular file of the size that the manifest says."""
        try:
            self._number = self._opened.enter_context(files.read_only(self._folder, self.path))
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be read ({error.strerror or error})") from error
        size = os.fstat(self._number).st_size
        if size != self._sums.nbytes:
            self._opened.close()
            raise CheckpointError(
                f"{self._file} has {size:,} bytes instead of {self._sums.nbytes:,}: it was cut off or changed"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._number = self._kept = -1

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes

    @property
    def blocks(self) -> int:
        return len(self._sums.crc32)

    def span(self, block: int) -> tuple[int, int]:
        """Return the first byte of a block, and its length."""
        begin = block * self._block
        return begin, min(self._block, self._sums.nbytes - begin)

    def verify(self, first: int, last: int, threads: int = 1) -> None:
        """Read the blocks from ``first`` to ``last`` (exclusive), in ``threads`` threads.

        Raises `CheckpointError` naming the first broken one.
        """
        buffers = threading.local()

        def read(block: int) -> None:
            if not hasattr(buffers, "memory"):
                buffers.memory = memoryview(bytearray(min(self._block, self.nbytes)))
            self.read_block(block, buffers.memory[: self.span(block)[1]])

        each_block(range(first, last), read, threads)

    def read(self, begin: int, length: int) -> bytearray:
        """Return bytes of the file, checked."""
        data = bytearray(length)
        self.read_into(memoryview(data), begin)
        return data

    def read_into(self, out: memoryview, begin: int) -> None:
        """Fill ``out`` with the bytes from ``begin`` on. Raises `CheckpointError` naming a broken block."""
        done = 0
        while done < len(out):
            block, inside = divmod(begin + done, self._block)
            whole = self.span(block)[1]
            length = min(whole - inside, len(out) - done)
            if length == whole:
                self.read_block(block, out[done : done + length])
            else:
                out[done : done + length] = self._keep(block)[inside : inside + length]
            done += length

    def _keep(self, block: int) -> memoryview:
        """Return a block. The last one is kept, since small tensors share one."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(min(self._block, self.nbytes)))
        data = self._buffer[: self.span(block)[1]]
        if block != self._kept:
            self._kept = -1
            self.read_block(block, data)
            self._kept = block
        return data

    def read_block(self, block: int, *pieces: memoryview) -> None:
        """Fill ``pieces``, which together have the block's length. Raises `CheckpointError` if the block is broken."""
        begin, length = self.span(block)
        try:
            read = files.read_pieces(self._number, pieces, begin)
        except OSError as error:
            raise CheckpointError(f"block {block} of {self._file} cannot be read ({error.strerror})") from error
        found = 0
        for piece in pieces:
            found = zlib.crc32(piece, found)
        if read != length or found != self._sums.crc32[block]:
            raise CheckpointError(f"{self._file} is broken at block {block}{self._names(block)}")

    def _names(self, block: int) -> str:
        """Return, as text, the tensors that a broken block has bytes of, if the header can still be read."""
        try:
            found = self._header()
        except (FormatError, OSError):
            return " (its header)" if block == 0 and self.path.endswith(".safetensors") else ""
        begin = block * self._block - found.data
        end = begin + self._block
        names = [repr(e.name) for e in found.tensors if e.nbytes and e.end > begin and e.begin < end]
        if len(names) > 1:
            names = [f"one of {len(names)} tensors from {names[0]} to {names[-1]}"]
        return f" ({' or '.join([*(['its header'] if begin < 0 else []), *names])})"

    def _header(self) -> Header:
        """Return the header of a safetensors file, unchecked."""
        first = bytearray(8)
        read = files.read_at(self._number, memoryview(first), 0)
        text = bytearray(header_length(bytes(first[:read]), self.nbytes))
        files.read_at(self._number, memoryview(text), 8)
        return parse_header(bytes(text), self.nbytes)


def threads_of_rank(world_size: int) -> int:
    """Return how many threads a rank uses if all ``world_size`` ranks may be on this host, and read at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // world_size))


def each_block(blocks: Sequence[_Block], read: Callable[[_Block], None], threads: int) -> None:
    """Call ``read`` for each block, in ``threads`` threads, of which the caller's is one.

    Returns when no thread reads any more. If reads fail, the error of the first of these blocks is raised.
    """
    numbers = iter(range(len(blocks)))
    failed: list[tuple[int, BaseException]] = []

    def work() -> None:
        while not failed and (number := next(numbers, None)) is not None:
            try:
                read(blocks[number])
            except BaseException as error:  # raised by the caller's thread
                failed.append((number, error))

    others = []
    try:
        for _ in range(min(threads, len(blocks)) - 1):
            other = threading.Thread(target=work, name="zero-read")
            other.start()
            others.append(other)
    except RuntimeError:  # no further thread can be started: those that there are do the work
        pass
    work()
    for other in others:
        other.join()
    if failed:
        raise min(failed, key=lambda pair: pair[0])[1]
