"""Every changed, missing, added or shortened file of a checkpoint is an error that names it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from zero import CheckpointError, ZeroOptimizer, open_checkpoint
from zero.checkpoint.format.manifest import NAME

from ..support.descriptors import listed
from .saved import BLOCK, INDEX, MODEL, add_averages, files_of, save_small, save_trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint below 32 kB."""
    path = save_trained(tmp_path_factory.mktemp("checkpoints") / "whole")
    add_averages(path, {"ema": {"a": torch.ones(3)}})
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def assert_broken(folder: Path, *named: str) -> str:
    """Assert that `verify` raises, and that its error names these."""
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder).verify()
    for name in named:
        assert name in str(raised.value), (name, str(raised.value))
    return str(raised.value)


# -- bits and bytes ----------------------------------------------------------------------------------------------------


def tensors_of_block(folder: Path, path: str, block: int) -> list[str]:
    """Return the tensors that have bytes in a block of a file; none if the header has."""
    found = open_checkpoint(folder).header(path) if path.endswith(".safetensors") else None
    if found is None or block * BLOCK < found.data:
        return []
    begin = block * BLOCK - found.data
    return [e.name for e in found.tensors if e.nbytes and e.end > begin and e.begin < begin + BLOCK]


def test_every_flipped_bit_is_found_and_named(copy: Path) -> None:
    """Each 401st: all bits of a byte, in each block many times."""
    sizes = {path: (copy / path).stat().st_size for path in files_of(copy)}
    assert sum(sizes.values()) < 32 * 1024
    named = {
        (path, block): tensors_of_block(copy, path, block)
        for path, size in sizes.items()
        for block in range(-(-size // BLOCK))
    }
    places = ((path, bit) for path, size in sizes.items() for bit in range(8 * size))
    for path, bit in itertools.islice(places, 0, None, 401):
        with open(copy / path, "r+b", buffering=0) as file:
            (before,) = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([before ^ 1 << bit % 8]), bit // 8)
            tensors = named[path, bit // 8 // BLOCK]
            assert_broken(copy, str(copy / path), *map(repr, tensors[:1] + tensors[-1:]))
            os.pwrite(file.fileno(), bytes([before]), bit // 8)
    open_checkpoint(copy).verify()


def test_a_broken_block_is_named_with_the_tensors_that_it_has_bytes_of_and_so_is_a_cut(tmp_path: Path) -> None:
    folder, path = tmp_path / "larger", tmp_path / "larger" / "state.safetensors"
    optimizer = ZeroOptimizer(nn.Linear(50, 50), torch.optim.SGD, lr=0.1)
    save_small(folder, optimizer, state={"a": torch.ones(3), "b": torch.ones(1500), "c": torch.ones(2000)})
    data = path.read_bytes()
    for byte, text in (
        (20, "is broken at block 0 (its header)"),
        (BLOCK, "is broken at block 1 (one of 2 tensors from 'a' to 'b')"),
        (2 * BLOCK, "is broken at block 2 (one of 2 tensors from 'b' to 'c')"),
        (3 * BLOCK, "is broken at block 3 ('c')"),
        (len(data) - 1, f"is broken at block {len(data) // BLOCK} ('c')"),
    ):
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :])
        assert_broken(folder, f"{path} {text}")
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            assert open_checkpoint(folder).state
    path.write_bytes(data)
    for path in (folder / name for name in files_of(folder)):
        data = path.read_bytes()
        borders = range(0, len(data), BLOCK)
        for length in {*borders, *(b - 1 for b in borders if b), len(data) - 1, len(data) + 1}:
            path.write_bytes((data + b"\0")[:length])
            assert_broken(folder, str(path))
        path.write_bytes(data)
    open_checkpoint(folder).verify()


# -- files -------------------------------------------------------------------------------------------------------------


ADDED = [
    *("model/model-00099-of-00099.safetensors", "model/pytorch_model.bin", "model/other.safetensors.index.json"),
    *("model/x/model.safetensors", "optimizer/optimizer-00002-of-00002.safetensors", "optimizer/x", "masters/x"),
    *("ranks/rank-00001.safetensors", "notes/ready", "state.pt", "x", ".x", "averages/ema/ema.safetensors"),
]


def test_an_added_file_that_could_be_taken_for_a_part_is_named(copy: Path) -> None:
    for path in ADDED:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy / MODEL, copy / path)
        assert_broken(copy, f"{copy / path} is no part of the checkpoint")
        (copy / path).unlink()
        (copy / path).symlink_to(copy / "model")
        assert_broken(copy, f"{copy / path} is no part of the checkpoint")
        (copy / path).unlink()


PUTS: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, outside: None,
    "a link": lambda path, outside: path.symlink_to(outside),
    "a link beside": lambda path, outside: path.symlink_to(outside.rename(path.with_name("beside.txt")).name),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
    "a socket": lambda path, outside: os.mknod(path, stat.S_IFSOCK | 0o600),
}


@pytest.mark.timeout(20)  # a pipe would be waited for
@pytest.mark.parametrize("put", PUTS)
def test_what_is_missing_or_no_regular_file_is_named_and_never_read(copy: Path, put: str) -> None:
    before, outside = listed(), copy.parent / "outside"
    for path in (NAME, MODEL, INDEX, "state.safetensors", "ranks/rank-00000.safetensors"):
        shutil.copy(copy / path, copy.parent / "kept")
        os.rename(copy / path, outside)
        PUTS[put](copy / path, outside)
        opens = put in ("a pipe", "a folder")  # all others cannot even be opened
        named = path if put == "nothing" else str(copy / path)
        assert_broken(copy, named, "is not a regular file" if opens else "")
        (copy / path).rmdir() if put == "a folder" else (copy / path).unlink(missing_ok=True)
        shutil.copy(copy.parent / "kept", copy / path)
        (copy / path).with_name("beside.txt").unlink(missing_ok=True)
    assert not listed() - before
