"""Each value of a checkpoint is read here, and by safetensors, torch.distributed.checkpoint and torch.optim."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import zero
from zero import CheckpointError, MixedPrecision, ZeroOptimizer, load, open_checkpoint, save

from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, assert_same_value
from .saved import TiedModel, built, save_small, train
from .values import difference

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9)}
Trained = tuple[Path, nn.Module, ZeroOptimizer]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a checkpoint of several files a folder, with groups whose options have many types, and what was saved."""
    model = built()
    first, *rest = [each for each in model.parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": np.float64(0.1), "tag": ("a", None, {1: float("inf")})}]
    optimizer = ZeroOptimizer([*groups, {"params": [first]}], torch.optim.AdamW, module=model, **ADAM)
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


def test_the_models_tensors_load_strictly_into_a_new_model(trained: Trained) -> None:
    path, model, _ = trained
    checkpoint = open_checkpoint(path)
    found = checkpoint.model_state_dict()
    assert set(found) == set(model.state_dict())
    in_order = [entry.name for file in checkpoint.paths("model") for entry in checkpoint.header(file).tensors]
    assert in_order == [name for name in model.state_dict() if name != "head.weight"]
    assert found["head.weight"] is found["embedding.weight"]
    again = TiedModel()
    again.load_state_dict(found, strict=True)
    assert_same_model(again, model)
    assert_same_bits(again.get_buffer("scale"), model.get_buffer("scale"))


def test_the_optimizers_dict_is_the_plain_one(trained: Trained) -> None:
    path, _, optimizer = trained
    found, expected = open_checkpoint(path).optimizer_state_dict(), plain_dict(optimizer)
    assert_same_states(found, expected)
    assert difference(found["param_groups"], expected["param_groups"]) is None


def in_bf16(model: nn.Module) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.AdamW, mixed_precision=MixedPrecision(torch.bfloat16), **ADAM)


def test_master_weights_are_read_and_loaded_as_what_was_written_into_parameters_made_them(tmp_path: Path) -> None:
    model = built()
    optimizer = in_bf16(model)
    train(model, optimizer, range(3))
    with torch.no_grad():
        model.get_parameter("inner.weight").mul_(2)
        model.get_parameter("inner.bias")[1:3].fill_(0.5)
    save_small(tmp_path / "a", optimizer)
    checkpoint = open_checkpoint(tmp_path / "a")
    checkpoint.verify()
    found, expected = checkpoint.optimizer_state_dict(), plain_dict(optimizer)
    assert_same_states(found, expected)
    assert_same_value(found["masters"], expected["masters"], "masters")
    assert torch.equal(checkpoint.masters()["inner.weight"], model.get_parameter("inner.weight").float())
    again = TiedModel()
    again.load_state_dict(checkpoint.model_state_dict())
    resumed = in_bf16(again)
    resumed.load_state_dict(found)
    train(again, resumed, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert_same_model(again, model)


def test_master_weights_of_what_was_trained_for_a_while_come_back(tmp_path: Path) -> None:
    def made() -> tuple[nn.Sequential, ZeroOptimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        return model, in_bf16(model)

    def trained_whole(model: nn.Sequential, optimizer: ZeroOptimizer, steps: int) -> Any:
        model[0].requires_grad_(True)
        for number in range(steps):
            model(torch.full((2, 4), number + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].requires_grad_(False)
        return plain_dict(optimizer)["masters"]

    model, optimizer = made()
    trained_whole(model, optimizer, 3)
    save_small(tmp_path / "a", optimizer)
    assert set(open_checkpoint(tmp_path / "a").masters()) == {name for name, _ in model.named_parameters()}
    again, resumed = made()
    load(tmp_path / "a", resumed)
    assert_same_value(trained_whole(again, resumed, 2), trained_whole(model, optimizer, 2), "masters")


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
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


def test_the_facts_of_a_checkpoint(trained: Trained) -> None:
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_safetensors_and_distributed_checkpoint_read_every_tensor(trained: Trained) -> None:
    path, _, _ = trained
    checkpoint = open_checkpoint(path)
    for folder in ("model", "optimizer", "ranks", ""):
        expected = {name: checkpoint.read(*place) for name, place in checkpoint.tensors(folder).items()}
        files = sorted((path / folder).glob("*.safetensors"))
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == expected.keys()
        loaded = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        if folder in ("model", "optimizer"):
            dcp_load(loaded, storage_reader=HuggingFaceStorageReader(str(path / folder)), no_dist=True)
            assert len(files) > 1
        else:
            loaded = found
        for name, tensor in expected.items():
            assert_same_bits(found[name], tensor, name)
            assert_same_bits(loaded[name], tensor, name)


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


def test_files_that_a_user_adds_and_a_link_to_it_are_no_damage(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(built(), torch.optim.SGD, lr=0.1)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    (tmp_path / "assets" / "empty.txt").write_text("")
    save(tmp_path / "a", optimizer, assets=tmp_path / "assets")
    (tmp_path / "a" / "model" / "README.md").write_text("mine")
    (tmp_path / "latest").symlink_to(tmp_path / "a")
    open_checkpoint(tmp_path / "latest").verify()
    assert not any(path.stat().st_mode & 0o111 for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert (tmp_path / "a" / "model" / "config.json").read_text() == "{}"
