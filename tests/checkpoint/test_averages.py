"""Folders of whole tensors beside the model are hashed, verified and read by name like the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from zero import CheckpointError, ShardedAverage, ZeroOptimizer, load, open_checkpoint
from zero.checkpoint.format.manifest import averages_folder, averages_in
from zero.commands.cli import main

from ..support.plain import assert_same_bits
from .saved import add_averages, edit_manifest, forge, save_small, save_trained

AVERAGES: dict[str, dict[str, Tensor]] = {
    "swa": {"a": torch.ones(2, 3, dtype=torch.bfloat16)},
    "ema.0-9": {"b": torch.arange(5.0), "a": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0, 2)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = save_trained(tmp_path / "saved")
    add_averages(path, AVERAGES)
    return path


def test_averages_come_back_by_name_with_and_without_this_library(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.average_names == ["ema.0-9", "swa"]
    assert checkpoint.content != open_checkpoint(save_trained(folder.parent / "without")).content
    with pytest.raises(CheckpointError, match=r"has no averages 'ema', but \['ema.0-9', 'swa'\]"):
        checkpoint.averages("ema")
    for name, expected in AVERAGES.items():
        file = folder / f"averages/{name}/{name}-00001-of-00001.safetensors"
        for read in (checkpoint.averages(name), load_file(file)):
            assert read.keys() == expected.keys()
            for key, tensor in expected.items():
                assert_same_bits(read[key], tensor, key)


def test_averages_without_a_count_are_those_of_one_update(tmp_path: Path) -> None:
    """As imported ones are: the next update has half the weight."""
    model = nn.Linear(3, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 5.0)
    optimizer = ZeroOptimizer(model, torch.optim.SGD)
    save_small(tmp_path / "a", optimizer)
    add_averages(tmp_path / "a", {"swa": {"weight": torch.full((1, 3), 3.0), "bias": torch.full((1,), 3.0)}})
    average = ShardedAverage(optimizer, name="swa")
    load(tmp_path / "a", optimizer)
    average.update_parameters()
    found = average.gather()
    assert found is not None
    for name, parameter in model.named_parameters():
        assert_same_bits(found[name], torch.full(parameter.shape, 4.0), name)


def test_an_export_tells_that_it_has_no_averages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to, without in (
        ("torch", "averages"),
        ("hf", "optimizer and state and averages"),
        ("dcp", "state and averages"),
    ):
        assert main(["checkpoint", "export", str(folder), "--to", to, str(folder.parent / to)]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"for {to}, without {without}")


def test_averages_need_the_name_of_a_folder() -> None:
    for name in ("", ".", "..", ".hidden", "-option", "a/b", "a\\b", "a\0", "a\n", "ä", "a" * 101):
        with pytest.raises(ValueError, match="bad name of averages"):
            averages_folder(name)
    assert averages_folder("a" * 100) == "averages/" + "a" * 100
    paths = ["averages/b/x", "averages/b/y", "averages/a/x", "averages/file", "averages/c/d/x", "model/averages/x"]
    assert averages_in(paths) == ["a", "b"]


def test_a_manifest_may_have_files_that_this_release_does_not_know(folder: Path) -> None:
    """A later release may add folders: they are verified, and nothing else is made of them."""
    (folder / "later").mkdir()
    (folder / "later/file").write_bytes(b"text")
    forge(folder, files=dict.fromkeys([*open_checkpoint(folder).manifest.files, "later/file"]))
    edit_manifest(folder, later={"key": [1]})
    open_checkpoint(folder).verify()
    (folder / "later/file").write_bytes(b"tent")
    with pytest.raises(CheckpointError, match="later/file is broken at block 0"):
        open_checkpoint(folder).verify()
