"""Reads parts of saved tensors into memory, in the order of the files, each block once.

Knows: files, blocks, parts. Does not know: which part becomes which weights or states.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...core.bits import as_bytes, memory_of
from ..format.extents import Part, TensorFile, chunks
from .file_reader import FileReader, each_block
from .reader import Checkpoint

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
        """Read a block: its parts to their places, and what lies between them to nowhere."""
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
