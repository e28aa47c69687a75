"""Every changed, missing, added or forged file of a checkpoint is an error that names it; no code of it runs."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zero import CheckpointError, load, open_checkpoint
from zero.checkpoint.format.manifest import NAME, Manifest
from zero.checkpoint.format.tensorfile import TensorEntry, header_bytes, index_bytes
from zero.checkpoint.read.reader import Checkpoint

from ..support.descriptors import listed
from ..support.errors import error_of
from .saved import (
    BLOCK,
    INDEX,
    MODEL,
    OF_RANK,
    OPTIMIZER,
    Payload,
    Training,
    add_averages,
    edit_manifest,
    files_of,
    forge,
    rewrite_header,
    save_small,
)

STATE, INDEX_OF_AVERAGES = "state.safetensors", "averages/ema/ema.safetensors.index.json"
EVERYTHING: tuple[Callable[[Checkpoint], Any], ...] = (
    Checkpoint.verify,
    Checkpoint.model_state_dict,
    Checkpoint.optimizer_state_dict,
    lambda checkpoint: checkpoint.state,
    lambda checkpoint: checkpoint.rank_state(0),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, training = tmp_path_factory.mktemp("checkpoints") / "whole", Training()
    training.step(0)
    save_small(path, training.optimizer)
    add_averages(path, {"ema": {"a": torch.ones(3)}})
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def assert_broken(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder).verify()
    for name in named:
        assert name in str(raised.value), (name, str(raised.value))


def tensors_of_block(folder: Path, path: str, block: int) -> list[str]:
    found = open_checkpoint(folder).header(path) if path.endswith(".safetensors") else None
    if found is None or block * BLOCK < found.data:
        return []
    begin = block * BLOCK - found.data
    return [e.name for e in found.tensors if e.nbytes and e.end > begin and e.begin < begin + BLOCK]


def test_every_flipped_bit_is_found_and_named(copy: Path) -> None:
    """Each 401st: all bits of a byte, in each block many times."""
    sizes = {path: (copy / path).stat().st_size for path in files_of(copy)}
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


ADDED = [
    *("model/model-00099-of-00099.safetensors", "model/pytorch_model.bin", "model/other.safetensors.index.json"),
    *("model/x/model.safetensors", "optimizer/optimizer-00002-of-00002.safetensors", "optimizer/x", "masters/x"),
    *("ranks/rank-00001.safetensors", "notes/ready", "state.pt", "x", ".x", "averages/ema/ema.safetensors"),
]


def test_an_added_file_that_could_be_taken_for_a_part_is_named(copy: Path) -> None:
    """Others, and a link to a checkpoint, are no damage."""
    (copy / "model" / "README.md").write_text("mine")
    (copy.parent / "latest").symlink_to(copy)
    open_checkpoint(copy.parent / "latest").verify()
    for path in ADDED:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        for put in (lambda to: shutil.copy(copy / MODEL, to), lambda to: to.symlink_to(copy / "model")):
            put(copy / path)
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
@pytest.mark.parametrize("path", [NAME, MODEL, INDEX, STATE, OF_RANK])
def test_what_is_missing_or_no_regular_file_is_named_and_never_read(copy: Path, path: str) -> None:
    before, outside, data = listed(), copy.parent / "outside", (copy / path).read_bytes()
    for put, call in PUTS.items():
        os.rename(copy / path, outside)
        call(copy / path, outside)
        opens = put in ("a pipe", "a folder")  # all others cannot even be opened
        named = path if put == "nothing" else str(copy / path)
        assert_broken(copy, named, "is not a regular file" if opens else "")
        (copy / path).rmdir() if put == "a folder" else (copy / path).unlink(missing_ok=True)
        (copy / path).with_name("beside.txt").unlink(missing_ok=True)
        (copy / path).write_bytes(data)
    assert not listed() - before


def opened_for(call: Callable[[Checkpoint], Any], folder: Path) -> tuple[set[str], str]:
    """Return the files that are opened for a call, as the kernel names them, and the text of its error."""
    found: set[str] = set()
    real = os.open

    def noted(*arguments: Any, **options: Any) -> int:
        number = real(*arguments, **options)
        found.add(os.readlink(f"/proc/self/fd/{number}"))
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noted)
        try:
            call(open_checkpoint(folder))
        except CheckpointError as error:
            return found, str(error)
    return found, ""


@pytest.mark.parametrize("path", [MODEL, OPTIMIZER, INDEX, STATE, OF_RANK, NAME])
def test_a_pickle_is_never_unpickled_and_no_link_is_entered(copy: Path, path: str) -> None:
    marker, whole = copy.parent / "was unpickled", (copy / path).read_bytes()

    def assert_closed() -> None:
        for call in EVERYTHING:
            assert all(name.startswith(str(copy)) for name in opened_for(call, copy)[0])

    torch.save({"a": Payload(marker)}, copy.parent / "saved")
    for pickled in (pickle.dumps(Payload(marker)), (copy.parent / "saved").read_bytes()):
        (copy / path).write_bytes(pickled)
        if path != NAME:
            forge(copy)
        assert_closed()
        assert opened_for(Checkpoint.verify, copy)[1]
    assert not marker.exists()
    (copy / path).write_bytes(whole)
    if "/" in path:
        folder = (copy / path).parent
        os.rename(folder, copy.parent / "outside")
        folder.symlink_to(copy.parent / "outside")
        assert str(folder) in opened_for(Checkpoint.verify, copy)[1]
        assert_closed()


def put_index(**changes: str) -> Callable[[Path], object]:
    def put(copy: Path) -> None:
        files: dict[str, list[TensorEntry]] = {}
        for name, path in {**dict.fromkeys(open_checkpoint(copy).tensors("model"), MODEL), **changes}.items():
            files.setdefault(path.removeprefix("model/"), []).append(TensorEntry(name, "F32", ()))
        (copy / INDEX).write_bytes(index_bytes(files))

    return put


def put_file(path: str, name: str) -> Callable[[Path], object]:
    def put(copy: Path) -> None:
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_bytes(header_bytes([TensorEntry(name, "F32", (1,))], {}) + bytes(4))
        manifest = Manifest.from_bytes((copy / NAME).read_bytes())
        forge(copy, files={**manifest.files, path: manifest.files[MODEL]})

    return put


def drop(path: str) -> Callable[[Path], object]:
    """Remove a file, also from the manifest."""

    def dropped(copy: Path) -> None:
        (copy / path).unlink()
        files = dict(Manifest.from_bytes((copy / NAME).read_bytes()).files)
        forge(copy, files={name: sums for name, sums in files.items() if name != path})

    return dropped


def put_header(path: str, **metadata: str) -> Callable[[Path], object]:
    return lambda copy: rewrite_header(copy / path, None, **metadata)


NOT_NAMED = r"index\.json does not name the files"
FORGED: list[tuple[Callable[[Path], object], str]] = [
    (put_index(scale="other.safetensors"), NOT_NAMED),
    (lambda copy: (copy / INDEX).write_bytes(index_bytes({})), NOT_NAMED),
    (drop(MODEL), NOT_NAMED),
    (lambda copy: (copy / INDEX_OF_AVERAGES).write_bytes(index_bytes({})), f"{INDEX_OF_AVERAGES} does not name"),
    *((drop(path), f"has no {path}") for path in (INDEX_OF_AVERAGES, INDEX, STATE)),
    (put_index(scale="../optimizer/x"), r"index\.json: 'scale' lies in '\.\./optimizer/x', which is no name"),
    (put_file("model/x.safetensors", "scale"), r"'scale' is in model/.* and in model/x\.safetensors"),
    (put_file("optimizer/x.safetensors", "state.nothing.exp_avg"), "'state.nothing.exp_avg' is the state of no param"),
    (put_file("masters/x.safetensors", "a"), "'a' has master weights, but is in no param group"),
    (put_header(MODEL, x="y"), "'x' is another name of 'y'"),
    (put_header(STATE, tree="{"), r"state\.safetensors: its tree is not JSON"),
    (put_header(STATE, tree="[]"), r"state\.safetensors: it has no tree of values by name"),
    (put_header(STATE, tree='{"a":{"$object":"os.system"}}'), r"has the unknown tag '\$object'"),
    (put_header(STATE, tree='{"a":{"$tensor":"b"}}'), "a saved state cannot be read"),
    (put_header(OF_RANK, tree='{"rank_state":{}}'), r"rank-00000\.safetensors: it has no 'rng' and 'rank_state' by"),
    (put_header(OPTIMIZER, values="]"), "its values is not JSON"),
    (put_header(OPTIMIZER, values="[]"), "its values have no names"),
    (put_header(OPTIMIZER, values='{"state.x.y":1}'), "'state.x.y' is the state of no parameter"),
    (lambda copy: edit_manifest(copy, param_groups=[{"lr": {"$": 1}, "params": []}]), "json: a saved state has the"),
]


@pytest.mark.parametrize(("change", "why"), FORGED)
def test_a_forged_checkpoint_is_a_checkpoint_error(copy: Path, change: Callable[[Path], object], why: str) -> None:
    manifest = (copy / NAME).read_bytes()
    change(copy)
    if (copy / NAME).read_bytes() == manifest:
        forge(copy)
    errors = [opened_for(call, copy)[1] for call in EVERYTHING]
    assert any(re.search(why, error) for error in errors), errors


GENERATORS = "generators cannot be used here"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ('{"rng":{},"rank_state":{}}', f"{GENERATORS} (KeyError: 'torch'): rng=False restores"),
        ('{"rng":{"torch":1,"numpy":2,"random":3},"rank_state":{}}', f"{GENERATORS} (TypeError: expected"),
    ],
)
def test_generators_that_cannot_be_restored_are_found_before_anything_changes(
    copy: Path, tree: str, words: str
) -> None:
    optimizer = Training().optimizer
    before, stream = optimizer.check_replicas(), torch.get_rng_state()
    rewrite_header(copy / OF_RANK, tree=tree)
    forge(copy)
    assert words in error_of(load, copy, optimizer)
    assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)
    assert torch.equal(torch.get_rng_state(), stream)
