"""A forged checkpoint with right checksums is a named error; none of its code runs, no file outside is opened."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zero import CheckpointError, ZeroOptimizer, load, open_checkpoint
from zero.checkpoint.format.manifest import NAME, Manifest
from zero.checkpoint.format.tensorfile import TensorEntry, header_bytes, index_bytes
from zero.checkpoint.read.reader import Checkpoint

from .saved import INDEX, MODEL, OPTIMIZER, add_averages, built, edit_manifest, forge, rewrite_header, save_trained

OF_RANK = "ranks/rank-00000.safetensors"
EVERYTHING: tuple[Callable[[Checkpoint], Any], ...] = (
    Checkpoint.verify,
    Checkpoint.model_state_dict,
    Checkpoint.optimizer_state_dict,
    lambda checkpoint: checkpoint.state,
    lambda checkpoint: checkpoint.rank_state(0),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_trained(tmp_path_factory.mktemp("checkpoints") / "whole")
    add_averages(path, {"ema": {"a": torch.ones(3)}})
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


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


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.assumes("open")
@pytest.mark.parametrize("path", [MODEL, OPTIMIZER, INDEX, "state.safetensors", OF_RANK, NAME])
def test_a_pickle_is_never_unpickled_and_no_link_is_entered(copy: Path, path: str) -> None:
    marker, whole = copy.parent / "was unpickled", (copy / path).read_bytes()
    torch.save({"a": Payload(marker)}, copy.parent / "saved")
    for pickled in (pickle.dumps(Payload(marker)), (copy.parent / "saved").read_bytes()):
        (copy / path).write_bytes(pickled)
        if path != NAME:
            forge(copy)
        for call in EVERYTHING:
            assert all(name.startswith(str(copy)) for name in opened_for(call, copy)[0])
        assert opened_for(Checkpoint.verify, copy)[1]
    assert not marker.exists()
    (copy / path).write_bytes(whole)
    if "/" in path:
        folder = (copy / path).parent
        os.rename(folder, copy.parent / "outside")
        folder.symlink_to(copy.parent / "outside")
        assert str(folder) in opened_for(Checkpoint.verify, copy)[1]
        for call in EVERYTHING:
            assert all(name.startswith(str(copy)) for name in opened_for(call, copy)[0])


def with_index(copy: Path, **changes: str) -> None:
    placed = dict.fromkeys(open_checkpoint(copy).tensors("model"), MODEL)
    files: dict[str, list[TensorEntry]] = {}
    for name, path in {**placed, **changes}.items():
        files.setdefault(path.removeprefix("model/"), []).append(TensorEntry(name, "F32", ()))
    (copy / INDEX).write_bytes(index_bytes(files))


def add_file(copy: Path, path: str, entries: list[TensorEntry]) -> None:
    """Add a file with zeros to the checkpoint."""
    (copy / path).parent.mkdir(exist_ok=True)
    (copy / path).write_bytes(header_bytes(entries, {}) + bytes(entries[-1].end if entries else 0))
    manifest = Manifest.from_bytes((copy / NAME).read_bytes())
    forge(copy, files={**manifest.files, path: manifest.files[MODEL]})


def drop_file(copy: Path, path: str) -> None:
    """Remove a file, also from the manifest."""
    (copy / path).unlink()
    files = dict(Manifest.from_bytes((copy / NAME).read_bytes()).files)
    forge(copy, files={name: sums for name, sums in files.items() if name != path})


def put_header(path: str, **metadata: str) -> Callable[[Path], None]:
    return lambda copy: rewrite_header(copy / path, None, **metadata)


def put_manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda copy: edit_manifest(copy, **changes)


A = TensorEntry("a", "F32", (1,))
STATE, INDEX_OF_AVERAGES = "state.safetensors", "averages/ema/ema.safetensors.index.json"
NOT_NAMED = r"index\.json does not name the files"
FORGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda copy: with_index(copy, scale="other.safetensors"), NOT_NAMED),
    (lambda copy: (copy / INDEX).write_bytes(index_bytes({})), NOT_NAMED),
    (lambda copy: drop_file(copy, MODEL), NOT_NAMED),
    (lambda copy: (copy / INDEX_OF_AVERAGES).write_bytes(index_bytes({})), f"{INDEX_OF_AVERAGES} does not name"),
    (lambda copy: drop_file(copy, INDEX_OF_AVERAGES), f"has no {INDEX_OF_AVERAGES}"),
    (
        lambda copy: with_index(copy, scale="../optimizer/x"),
        r"index\.json: 'scale' lies in '\.\./optimizer/x', which is no name",
    ),
    (lambda copy: drop_file(copy, INDEX), r"has no model/model\.safetensors\.index\.json"),
    (lambda copy: drop_file(copy, STATE), r"has no state\.safetensors"),
    (
        lambda copy: add_file(copy, "model/x.safetensors", [replace(A, name="scale")]),
        r"'scale' is in model/.* and in model/x\.safetensors",
    ),
    (
        lambda copy: add_file(copy, "optimizer/x.safetensors", [replace(A, name="state.nothing.exp_avg")]),
        "'state.nothing.exp_avg' is the state of no parameter",
    ),
    (
        lambda copy: add_file(copy, "masters/x.safetensors", [A]),
        "'a' has master weights, but is in no param group",
    ),
    (put_header(MODEL, x="y"), "'x' is another name of 'y'"),
    (put_header(STATE, tree="{"), r"state\.safetensors: its tree is not JSON"),
    (put_header(STATE, tree="[]"), r"state\.safetensors: it has no tree of values by name"),
    (put_header(STATE, tree='{"a":{"$object":"os.system"}}'), r"has the unknown tag '\$object'"),
    (put_header(STATE, tree='{"a":{"$tensor":"b"}}'), "a saved state cannot be read"),
    (
        put_header(OF_RANK, tree='{"rank_state":{}}'),
        r"rank-00000\.safetensors: it has no 'rng' and 'rank_state' by name",
    ),
    (put_header(OPTIMIZER, values="]"), "its values is not JSON"),
    (put_header(OPTIMIZER, values="[]"), "its values have no names"),
    (put_header(OPTIMIZER, values='{"state.x.y":1}'), "'state.x.y' is the state of no parameter"),
    (
        put_manifest(param_groups=[{"lr": {"$": 1}, "params": []}]),
        r"checkpoint\.json: a saved state has the unknown tag",
    ),
    (
        put_manifest(files={"../outside": {"bytes": 0, "crc32": []}}),
        r"checkpoint\.json: '\.\./outside' is not a path inside a checkpoint",
    ),
    (put_manifest(block_bytes=2**60), "is not from 0 to 1073741824"),
]


@pytest.mark.parametrize(("change", "why"), FORGED)
def test_a_forged_checkpoint_is_a_checkpoint_error(copy: Path, change: Callable[[Path], object], why: str) -> None:
    manifest = (copy / NAME).read_bytes()
    change(copy)
    if (copy / NAME).read_bytes() == manifest:
        forge(copy)
    errors = [opened_for(call, copy)[1] for call in EVERYTHING]
    assert any(re.search(why, error) for error in errors), errors


def test_a_large_claimed_block_allocates_no_more_than_the_file(copy: Path) -> None:
    forge(copy, block_bytes=1 << 30)
    checkpoint = open_checkpoint(copy)
    for path, sums in checkpoint.manifest.files.items():
        with checkpoint.file(path) as reader:
            assert len(reader.read(0, min(1, sums.nbytes))) <= 1
            assert len(reader._keep(0)) == sums.nbytes
    checkpoint.verify()


GENERATORS = [
    ('{"rng":{},"rank_state":{}}', r"generators cannot be used here \(KeyError: 'torch'\): rng=False restores"),
    ('{"rng":{"torch":1,"numpy":2,"random":3},"rank_state":{}}', r"cannot be used here \(TypeError: expected"),
    ("{}", r"it has no 'rng' and 'rank_state'"),
]


def test_generators_that_cannot_be_restored_are_found_before_anything_changes(copy: Path) -> None:
    optimizer = ZeroOptimizer(built(), torch.optim.AdamW, lr=1e-2)
    before, stream = optimizer.check_replicas(), torch.get_rng_state()
    for found, why in GENERATORS:
        rewrite_header(copy / OF_RANK, tree=found)
        forge(copy)
        with pytest.raises(ValueError, match=why):
            load(copy, optimizer)
        assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)
        assert torch.equal(torch.get_rng_state(), stream)
