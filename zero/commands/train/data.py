"""The text that `zero train` trains on: bytes from disk, cut into training and validation.

Knows: the source of the text, and which bytes micro-batch j of step s holds. Does not know: ranks. A micro-batch is
a pure function of (text, seed, s, j, batch, sequence), so it does not depend on the rank that takes it.

    |<------------- train: 9/10 ------------->|<- validation ->|
    file a . file b . file c . ...   (bytes of the files, in order of their paths)
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class Batch(NamedTuple):
    """`inputs` and `targets`, int64 (batch, sequence); the target of a byte is the byte after it."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Corpus:
    """One text, cut in two. `train` and `validation` are uint8 (bytes,); `sha256` is that of the whole text."""

    source: str
    train: Tensor
    validation: Tensor
    sha256: str

    def micro_batch(self, seed: int, step: int, index: int, batch: int, sequence: int) -> Batch:
        """Micro-batch `index` of global step `step`: `batch` windows from random places of the training text."""
        last = len(self.train) - sequence
        starts = np.random.default_rng((seed, step, index)).integers(0, last, size=batch)
        return _windows(self.train, starts.tolist(), sequence)

    def validation_batches(self, batch: int, sequence: int, windows: int) -> list[Batch]:
        """At most `windows` windows spread evenly over the validation text, `batch` at a time."""
        last = len(self.validation) - sequence - 1
        count = max(1, min(windows, last // sequence))
        count -= count % batch if count > batch else 0  # each loss counts alike
        starts = [last * i // max(1, count - 1) for i in range(count)]
        return [_windows(self.validation, starts[i : i + batch], sequence) for i in range(0, count, batch)]


def _windows(text: Tensor, starts: list[int], sequence: int) -> Batch:
    rows = torch.stack([text[start : start + sequence + 1] for start in starts]).long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def load_corpus(path: Path | None, sequence: int) -> Corpus:
    """Read `path` (a file, or every file below a folder), or the standard library of this Python if it is None.

    Raises FileNotFoundError if there is no such file, and ValueError if the training part or the validation part is
    too short for one sequence of `sequence` bytes and the byte after it.
    """
    source = f"the standard library of Python in {_stdlib()}" if path is None else str(path)
    files = _library_files() if path is None else _files_of(path)
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise ValueError(f"no text in {source}: it is empty. Give --data a file or a folder that holds text")
    cut = len(text) * 9 // 10
    if min(cut, len(text) - cut) <= sequence:
        raise ValueError(
            f"{source} has {len(text)} bytes, of which {len(text) - cut} are for validation: less than one sequence "
            f"of {sequence} bytes and its last target. Give more text with --data, or a smaller --sequence"
        )
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(source, whole[:cut], whole[cut:], hashlib.sha256(text).hexdigest())


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _library_files() -> list[Path]:
    root = _stdlib()
    files = [file for file in _walk(root, lambda name: name in SKIPPED_FOLDERS) if file.suffix == ".py"]
    if not files:
        raise FileNotFoundError(f"no Python source in {root}: name a file or a folder of text with --data")
    return files


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return _walk(path, lambda name: name.startswith(".") or name == "__pycache__")
    if not path.exists():
        raise FileNotFoundError(f"--data {path}: there is no such file or folder")
    return [path]


def _walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """The files below `root`, sorted by their path relative to it, without files and folders that `skip` selects."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in files if not skip(name)]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())
