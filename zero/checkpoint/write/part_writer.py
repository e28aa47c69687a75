"""Writes the chunks of one rank into a file of its own, from which rank 0 makes the files of the checkpoint.

Knows: file systems that write a file from its beginning to its end alone, so that ranks cannot share one. Does not
know: what the bytes are, when a save is complete.

    parts/rank-00000, parts/rank-00001, ...      the chunks of each rank, one after the other, while a save is under way
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from .. import files
from ..format.checksums import Fragment
from .chunk_writer import Writer

PARTS = "parts"


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
