"""Reads a checkpoint: the plain dicts, the states by name, the caller's state, its files of tensors.

Reads one file of a checkpoint. Every block that is touched is compared with its checksum.

Reads parts of saved tensors into memory, in the order of the files, each block once.

Knows: the manifest, headers, indices, the folders and keys of the format, parts of tensors. Does not know: ranks, how
an optimizer is loaded. Runs no code of the checkpoint, follows no link, and reads nothing outside its folder.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...checkpoint import files
from ...core.bits import as_bytes, laid_out, memory_of
from ...core.layout import EvenCuts
from ...core.statetree import DTYPES, NO_OPTIONS, FormatError, Rebuild, decode, decode_states
from ...state.plain_dicts import split
from ..folder.directory import read_manifest, steps_in
from ..format.extents import Part, TensorFile, chunks
from ..format.manifest import (
    AVERAGES,
    FOLDERS,
    MASTERS,
    MODEL,
    NAME,
    OPTIMIZER,
    STATE_FILE,
    FileSums,
    Manifest,
    averages_in,
    index_file,
    rank_file,
    split_key,
)
from ..format.tensorfile import Header, TensorEntry, header_length, parse_header, parse_index, parse_json, with_strides

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


_Value = TypeVar("_Value")


class Checkpoint:
    """A checkpoint on disk, as `zero.open_checkpoint` returns it. Needs no ranks; tensors are read on demand.

    Attributes:
        path: the folder.
        manifest: ``checkpoint.json``, parsed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a checkpoint. Raises `CheckpointError` if there is none, or its manifest is damaged."""
        self.path = Path(path)
        try:
            self.manifest: Manifest = read_manifest(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            newest = _newest_in(self.path)
            raise CheckpointError(f"{self.path} is not a checkpoint: it has no {NAME}{newest}") from error
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
        """The names of values that could not be saved."""
        return self.manifest.not_saved

    @property
    def average_names(self) -> list[str]:
        """The names of all averages, in order."""
        return averages_in(self.manifest.files)

    # -- values -------------------------------------------------------------------------------------------------------

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return the model's tensors by name, on the CPU, as ``module.load_state_dict`` takes them.

        The names of tied parameters are included. Raises `CheckpointError` if a file is damaged, as does every other
        call that reads tensors.
        """
        found = self.read_folder(MODEL)
        return found | {alias: found[name] for alias, name in self.ties().items()}

    def ties(self) -> dict[str, str]:
        """Return each further name of a tied tensor, with the name under which it is saved. Internal."""
        paths = self.paths(MODEL)
        known = dict(self.header(paths[0]).metadata) if paths else {}
        known.pop("format", None)
        saved = self.tensors(MODEL) if known else {}
        for alias, name in known.items():
            if name not in saved:
                raise CheckpointError(f"{self.path}: {alias!r} is another name of {name!r}, which is in no file")
        return known

    def masters(self) -> dict[str, Tensor]:
        """Return the master weights by name, on the CPU; an empty dict without mixed precision."""
        return self.read_folder(MASTERS)

    def averages(self, name: str) -> dict[str, Tensor]:
        """Return the averages with this name, by parameter name. Raises `CheckpointError` if there are none."""
        if name not in self.average_names:
            raise CheckpointError(f"{self.path} has no averages {name!r}, but {self.average_names}")
        return self.read_folder(f"{AVERAGES}/{name}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of the param groups; "params" holds the parameters' names."""
        with self.parsing(NAME):
            return [decode(group, {}) for group in self.manifest.param_groups]

    def state_values(self) -> dict[str, dict[str, Any]]:
        """Return the states that are no tensors, as JSON: by the parameter's name, by the state's name.

        Tensors inside them are among `states`: `decode_states` brings them together. Internal.
        """
        for path in self.paths(OPTIMIZER)[:1]:  # each of them has all values
            with self.parsing(path):
                values = parse_json(self.header(path).metadata.get("values", "{}").encode(), "values")
                if not isinstance(values, dict):
                    raise FormatError("its values have no names")
                return self._by_parameter(values)
        return {}

    def states(self) -> dict[str, dict[str, tuple[str, TensorEntry]]]:
        """Return file and entry of each state that is a tensor, by the parameter's and its own name. Internal."""
        return self._by_parameter(self.tensors(OPTIMIZER))

    def _by_parameter(self, values: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
        """Return what has the keys of states by the parameter's name, and by the state's."""
        parameters = {name for group in self.param_groups for name in group["params"]}
        found: dict[str, dict[str, _Value]] = {}
        for key, value in values.items():
            names = split_key(key, parameters)
            if names is None:
                raise CheckpointError(f"{self.path}: {key!r} is the state of no parameter of a param group")
            found.setdefault(names[0], {})[names[1]] = value
        return found

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the plain `torch.optim` dict, on the CPU, with "masters" if there are master weights.

        If param groups have several classes, it holds one such dict per class, by the class's name.
        """
        names = [group.get("optimizer_class", "") for group in self.param_groups]
        whole = self.whole_state_dict()
        return split(whole, names) if len(set(names)) > 1 else whole

    def whole_state_dict(self) -> dict[str, Any]:
        """Return one dict of all param groups, whatever their classes, with "masters" if there are any. Internal."""
        tensors = self._by_parameter(self.read_folder(OPTIMIZER))
        with self.parsing(OPTIMIZER):
            whole = plain_dict(self.param_groups, tensors, self.state_values())
        order = [name for group in whole["param_groups"] for name in group["param_names"]]
        indices = {name: index for index, name in enumerate(order)}
        masters: dict[int, Tensor] = {}
        for name, tensor in self.masters().items():
            if name not in indices:
                raise CheckpointError(f"{self.path}: {name!r} has master weights, but is in no param group")
            masters[indices[name]] = tensor
        return {**whole, MASTERS: masters} if masters else whole

    @property
    def state(self) -> dict[str, Any]:
        """The caller's state that all ranks had."""
        return self.tree(STATE_FILE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return a rank's own state, with its random generators: "rng" and "rank_state"."""
        path = rank_file(rank)
        found = self.tree(path)
        if not all(isinstance(found.get(key), dict) for key in ("rng", "rank_state")):
            raise CheckpointError(f"{self.path / path}: it has no 'rng' and 'rank_state' by name")
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote it."""
        return len(self.paths("ranks"))

    def tree(self, path: str) -> dict[str, Any]:
        """Return the values of a file of one tree. Internal."""
        tensors = self.read_all(path)
        with self.parsing(path):
            found = decode(parse_json(self.header(path).metadata.get("tree", "null").encode(), "tree"), tensors)
            if not isinstance(found, dict):
                raise FormatError("it has no tree of values by name")
            return found

    # -- files ---------------------------------------------------------------------------------------------------------

    def file(self, path: str) -> FileReader:
        """Return the reader of one file. Internal."""
        if path not in self.manifest.files:
            raise CheckpointError(f"{self.path} has no {path}")
        return FileReader(self.path, path, self.manifest.files[path], self.manifest.block_bytes)

    def header(self, path: str) -> Header:
        """Return the header of a safetensors file. Internal."""
        if path not in self._headers:
            with self.parsing(path), self.file(path) as reader:
                length = header_length(bytes(reader.read(0, min(8, reader.nbytes))), reader.nbytes)
                found = parse_header(bytes(reader.read(8, length)), reader.nbytes)
                self._headers[path] = found if path.startswith(f"{MODEL}/") else with_strides(found)
        return self._headers[path]

    @contextmanager
    def parsing(self, path: str) -> Iterator[None]:
        """Raise `CheckpointError` naming a file whose format is wrong. Internal."""
        try:
            yield
        except FormatError as error:
            raise CheckpointError(f"{self.path / path}: {error}") from error

    def tensors(self, folder: str) -> dict[str, tuple[str, TensorEntry]]:
        """Return each tensor of a folder: its file, and its entry there. Internal."""
        found: dict[str, tuple[str, TensorEntry]] = {}
        for path in self.paths(folder):
            for entry in self.header(path).tensors:
                if entry.name in found:
                    raise CheckpointError(f"{self.path}: {entry.name!r} is in {found[entry.name][0]} and in {path}")
                found[entry.name] = (path, entry)
        return found

    def paths(self, folder: str) -> list[str]:
        """Return the safetensors files of a folder, in order. Internal."""
        inside = (path for path in self.manifest.files if path.rpartition("/")[0] == folder)
        return sorted(path for path in inside if path.endswith(".safetensors"))

    def read(self, path: str, entry: TensorEntry) -> Tensor:
        """Return a tensor. Internal."""
        with self.file(path) as reader:
            return self._read(reader, entry)

    def _read(self, reader: FileReader, entry: TensorEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        if entry.nbytes:
            reader.read_into(memory_of(as_bytes(made)), self.header(reader.path).data + entry.begin)
        return made if entry.stride is None else laid_out(made, entry.stride)

    def read_all(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a file by name, read in the order of their bytes. Internal."""
        with self.file(path) as reader:
            return {entry.name: self._read(reader, entry) for entry in self.header(path).tensors}

    def read_folder(self, folder: str) -> dict[str, Tensor]:
        """Return the tensors of a folder by name. Internal."""
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
        """Do as `verify`, but read only the part ``number`` of all blocks, in ``threads`` threads. Internal."""
        self.check_structure()
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

    def check_structure(self) -> None:
        """Raise `CheckpointError` if a file is missing, has another size, or should not be there. Internal."""
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


def plain_dict(
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Mapping[str, Tensor]],
    values: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, Rebuild] | None = None,
) -> dict[str, Any]:
    """Return the torch.optim dict of saved param groups and states, which are given by the parameters' names.

    ``tensors``, ``values``, ``kinds``: of `decode_states`. Raises `FormatError` as that does.
    """
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    states = {
        indices[name]: dict(sorted(decode_states(values.get(name, {}), tensors.get(name, {}), kinds).items()))
        for name in tensors.keys() | values.keys()
    }
    packed = [
        {
            **{key: value for key, value in group.items() if key not in NO_OPTIONS},
            "param_names": list(group["params"]),
            "params": [indices[name] for name in group["params"]],
        }
        for group in groups
    ]
    return {"state": dict(sorted(states.items())), "param_groups": packed}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open one checkpoint to read it, as a `zero.checkpoint.Checkpoint`. Needs no ranks and no process group.

    Raises `CheckpointError` if ``path`` is not the folder of a checkpoint, or its manifest is damaged.
    """
    return Checkpoint(path)


def _newest_in(directory: Path) -> str:
    """Return words that name the newest checkpoint in a folder of checkpoints; none if it is no such folder."""
    newest: list[Path] = []
    with suppress(OSError):
        newest = list(steps_in(directory).values())[-1:]
    return "".join(f"; it is a folder of checkpoints, and the newest is {path}" for path in newest)


def _may_mislead(path: str) -> bool:
    """Return whether a file that a manifest does not name could be taken for a part of the checkpoint."""
    return not path.startswith("model/") or path.endswith((".safetensors", ".safetensors.index.json", ".bin"))


Target = tuple[str, int]


class PartReader:
    """Reads parts of tensors of one checkpoint. `want` says which, `read` reads all of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._rounds: list[dict[tuple[str, str], list[Part]]] = []  # of a tensor that two read, each has one part
        self._memory: dict[Target, Tensor] = {}
        self._left: Counter[Target] = Counter()  # bytes of each that are still to be read
        self._then: dict[Target, list[Callable[[], object]]] = {}
        self._lock = threading.Lock()  # of these three, while several threads read

    def memory(self, target: Target, make: Callable[[], Tensor]) -> Tensor:
        """Return the memory of a target, a contiguous tensor on the CPU: ``make()`` at the first time.

        It is kept until all parts of the target were read.
        """
        if target not in self._memory:
            self._memory[target] = make()
        return self._memory[target]

    def want(self, folder: str, name: str, part: Part, then: Callable[[], object] | None = None) -> None:
        """Read a part of a tensor to its source, a target. ``then``: called when all parts of that target are there."""
        key = folder, name
        if all(key in parts for parts in self._rounds):
            self._rounds.append({})
        next(parts for parts in self._rounds if key not in parts)[key] = [part]
        self._left[part.source] += part.nbytes
        if then is not None:
            self._then.setdefault(part.source, []).append(then)

    def read(self, threads: int) -> None:
        """Read all parts, in the order of the files. Raises `CheckpointError` naming a broken block."""
        for parts in self._rounds:
            self._read_round(parts, threads)

    def _read_round(self, parts: Mapping[tuple[str, str], Sequence[Part]], threads: int) -> None:
        found, folders = self._checkpoint, dict.fromkeys(folder for folder, _ in parts)
        headers = {path: found.header(path) for folder in folders for path in found.paths(folder)}
        saved = [TensorFile(path, header.data, header.tensors) for path, header in headers.items()]
        block_bytes = found.manifest.block_bytes
        wanted = chunks(saved, parts, block_bytes)
        for path, of_file in itertools.groupby(wanted, key=lambda chunk: chunk.path):
            blocks = [
                (block, [part for chunk in of_block for part in chunk.parts])
                for block, of_block in itertools.groupby(of_file, key=lambda chunk: chunk.begin // block_bytes)
            ]
            with found.file(path) as reader:
                each_block(blocks, functools.partial(self._read_block, reader), threads)

    def _read_block(self, reader: FileReader, wanted: tuple[int, Sequence[Part]]) -> None:
        """Read the parts of a block to their places, and skip what lies between them."""
        block, parts = wanted
        begin, length = reader.span(block)
        with self._lock:
            memory = {source: memory_of(as_bytes(self._memory[source])) for source in {part.source for part in parts}}
        end, pieces = begin, []
        for part in parts:
            into = memory[part.source][part.offset : part.offset + part.nbytes]
            pieces += [_nowhere(part.begin - end), into]
            end = part.begin + part.nbytes
        reader.read_block(block, *(piece for piece in (*pieces, _nowhere(begin + length - end)) if piece))
        with self._lock:
            for part in parts:
                self._left[part.source] -= part.nbytes
            done = {part.source for part in parts if not self._left[part.source]}
        for target in done:
            for action in self._then.pop(target, ()):
                action()
            del self._memory[target]


def _nowhere(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
