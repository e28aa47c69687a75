"""Reads the files of a checkpoint. Every block that is touched is compared with its checksum.

Knows: the manifest, headers, blocks. Does not know: optimizers, ranks. Runs no code of the checkpoint, follows no link,
and reads nothing outside its folder.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.bits import as_bytes, memory_of
from ..directory import read_manifest
from ..format.manifest import NAME, Manifest
from ..format.names import FOLDERS, MASTERS, MODEL, OPTIMIZER, STATE_FILE, index_file, rank_file, split_key
from ..format.statetree import decode
from ..format.tensorfile import (
    DTYPES,
    FormatError,
    Header,
    TensorEntry,
    header_length,
    parse_header,
    parse_index,
    parse_json,
)
from .file_reader import CheckpointError, FileReader


class Checkpoint:
    """A checkpoint on a disk. `zero.open_checkpoint` returns it. Needs no ranks; tensors are read when asked for.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a checkpoint. Raises `CheckpointError` if it is none, or its manifest is damaged."""
        self.path = Path(path)
        try:
            self.manifest: Manifest = read_manifest(self.path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path} is not a checkpoint: it has no {NAME}") from error
        except (OSError, FormatError) as error:
            raise CheckpointError(f"{self.path / NAME}: {error}") from error
        self._headers: dict[str, Header] = {}

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step {self.step}, content {self.content[:12]})"

    @property
    def step(self) -> int:
        """The number under which it was saved."""
        return self.manifest.step

    @property
    def content(self) -> str:
        """The SHA-256 that every topology which saves this state writes."""
        return self.manifest.content

    @property
    def not_saved(self) -> tuple[str, ...]:
        """The names of what could not be saved."""
        return self.manifest.not_saved

    def file(self, path: str) -> FileReader:
        """Return the reader of one file."""
        if path not in self.manifest.files:
            raise CheckpointError(f"{self.path} has no {path}")
        return FileReader(self.path, path, self.manifest.files[path], self.manifest.block_bytes)

    def header(self, path: str) -> Header:
        """Return the header of a safetensors file."""
        if path not in self._headers:
            with self._parsing(path), self.file(path) as reader:
                length = header_length(bytes(reader.read(0, min(8, reader.nbytes))), reader.nbytes)
                self._headers[path] = parse_header(bytes(reader.read(8, length)), reader.nbytes)
        return self._headers[path]

    @contextmanager
    def _parsing(self, path: str) -> Iterator[None]:
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
        return made

    def _read_all(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a file by name, read in the order of their bytes."""
        with self.file(path) as reader:
            return {entry.name: self._read(reader, entry) for entry in self.header(path).tensors}

    def _read_folder(self, folder: str) -> dict[str, Tensor]:
        """Return the tensors of a folder by name."""
        self.tensors(folder)  # raises if a name occurs twice
        return {name: tensor for path in self.paths(folder) for name, tensor in self._read_all(path).items()}

    # -- values -------------------------------------------------------------------------------------------------------

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return the model's tensors by name, aliases included, as ``module.load_state_dict`` takes them."""
        found = self._read_folder(MODEL)
        for alias, name in self._aliases().items():
            if name not in found:
                raise CheckpointError(f"{self.path}: {alias!r} is another name of {name!r}, which is in no file")
            found[alias] = found[name]
        return found

    def _aliases(self) -> dict[str, str]:
        paths = self.paths(MODEL)
        known = dict(self.header(paths[0]).metadata) if paths else {}
        known.pop("format", None)
        return known

    def masters(self) -> dict[str, Tensor]:
        """Return the master weights by name; none without mixed precision."""
        return self._read_folder(MASTERS)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of the param groups; "params" has the names of the parameters."""
        with self._parsing(NAME):
            return [decode(group, {}) for group in self.manifest.param_groups]

    def state_values(self) -> dict[str, dict[str, Any]]:
        """Return the states that are no tensors: by the parameter's name, by the state's name."""
        found: dict[str, dict[str, Any]] = {}
        names = self._indices()
        for path in self.paths(OPTIMIZER)[:1]:  # each of them has all values
            with self._parsing(path):
                values = parse_json(self.header(path).metadata.get("values", "{}").encode(), "values")
                if not isinstance(values, dict):
                    raise FormatError("its values have no names")
                for key, value in values.items():
                    parameter, name = self._split(key, names)
                    found.setdefault(parameter, {})[name] = decode(value, {})
        return found

    def states(self) -> dict[str, dict[str, tuple[str, TensorEntry]]]:
        """Return each parameter's tensor states: by the parameter's name, by the state's name, file and entry."""
        found: dict[str, dict[str, tuple[str, TensorEntry]]] = {}
        names = self._indices()
        for key, place in self.tensors(OPTIMIZER).items():
            parameter, name = self._split(key, names)
            found.setdefault(parameter, {})[name] = place
        return found

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the plain torch.optim dict, with "masters" if there are master weights."""
        indices = self._indices()
        states: dict[int, dict[str, Any]] = {}
        for key, tensor in self._read_folder(OPTIMIZER).items():
            parameter, name = self._split(key, indices)
            states.setdefault(indices[parameter], {})[name] = tensor
        for parameter, values in self.state_values().items():
            states.setdefault(indices[parameter], {}).update(values)
        groups = []
        for group in self.param_groups:
            options = {k: v for k, v in group.items() if k not in ("params", "optimizer_class", "optimizer_module")}
            params = [indices[name] for name in group["params"]]
            groups.append({**options, "param_names": list(group["params"]), "params": params})
        masters: dict[int, Tensor] = {}
        for name, tensor in self.masters().items():
            if name not in indices:
                raise CheckpointError(f"{self.path}: {name!r} has master weights, but is in no param group")
            masters[indices[name]] = tensor
        ordered = {index: dict(sorted(states[index].items())) for index in sorted(states)}
        return {"state": ordered, "param_groups": groups, **({"masters": masters} if masters else {})}

    def _indices(self) -> dict[str, int]:
        """Return the index of each parameter that is in a param group, as torch.optim counts."""
        names = (name for group in self.param_groups for name in group["params"])
        return {name: index for index, name in enumerate(names)}

    def _split(self, key: str, names: Container[str]) -> tuple[str, str]:
        found = split_key(key, names)
        if found is None:
            raise CheckpointError(f"{self.path}: {key!r} is the state of no parameter of a param group")
        return found

    @property
    def state(self) -> dict[str, Any]:
        """The caller's state that all ranks had."""
        return self.tree(STATE_FILE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return a rank's own state, with its random generators: "rng" and "rank_state"."""
        return self.tree(rank_file(rank))

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote it."""
        return len(self.paths("ranks"))

    def tree(self, path: str) -> dict[str, Any]:
        """Return the values of a file of one tree."""
        tensors = self._read_all(path)
        with self._parsing(path):
            found = decode(parse_json(self.header(path).metadata.get("tree", "null").encode(), "tree"), tensors)
            if not isinstance(found, dict):
                raise FormatError("it has no tree of values by name")
            return found

    # -- verification -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Read every block of every file. Raises `CheckpointError` naming the first file, and the tensor, that is
        damaged, missing, or too many."""
        self.check_structure()
        for path in self.manifest.files:
            with self.file(path) as reader:
                reader.verify(0, reader.blocks)
        for path in self.manifest.files:
            if path.endswith(".safetensors"):
                self.header(path)
        self.check_indices()

    def check_structure(self) -> None:
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

    def check_indices(self) -> None:
        """Raise `CheckpointError` if the index of a folder does not say where its tensors are."""
        for folder in FOLDERS:
            self._check_index(folder)

    def _check_index(self, folder: str) -> None:
        tensors = self.tensors(folder)
        path = index_file(folder)
        if path not in self.manifest.files:
            if tensors or folder != MASTERS:
                raise CheckpointError(f"{self.path} has no {path}")
            return
        with self._parsing(path), self.file(path) as reader:
            placed = parse_index(bytes(reader.read(0, reader.nbytes)))
        if placed != {name: file.rpartition("/")[2] for name, (file, _) in tensors.items()}:
            raise CheckpointError(f"{self.path / path} does not name the files in which the tensors are")


def _may_mislead(path: str) -> bool:
    """Return whether a file that a manifest does not name could be taken for a part of the checkpoint."""
    return not path.startswith("model/") or path.endswith((".safetensors", ".safetensors.index.json", ".bin"))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open one checkpoint to read it. Needs no ranks and no process group.

    Raises `CheckpointError` if ``path`` is not the folder of a checkpoint, or its manifest is damaged.
    """
    return Checkpoint(path)
