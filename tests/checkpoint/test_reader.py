"""`zero.open_checkpoint`: every value of a checkpoint, for this library, for plain torch, and for those who have only
safetensors, torch.distributed.checkpoint or JSON."""

from __future__ import annotations

import json
import platform
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import zero
from zero import CheckpointError, MixedPrecision, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint.format.manifest import FileSums
from zero.checkpoint.read.file_reader import FileReader

from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from .saved import BLOCK, TiedModel, built, files_of, save_small, train

MORE = settings(max_examples=10 * settings().max_examples)
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, ZeroOptimizer]:
    """Return a checkpoint of several files a folder, and what was saved."""
    model = built()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **ADAM)
    train(model, optimizer, range(3))
    path = tmp_path_factory.mktemp("checkpoints") / "trained"
    rank_state = {"sampler": (1, {2: "x"})}
    save_small(
        path, optimizer, state={"epoch": 1, "losses": [0.5, float("inf")]}, rank_state=rank_state, max_shard_bytes=100
    )
    return path, model, optimizer


def plain_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict()


# -- values ------------------------------------------------------------------------------------------------------------


def test_the_models_tensors_load_strictly_into_a_new_model(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, model, _ = trained
    found = open_checkpoint(path).model_state_dict()
    assert set(found) == set(model.state_dict())
    assert found["head.weight"] is found["embedding.weight"]
    again = TiedModel()
    again.load_state_dict(found, strict=True)
    assert_same_model(again, model)
    assert_same_bits(again.get_buffer("scale"), model.get_buffer("scale"))


def test_the_models_tensors_are_in_order_of_registration(
    trained: tuple[Path, nn.Module, ZeroOptimizer],
) -> None:
    path, model, _ = trained
    checkpoint = open_checkpoint(path)
    found = [entry.name for file in checkpoint.paths("model") for entry in checkpoint.header(file).tensors]
    assert found == [name for name in model.state_dict() if name != "head.weight"]


def test_the_optimizers_dict_is_the_plain_one(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, _, optimizer = trained
    found, expected = open_checkpoint(path).optimizer_state_dict(), plain_dict(optimizer)
    assert_same_states(found, expected)
    assert found["param_groups"] == expected["param_groups"]
    assert [type(value) for value in found["param_groups"][0].values()] == [
        type(expected["param_groups"][0][key]) for key in found["param_groups"][0]
    ]


def test_training_goes_on_with_equal_bits_in_plain_torch_and_here(
    trained: tuple[Path, nn.Module, ZeroOptimizer],
) -> None:
    path, _, _ = trained
    checkpoint = open_checkpoint(path)

    def resumed() -> nn.Module:
        found = TiedModel()
        found.load_state_dict(checkpoint.model_state_dict())
        return found

    undisturbed = built()
    optimizer = ZeroOptimizer(undisturbed, torch.optim.AdamW, **ADAM)
    train(undisturbed, optimizer, range(6))

    plain = resumed()
    of_torch = torch.optim.AdamW(plain.parameters(), lr=0.5)
    of_torch.load_state_dict(checkpoint.optimizer_state_dict())
    train(plain, of_torch, range(3, 6))
    assert_same_model(plain, undisturbed)

    sharded = resumed()
    ours = ZeroOptimizer(sharded, torch.optim.AdamW, lr=0.5)
    ours.load_state_dict(checkpoint.optimizer_state_dict())
    train(sharded, ours, range(3, 6))
    assert_same_model(sharded, undisturbed)
    assert_same_states(plain_dict(ours), plain_dict(optimizer))

    whole = TiedModel()
    loaded = ZeroOptimizer(whole, torch.optim.AdamW, lr=0.5)
    load(path, loaded)
    train(whole, loaded, range(3, 6))
    assert_same_model(whole, undisturbed)


def test_master_weights_are_read_and_loaded(tmp_path: Path) -> None:
    def in_bf16(model: nn.Module) -> tuple[nn.Module, ZeroOptimizer]:
        return model, ZeroOptimizer(model, torch.optim.AdamW, mixed_precision=MixedPrecision(torch.bfloat16), **ADAM)

    model, optimizer = in_bf16(built())
    train(model, optimizer, range(3))
    save_small(tmp_path / "a", optimizer)
    checkpoint = open_checkpoint(tmp_path / "a")
    checkpoint.verify()
    found, expected = checkpoint.optimizer_state_dict(), plain_dict(optimizer)
    assert_same_states(found, expected)
    assert found["masters"].keys() == expected["masters"].keys()
    for index, master in found["masters"].items():
        assert_same_bits(master, expected["masters"][index])
    fresh = TiedModel()
    fresh.load_state_dict(checkpoint.model_state_dict())
    again, resumed = in_bf16(fresh)
    resumed.load_state_dict(found)
    train(again, resumed, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert_same_model(again, model)


def test_saved_master_weights_follow_what_was_written_into_the_parameters(tmp_path: Path) -> None:
    model = built()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mixed_precision=MixedPrecision(torch.bfloat16), **ADAM)
    train(model, optimizer, range(3))
    with torch.no_grad():
        model.get_parameter("inner.weight").mul_(2)
        model.get_parameter("inner.bias")[1:3].fill_(0.5)
    save_small(tmp_path / "a", optimizer)
    found, expected = open_checkpoint(tmp_path / "a").masters(), plain_dict(optimizer)
    names = expected["param_groups"][0]["param_names"]
    assert torch.equal(found["inner.weight"], model.get_parameter("inner.weight").float())
    for index, master in expected["masters"].items():
        assert_same_bits(found[names[index]], master)


def test_master_weights_of_what_was_trained_for_a_while_come_back(tmp_path: Path) -> None:
    def made() -> tuple[nn.Sequential, ZeroOptimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        return model, ZeroOptimizer(model, torch.optim.AdamW, mixed_precision=MixedPrecision(torch.bfloat16), **ADAM)

    def trained_whole(model: nn.Sequential, optimizer: ZeroOptimizer, steps: int) -> dict[int, Tensor]:
        model[0].requires_grad_(True)
        for number in range(steps):
            model(torch.full((2, 4), number + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].requires_grad_(False)
        masters: dict[int, Tensor] = plain_dict(optimizer)["masters"]
        return masters

    model, optimizer = made()
    trained_whole(model, optimizer, 3)
    save_small(tmp_path / "a", optimizer)
    assert set(open_checkpoint(tmp_path / "a").masters()) == {name for name, _ in model.named_parameters()}
    again, resumed = made()
    load(tmp_path / "a", resumed)
    expected, found = trained_whole(model, optimizer, 2), trained_whole(again, resumed, 2)
    assert found.keys() == expected.keys()
    for index, master in expected.items():
        assert_same_bits(found[index], master)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_an_optimizer_without_states_or_before_its_first_step_is_saved_too(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = built()
    optimizer = ZeroOptimizer(model, cls, lr=0.25)
    if cls is torch.optim.SGD:
        train(model, optimizer, range(1))
    save_small(tmp_path / "a", optimizer)
    checkpoint = open_checkpoint(tmp_path / "a")
    checkpoint.verify()
    found = checkpoint.optimizer_state_dict()
    assert_same_states(found, plain_dict(optimizer))
    assert found["param_groups"][0]["lr"] == 0.25
    load(tmp_path / "a", ZeroOptimizer(TiedModel(), cls, lr=0.5))


def test_the_facts_of_a_checkpoint(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, model, _ = trained
    checkpoint = open_checkpoint(path)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert (checkpoint.step, checkpoint.content, checkpoint.world_size) == (3, manifest["content"], 1)
    assert checkpoint.not_saved == ()
    written_by = manifest["written_by"]
    assert (written_by["world_size"], written_by["stage"], written_by["sharding_factor"]) == (1, 2, 1)
    assert written_by["zero-optimizer"] in (zero.__version__, "not installed")
    assert (written_by["torch"], written_by["python"]) == (torch.__version__, platform.python_version())
    assert repr(checkpoint) == f"Checkpoint({str(path)!r}, step 3, content {manifest['content'][:12]})"
    saved = {parameter.name: parameter for parameter in checkpoint.manifest.parameters}
    assert set(saved) == {name for name, _ in model.named_parameters()}
    assert saved["embedding.weight"].names == ("embedding.weight", "head.weight")
    assert [name for name, parameter in saved.items() if not parameter.trainable] == ["frozen"]
    assert checkpoint.state == {"epoch": 1, "losses": [0.5, float("inf")]}
    of_rank = checkpoint.rank_state(0)
    assert of_rank["rank_state"] == {"sampler": (1, {2: "x"})}
    assert set(of_rank["rng"]) >= {"torch", "numpy", "random"}
    with pytest.raises(CheckpointError, match=r"has no ranks/rank-00001\.safetensors"):
        checkpoint.rank_state(1)


def test_random_generators_are_saved_as_they_are(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(built(), torch.optim.SGD, lr=0.1)
    save_small(tmp_path / "a", optimizer)
    drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())
    found = open_checkpoint(tmp_path / "a").rank_state(0)["rng"]
    torch.set_rng_state(found["torch"])
    np.random.set_state(found["numpy"])
    random.setstate(found["random"])
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == drawn


def test_options_of_param_groups_keep_their_types(tmp_path: Path) -> None:
    model = built()
    groups: list[dict[str, Any]] = [
        {"params": [model.get_parameter("inner.weight")], "lr": np.float64(0.1), "tag": ("a", None, {1: float("inf")})},
        {"params": [model.get_parameter("embedding.weight")], "lr": 0.2},
    ]
    optimizer = ZeroOptimizer(groups, torch.optim.SGD, module=model)
    save_small(tmp_path / "a", optimizer)
    first, second = open_checkpoint(tmp_path / "a").optimizer_state_dict()["param_groups"]
    assert (type(first["lr"]), first["lr"], second["lr"]) == (np.float64, 0.1, 0.2)
    assert first.get("tag") == ("a", None, {1: float("inf")})
    assert (first["param_names"], first["params"]) == (["inner.weight"], [0])
    assert (second["param_names"], second["params"]) == (["embedding.weight"], [1])


def test_a_tied_parameter_may_have_the_name_of_the_headers_format(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(6.0))
    model.format = model.weight
    save_small(tmp_path / "a", ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    checkpoint = open_checkpoint(tmp_path / "a")
    with safe_open(checkpoint.path / checkpoint.paths("model")[0], framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "weight": "format"}
    found = checkpoint.model_state_dict()
    assert found.keys() == {"weight", "format"}
    model.load_state_dict(found)


# -- without this library ----------------------------------------------------------------------------------------------


def tensors_of(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint by folder and name, as this library reads them."""
    checkpoint = open_checkpoint(path)
    return {
        folder: {name: checkpoint.read(*place) for name, place in checkpoint.tensors(folder).items()}
        for folder in ("model", "optimizer", "ranks", "")
    }


def test_safetensors_reads_every_tensor(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, _, _ = trained
    for folder, expected in tensors_of(path).items():
        files = sorted((path / folder).glob("*.safetensors"))
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert_same_bits(tensor, expected[name], name)
    assert len(files_of(path / "model")) > 2, "several files, and their index"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_reads_every_tensor(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, _, _ = trained
    for folder in ("model", "optimizer"):
        expected = tensors_of(path)[folder]
        found = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        dcp_load(found, storage_reader=HuggingFaceStorageReader(str(path / folder)), no_dist=True)
        for name, tensor in found.items():
            assert_same_bits(tensor, expected[name], name)


def test_the_rest_is_json(trained: tuple[Path, nn.Module, ZeroOptimizer]) -> None:
    path, _, optimizer = trained
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert set(manifest["files"]) == set(files_of(path)) - {"checkpoint.json"}
    for name, sums in manifest["files"].items():
        data = (path / name).read_bytes()
        assert sums["bytes"] == len(data)
        assert sums["crc32"] == [zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
    for folder in ("model", "optimizer"):
        index = json.loads((path / folder / f"{folder}.safetensors.index.json").read_text())
        for tensor, file in index["weight_map"].items():
            with safe_open(path / folder / file, "pt") as opened:
                assert tensor in set(opened.keys())
                metadata = opened.metadata()
    assert metadata["format"] == "pt"
    (group,) = json.loads(metadata["param_groups"])
    assert group == manifest["param_groups"][0]
    assert group["betas"] == {"$tuple": [0.8, 0.9]}
    assert group["params"] == optimizer.param_groups[0]["param_names"]
    first = next(iter(sorted((path / "model").glob("*.safetensors"))))
    with safe_open(first, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    with safe_open(path / "state.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["tree"]) == {"epoch": 1, "losses": [0.5, {"$float": "inf"}]}


# -- reads -------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
@MORE
def test_any_bytes_of_a_file_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, block_bytes: int, begin: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("file")
    (folder / "a").write_bytes(data)
    sums = FileSums(len(data), tuple(zlib.crc32(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)))
    begin = min(begin, len(data))
    end = min(begin + length, len(data))
    with FileReader(folder, "a", sums, block_bytes) as reader:
        assert reader.read(begin, end - begin) == data[begin:end]
        reader.verify(0, reader.blocks)
        assert [reader.span(block) for block in range(reader.blocks)] == [
            (low, min(block_bytes, len(data) - low)) for low in range(0, len(data), block_bytes)
        ]


def test_a_broken_block_is_found_when_it_is_touched_and_every_time(tmp_path: Path) -> None:
    data = bytearray(range(100))
    sums = FileSums(100, tuple(zlib.crc32(data[i : i + 10]) for i in range(0, 100, 10)))
    data[35] ^= 1
    (tmp_path / "a").write_bytes(data)
    with FileReader(tmp_path, "a", sums, 10) as reader:
        assert reader.read(0, 30) == data[:30]
        assert reader.read(40, 60) == data[40:]
        for begin, length in ((30, 10), (30, 1), (39, 5), (25, 6), (0, 100), (39, 1)):
            with pytest.raises(CheckpointError, match="a is broken at block 3"):
                reader.read(begin, length)


def test_small_tensors_of_one_block_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    save_small(tmp_path / "a", ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    read: list[int] = []
    of_class = FileReader.read_block

    def counted(reader: FileReader, block: int, data: memoryview) -> None:
        read.append(block)
        of_class(reader, block, data)

    monkeypatch.setattr(FileReader, "read_block", counted)
    checkpoint = open_checkpoint(tmp_path / "a")
    assert len(checkpoint.model_state_dict()) == 80
    blocks = len(checkpoint.manifest.files["model/model-00001-of-00001.safetensors"].crc32)
    assert len(read) <= 2 * blocks


# -- what is no checkpoint ---------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{path} is not a checkpoint: it has no checkpoint.json$"):
            open_checkpoint(path)
    (tmp_path / "runs" / "step-00000002").mkdir(parents=True)
    newest = tmp_path / "runs" / "step-00000010"
    newest.mkdir()
    with pytest.raises(CheckpointError, match=f"; it is a folder of checkpoints, and the newest is {newest}$"):
        open_checkpoint(tmp_path / "runs")
    (tmp_path / "checkpoint.json").write_text('{"format":"zero.checkpoint","version":2}')
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: it has version 2 of the format, and this release"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: it is not the manifest of a checkpoint"):
        open_checkpoint(tmp_path)


def test_a_folder_that_is_reached_by_a_link_is_a_checkpoint(
    trained: tuple[Path, nn.Module, ZeroOptimizer], tmp_path: Path
) -> None:
    """The caller may give any path to a checkpoint; links are refused inside it."""
    (tmp_path / "latest").symlink_to(trained[0])
    checkpoint = open_checkpoint(tmp_path / "latest")
    checkpoint.verify()
    assert checkpoint.content == open_checkpoint(trained[0]).content


def test_files_that_a_user_adds_to_the_model_are_no_damage(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(built(), torch.optim.SGD, lr=0.1)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    (tmp_path / "assets" / "empty.txt").write_text("")
    save(tmp_path / "a", optimizer, assets=tmp_path / "assets")
    (tmp_path / "a" / "model" / "README.md").write_text("mine")
    open_checkpoint(tmp_path / "a").verify()
    assert (tmp_path / "a" / "model" / "config.json").read_text() == "{}"


def test_no_file_of_a_checkpoint_is_a_program(tmp_path: Path) -> None:
    save(tmp_path / "a", ZeroOptimizer(built(), torch.optim.SGD, lr=0.1))
    assert not any(path.stat().st_mode & 0o111 for path in (tmp_path / "a").rglob("*") if path.is_file())
