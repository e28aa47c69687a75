"""The folder of a checkpoint as files of tensors. Every block that is touched is compared with its checksum.

Knows: the manifest, headers, indices, blocks. Does not know: what the tensors are, optimizers, ranks. Runs no code of
the checkpoint, follows no link, and reads nothing outside its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from ...core.bits import as_bytes, laid_out, memory_of
from ...core.cuts import EvenCuts
from ...core.statetree import DTYPES, FormatError
from ..folder.directory import read_manifest, steps_in
from ..format.manifest import NAME, Manifest
from ..format.names import AVERAGES, FOLDERS, MASTERS, MODEL, averages_in, index_file
from ..format.tensorfile import Header, TensorEntry, header_length, parse_header, parse_index, with_strides
from .file_reader import CheckpointError, FileReader


class TensorFolder:
    """The files of a checkpoint on a disk.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a checkpoint. Raises `CheckpointError` if it is none, or its manifest is damaged."""
        self.path = Path(path)
        try:
            self.manifest: Manifest = read_manifest(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            newest = _newest_in(self.path)
            raise CheckpointError(f"{self.path} is not a checkpoint: it has no {NAME}{newest}") from error
        except (OSError, FormatError) as error:
            raise CheckpointError(f"{self.path / NAME}: {error}") from error
        self._headers: dict[str, Header] = {}

    @property
    def average_names(self) -> list[str]:
        """The names of all averages, in order."""
        return averages_in(self.manifest.files)

    def file(self, path: str) -> FileReader:
        """Return the reader of one file."""
        if path not in self.manifest.files:
            raise CheckpointError(f"{self.path} has no {path}")
        return FileReader(self.path, path, self.manifest.files[path], self.manifest.block_bytes)

    def header(self, path: str) -> Header:
        """Return the header of a safetensors file."""
        if path not in self._headers:
            with self.parsing(path), self.file(path) as reader:
                length = header_length(bytes(reader.read(0, min(8, reader.nbytes))), reader.nbytes)
                found = parse_header(bytes(reader.read(8, length)), reader.nbytes)
                self._headers[path] = found if path.startswith(f"{MODEL}/") else with_strides(found)
        return self._headers[path]

    @contextmanager
    def parsing(self, path: str) -> Iterator[None]:
        """Raise `CheckpointError` naming a file whose format is wrong."""
        try:
            yield
        except FormatError as error:
            raise CheckpointError(f"{self.path / path}: {error}") from error

    def tensors(self, folder: str) -> dict[str, tuple[str, TensorEntry]]:
        """Return each tensor of a folder: its file, and its entry there."""
        found: dict[str, tuple[str, TensorEntry]] = {}
        for path in self.paths(folder):
            for entry in self.header(path).tensors:
                if entry.name in found:
                    raise CheckpointError(f"{self.path}: {entry.name!r} is in {found[entry.name][0]} and in {path}")
                found[entry.name] = (path, entry)
        return found

    def paths(self, folder: str) -> list[str]:
        """Return the safetensors files of a folder, in order."""
        inside = (path for path in self.manifest.files if path.rpartition("/")[0] == folder)
        return sorted(path for path in inside if path.endswith(".safetensors"))

    def read(self, path: str, entry: TensorEntry) -> Tensor:
        """Return a tensor."""
        with self.file(path) as reader:
            return self._read(reader, entry)

    def _read(self, reader: FileReader, entry: TensorEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        if entry.nbytes:
            reader.read_into(memory_of(as_bytes(made)), self.header(reader.path).data + entry.begin)
        return made if entry.stride is None else laid_out(made, entry.stride)

    def read_all(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a file by name, read in the order of their bytes."""
        with self.file(path) as reader:
            return {entry.name: self._read(reader, entry) for entry in self.header(path).tensors}

    def read_folder(self, folder: str) -> dict[str, Tensor]:
        """Return the tensors of a folder by name."""
        self.tensors(folder)  # raises if a name occurs twice
        return {name: tensor for path in self.paths(folder) for name, tensor in self.read_all(path).items()}

    # -- verification -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Read every block of every file. Raises `CheckpointError` naming the first file, and the tensor, that is
        damaged, missing, or too many."""
        self.verify_part(0, 1, 1)
        for path in self.manifest.files:
            if path.endswith(".safetensors"):
                self.header(path)

    def verify_part(self, number: int, parts: int, threads: int) -> None:
        """Do as `verify`, but read only the part ``number`` of all blocks, in ``threads`` threads."""
        self._check_structure()
        counts = {path: self.file(path).blocks for path in self.manifest.files}
        low, high = EvenCuts(sum(counts.values()), parts, 1).owned(number)
        begin = 0
        for path, blocks in counts.items():
            first, last = max(low - begin, 0), min(high - begin, blocks)
            if first < last:
                with self.file(path) as reader:
                    reader.verify(first, last, threads)
            begin += blocks
        for folder in (*FOLDERS, *(f"{AVERAGES}/{name}" for name in self.average_names)):
            self._check_index(folder)

    def _check_structure(self) -> None:
        """Raise `CheckpointError` if a file is missing, has another size, or should not be there."""
        for path in self.manifest.files:
            with self.file(path):
                pass
        for parent, folders, names in os.walk(self.path):
            links = [name for name in folders if (Path(parent) / name).is_symlink()]
            for name in (*names, *links):
                inside = (Path(parent) / name).relative_to(self.path).as_posix()
                if inside not in self.manifest.files and inside != NAME and _may_mislead(inside):
                    raise CheckpointError(f"{self.path / inside} is no part of the checkpoint")

    def _check_index(self, folder: str) -> None:
        tensors = self.tensors(folder)
        path = index_file(folder)
        if path not in self.manifest.files:
            if tensors or folder != MASTERS:
                raise CheckpointError(f"{self.path} has no {path}")
            return
        with self.parsing(path), self.file(path) as reader:
            placed = parse_index(bytes(reader.read(0, reader.nbytes)))
        if placed != {name: file.rpartition("/")[2] for name, (file, _) in tensors.items()}:
            raise CheckpointError(f"{self.path / path} does not name the files in which the tensors are")


def _newest_in(directory: Path) -> str:
    """Return words that name the newest checkpoint in a folder of checkpoints; none if it is no such folder."""
    newest: list[Path] = []
    with suppress(OSError):
        newest = list(steps_in(directory).values())[-1:]
    return "".join(f"; it is a folder of checkpoints, and the newest is {path}" for path in newest)


def _may_mislead(path: str) -> bool:
    """Return whether a file that a manifest does not name could be taken for a part of the checkpoint."""
    return not path.startswith("model/") or path.endswith((".safetensors", ".safetensors.index.json", ".bin"))
