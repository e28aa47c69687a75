"""Folders of whole tensors beside the model are hashed, verified and read by name like the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from zero import CheckpointError, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint.format.names import averages_folder, averages_in
from zero.commands.cli import main

from ..support.plain import assert_same_bits
from .saved import add_averages, built, edit_manifest, forge, save_trained

FILE, INDEX = "averages/ema.0-9/ema.0-9-00001-of-00001.safetensors", "averages/ema.0-9/ema.0-9.safetensors.index.json"


def averages() -> dict[str, dict[str, Tensor]]:
    first = {"b": torch.arange(5.0), "a": torch.tensor(3, dtype=torch.int64), "none": torch.empty(0, 2)}
    return {"swa": {"a": torch.ones(2, 3, dtype=torch.bfloat16)}, "ema.0-9": first}


def write(path: Path, found: dict[str, dict[str, Tensor]]) -> Path:
    save_trained(path)
    add_averages(path, found)
    return path


def test_averages_come_back_by_name_with_and_without_this_library(tmp_path: Path) -> None:
    path = write(tmp_path / "saved", averages())
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert checkpoint.average_names == ["ema.0-9", "swa"]
    assert checkpoint.content != open_checkpoint(save_trained(tmp_path / "without")).content
    with pytest.raises(CheckpointError, match=r"has no averages 'ema', but \['ema.0-9', 'swa'\]"):
        checkpoint.averages("ema")
    for name, expected in averages().items():
        file = path / f"averages/{name}/{name}-00001-of-00001.safetensors"
        for read in (checkpoint.averages(name), load_file(file)):
            assert read.keys() == expected.keys()
            for key, tensor in expected.items():
                assert_same_bits(read[key], tensor, key)


@pytest.mark.parametrize(
    ("to", "without"),
    [("torch", "averages"), ("hf", "optimizer and state and averages"), ("dcp", "state and averages")],
)
def test_an_export_tells_that_it_has_no_averages(
    to: str, without: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "saved", averages())
    assert main(["checkpoint", "export", str(path), "--to", to, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"for {to}, without {without}")


def test_averages_need_the_name_of_a_folder() -> None:
    for name in ("", ".", "..", ".hidden", "-option", "a/b", "a\\b", "a\0", "a\n", "ä", "a" * 101):
        with pytest.raises(ValueError, match="bad name of averages"):
            averages_folder(name)
    assert averages_folder("a" * 100) == "averages/" + "a" * 100
    paths = ["averages/b/x", "averages/b/y", "averages/a/x", "averages/file", "averages/c/d/x", "model/averages/x"]
    assert averages_in(paths) == ["a", "b"]


def break_last_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def drop_index(folder: Path) -> None:
    files = open_checkpoint(folder).manifest.files
    (folder / INDEX).unlink()
    forge(folder, files={path: sums for path, sums in files.items() if path != INDEX})


def other_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "swa-00001-of-00001.safetensors"}}')
    forge(folder)


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: break_last_bit(folder / FILE), f"{FILE} is broken at block 0"),
    (lambda folder: break_last_bit(folder / INDEX), f"{INDEX} is broken at block 0"),
    (lambda folder: (folder / "averages/swa/more").touch(), "averages/swa/more is no part of the checkpoint"),
    (drop_index, f"has no {INDEX}"),
    (other_index, f"{INDEX} does not name the files"),
]


@pytest.mark.parametrize(("change", "why"), BROKEN)
def test_broken_averages_are_named(change: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "saved", averages())
    change(folder)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(folder).verify()


def test_a_restore_names_the_averages_that_no_optimizer_has(tmp_path: Path) -> None:
    model = built(torch.nn.Linear, in_features=2, out_features=1)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    save(tmp_path / "saved", optimizer)
    add_averages(tmp_path / "saved", {"ema": found})
    with torch.no_grad():
        model.weight.zero_()
    with pytest.warns(RuntimeWarning, match="the averages 'ema'"):
        restored = load(tmp_path / "saved", optimizer, with_states=False, rng=False)
    assert restored.not_restored == ("the averages 'ema' (open_checkpoint reads them)",)
    for name, value in model.state_dict().items():
        assert_same_bits(value, found[name], name)


def test_a_manifest_may_have_files_that_this_release_does_not_know(tmp_path: Path) -> None:
    """A later release may add folders: they are verified, and nothing else is made of them."""
    folder = write(tmp_path / "saved", averages())
    (folder / "later").mkdir()
    (folder / "later/file").write_bytes(b"text")
    files = open_checkpoint(folder).manifest.files
    forge(folder, files={**files, "later/file": files[FILE]})
    edit_manifest(folder, later={"key": [1]})
    open_checkpoint(folder).verify()
    (folder / "later/file").write_bytes(b"tent")
    with pytest.raises(CheckpointError, match="later/file is broken at block 0"):
        open_checkpoint(folder).verify()
