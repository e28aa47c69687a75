"""Each value of a checkpoint is read, here and by other libraries; every changed or forged file is named."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import platform
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import zero
from zero import CheckpointError, ShardedAverage, ZeroOptimizer, load, open_checkpoint
from zero.checkpoint.format.manifest import NAME, averages_folder, averages_in
from zero.checkpoint.format.tensorfile import TensorEntry, header_bytes, index_bytes
from zero.checkpoint.read.reader import Checkpoint
from zero.commands.cli import main

from ..support.descriptors import listed
from ..support.errors import error_of
from ..support.loops import blocks_of
from ..support.models import Odd, build
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, assert_same_value
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
    plain_dict,
    rewrite_header,
    save_small,
    train,
)

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9)}
AVERAGES: dict[str, dict[str, Tensor]] = {
    "ema.0-9": {"b": torch.arange(5.0), "a": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0, 2)},
    "swa": {"a": torch.ones(2, 3, dtype=torch.bfloat16)},
}
MOST = 100  # bytes of tensors of a file
Trained = tuple[Path, nn.Module, ZeroOptimizer]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model = build()
    first, *rest = [each for each in model.parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": np.float64(0.1), "tag": ("a", None, {1: float("inf")})}]
    optimizer = ZeroOptimizer([*groups, {"params": [first]}], torch.optim.AdamW, module=model, **ADAM)
    train(model, optimizer, range(3))
    path = tmp_path_factory.mktemp("checkpoints") / "trained"
    state, rank_state = {"epoch": 1, "losses": [0.5, float("inf")]}, {"sampler": (1, {2: "x"})}
    save_small(path, optimizer, state=state, rank_state=rank_state, max_shard_bytes=MOST)
    return path, model, optimizer


def test_a_models_tensors_and_the_plain_dict_of_the_optimizer_load_strictly(trained: Trained) -> None:
    path, model, optimizer = trained
    checkpoint = open_checkpoint(path)
    found = checkpoint.model_state_dict()
    in_order = [entry.name for file in checkpoint.paths("model") for entry in checkpoint.header(file).tensors]
    assert in_order == [name for name in model.state_dict() if name != "head.weight"]
    sizes = [[e.nbytes for e in checkpoint.header(file).tensors if e.nbytes] for file in checkpoint.paths("model")]
    assert all(sum(of_file) <= MOST or len(of_file) == 1 for of_file in sizes)
    assert all(sum(one) + another[0] > MOST for one, another in itertools.pairwise(sizes)), "it had room"
    assert found["head.weight"] is found["embed.weight"]
    again = Odd()
    again.load_state_dict(found, strict=True)
    assert_same_model(again, model)
    assert_same_bits(again.get_buffer("offset"), model.get_buffer("offset"))
    states, expected = checkpoint.optimizer_state_dict(), plain_dict(optimizer)
    assert_same_states(states, expected)
    assert_same_value(states["param_groups"], expected["param_groups"], "param groups")


def test_the_facts_of_a_checkpoint(trained: Trained) -> None:
    path, model, _ = trained
    checkpoint = open_checkpoint(path)
    written_by = json.loads((path / "checkpoint.json").read_text())["written_by"]
    assert (written_by["world_size"], written_by["stage"], written_by["sharding_factor"]) == (1, 2, 1)
    assert written_by["zero-optimizer"] in (zero.__version__, "not installed")
    assert (written_by["torch"], written_by["python"]) == (torch.__version__, platform.python_version())
    assert (checkpoint.step, checkpoint.world_size, checkpoint.not_saved) == (3, 1, ())
    assert repr(checkpoint) == f"Checkpoint({str(path)!r}, step 3, content {checkpoint.content[:12]})"
    saved = {parameter.name: parameter for parameter in checkpoint.manifest.parameters}
    assert set(saved) == {name for name, _ in model.named_parameters()}
    assert saved["embed.weight"].names == ("embed.weight", "head.weight")
    assert [name for name, parameter in saved.items() if not parameter.trainable] == ["frozen"]
    assert checkpoint.state == {"epoch": 1, "losses": [0.5, float("inf")]}
    of_rank = checkpoint.rank_state(0)
    assert of_rank["rank_state"] == {"sampler": (1, {2: "x"})}
    assert set(of_rank["rng"]) >= {"torch", "numpy", "random"}
    assert "has no ranks/rank-00001.safetensors" in error_of(checkpoint.rank_state, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_safetensors_and_distributed_checkpoint_read_every_tensor(trained: Trained) -> None:
    path, _, _ = trained
    checkpoint = open_checkpoint(path)
    for folder in ("model", "optimizer", "ranks", ""):
        expected = {name: checkpoint.read(*place) for name, place in checkpoint.tensors(folder).items()}
        files = sorted((path / folder).glob("*.safetensors"))
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert_same_value(found, expected, folder)
        if folder in ("model", "optimizer"):
            loaded = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
            dcp_load(loaded, storage_reader=HuggingFaceStorageReader(str(path / folder)), no_dist=True)
            assert len(files) > 1
            assert_same_value(loaded, expected, folder)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{path} is not a checkpoint: it has no checkpoint.json$"):
            open_checkpoint(path)
    newest = tmp_path / "runs" / "step-00000010"
    for path in (newest, tmp_path / "runs" / "step-00000002"):
        path.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"; it is a folder of checkpoints, and the newest is {newest}$"):
        open_checkpoint(tmp_path / "runs")


def test_averages_come_back_by_name_and_an_export_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without a count, as imported ones, are those of one update: the next one has half the weight."""
    model = nn.Linear(3, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 5.0)
    folder, optimizer = tmp_path / "a", ZeroOptimizer(model, torch.optim.SGD)
    save_small(folder, optimizer)
    content = open_checkpoint(folder).content
    threes = {name: torch.full(parameter.shape, 3.0) for name, parameter in model.named_parameters()}
    add_averages(folder, {**AVERAGES, "mine": threes})
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.content != content
    assert checkpoint.average_names == ["ema.0-9", "mine", "swa"]
    assert "has no averages 'ema', but ['ema.0-9', 'mine', 'swa']" in error_of(checkpoint.averages, "ema")
    for name, expected in AVERAGES.items():
        assert_same_value(checkpoint.averages(name), expected, name)
        file = folder / f"averages/{name}/{name}-00001-of-00001.safetensors"
        assert_same_value(load_file(file), expected, name)
    average = ShardedAverage(optimizer, name="mine")
    load(folder, optimizer)
    average.update_parameters()
    assert_same_value(average.gather(), {name: value + 1 for name, value in threes.items()}, "average")
    for to, lost in (("torch", "averages"), ("hf", "optimizer and state and averages"), ("dcp", "state and averages")):
        assert main(["checkpoint", "export", str(folder), "--to", to, str(tmp_path / to)]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"for {to}, without {lost}")


def test_averages_need_the_name_of_a_folder() -> None:
    for name in ("", ".", "..", ".hidden", "-option", "a/b", "a\\b", "a\0", "a\n", "ä", "a" * 101):
        assert "bad name of averages" in error_of(averages_folder, name)
    assert averages_folder("a" * 100) == "averages/" + "a" * 100
    paths = ["averages/b/x", "averages/b/y", "averages/a/x", "averages/file", "averages/c/d/x", "model/averages/x"]
    assert averages_in(paths) == ["a", "b"]


RECIPE = blocks_of((Path(zero.__file__).parent / "checkpoint" / "README.md").read_text())["From plain dicts"]


def test_the_recipe_makes_a_checkpoint_of_plain_dicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, range(2))
    torch.save({"model": plain.state_dict(), "optimizer": reference.state_dict()}, tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    found = torch.load(tmp_path / "file", weights_only=True)
    exec(RECIPE, {"found": found, "Model": Odd, "ZeroOptimizer": ZeroOptimizer, "torch": torch, "zero": zero})
    checkpoint = open_checkpoint(tmp_path / "runs" / "a" / "step-00000100")
    assert checkpoint.step == 100
    assert_same_value(checkpoint.model_state_dict(), plain.state_dict(), "model")
    assert_same_states(checkpoint.optimizer_state_dict(), reference.state_dict())


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
    save_small(
        path, training.optimizer, state={"epoch": 1, "large": torch.ones(1100)}
    )  # the last file has three blocks
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

    return put


def put_header(path: str, **metadata: str) -> Callable[[Path], object]:
    return lambda copy: rewrite_header(copy / path, None, **metadata)


NOT_NAMED = r"index\.json does not name the files"
FORGED: list[tuple[Callable[[Path], object], str]] = [
    (put_index(scale="other.safetensors"), NOT_NAMED),
    (lambda copy: (copy / INDEX).write_bytes(index_bytes({})), NOT_NAMED),
    (lambda copy: (copy / MODEL).unlink(), NOT_NAMED),
    (lambda copy: (copy / INDEX_OF_AVERAGES).write_bytes(index_bytes({})), f"{INDEX_OF_AVERAGES} does not name"),
    *((lambda copy, p=path: (copy / p).unlink(), f"has no {path}") for path in (INDEX_OF_AVERAGES, INDEX, STATE)),
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
        forge(copy, files=dict.fromkeys(path for path in files_of(copy) if path != NAME))
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
