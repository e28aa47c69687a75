"""The checkpoints of format 1 that are kept here are read by every later release, and still written byte by byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer, load, open_checkpoint, save
from zero.commands.cli import main

from ..support.plain import assert_same_states, assert_same_value
from ..support.rows import rows
from .format_1.toys import HalfMomentum, OtherShapes, Small, groups, train
from .saved import edit_manifest, files_of, plain_dict, save_small

STEPS = 2
FOLDER = Path(__file__).parent / "format_1"
SHARDED, OTHER_SHAPES = FOLDER / "sharded", FOLDER / "other_shapes"
CLASSES = {SHARDED: HalfMomentum, OTHER_SHAPES: OtherShapes}
TRAINED = ["weight", "scale", "unused", "bias"]  # in the order of the optimizer
STATE = {"epoch": 1, "position": (2, b"\x00\xff"), "losses": torch.tensor([0.5, 0.25], dtype=torch.float64)}
AVERAGES = {"weight": torch.full((2, 3), 0.5, dtype=torch.float64), "count": torch.tensor(7)}

pytestmark = pytest.mark.filterwarnings("ignore:not restored from")


def optimizer_of(folder: Path, model: nn.Module, transport: Transport, stage: int) -> ZeroOptimizer:
    more: dict[str, Any] = {"partition": "parameter"}  # each parameter has one owner
    if folder == SHARDED:
        more = {"mixed_precision": MixedPrecision(torch.bfloat16)}
    return ZeroOptimizer(groups(model), CLASSES[folder], module=model, stage=stage, process_group=transport, **more)


def write(folder: Path, path: Path, transport: Transport, stage: int) -> None:
    """Train and save what a folder has, by today's release."""
    model = Small()
    optimizer = optimizer_of(folder, model, transport, stage)
    train(model, optimizer, range(STEPS))
    if folder == SHARDED:
        save_small(path, optimizer, step=STEPS, state=STATE, rank_state={"rank": optimizer.rank})
    else:
        save(path, optimizer, {"epoch": 1}, step=STEPS)
    optimizer.close()


def plain(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of a folder after the steps of plain torch in fp32.

    Nothing is rounded: what is saved as bf16 are these values, and master weights and states are these bits.
    """
    model = Small()
    optimizer = CLASSES[folder](groups(model))
    train(model, optimizer, range(STEPS))
    return model, optimizer


def expected_of(folder: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the values of a model and the master weights that the folder has: in its dtype, but for a buffer."""
    weights = {name: model.get_parameter(name).detach() for name in TRAINED}
    if folder == OTHER_SHAPES:
        return model.state_dict(), {}
    found = model.state_dict().items()
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in found}, weights


def assert_is_loaded(folder: Path) -> None:
    expected, reference = plain(folder)
    left = (
        ()
        if folder == SHARDED
        else ("the averages 'ema' (no ShardedAverage has this name; open_checkpoint reads them)",)
    )

    def program(transport: Transport) -> None:
        model = Small()
        for parameter in model.parameters():
            parameter.data.fill_(-3.0)
        optimizer = optimizer_of(folder, model, transport, 2)
        assert load(folder, optimizer, rng=False, reshard=lambda *_: {}).not_restored[:1] == left
        states = plain_dict(optimizer)
        optimizer.close()
        assert_same_value(model.state_dict(), expected_of(folder, expected)[0], "model")
        assert_same_states(states, reference.state_dict())

    on_threads(2, program)


@pytest.mark.parametrize("folder", CLASSES, ids=lambda folder: folder.name)
def test_a_folder_is_whole_and_has_the_values_that_were_saved(folder: Path, tmp_path: Path) -> None:
    """Another class or a newer version is one clear error."""
    assert main(["checkpoint", "verify", str(folder)]) == 0
    checkpoint, (model, optimizer) = open_checkpoint(folder), plain(folder)
    weights, masters = expected_of(folder, model)
    assert (checkpoint.step, checkpoint.not_saved) == (STEPS, ())
    assert_same_value(checkpoint.model_state_dict(), weights, "model")
    assert_same_value(checkpoint.masters(), masters, "masters")
    found = checkpoint.optimizer_state_dict()
    by_name = {TRAINED[index]: value for index, value in found.pop("masters", {}).items()}
    assert_same_value(by_name, masters, "masters")
    assert_same_states(found, optimizer.state_dict())
    assert_same_value(checkpoint.state, STATE if folder == SHARDED else {"epoch": 1}, "state")
    if folder == OTHER_SHAPES:
        assert checkpoint.average_names == ["ema"]
        assert_same_value(checkpoint.averages("ema"), AVERAGES, "averages")
    else:
        assert checkpoint.world_size == 1
        assert checkpoint.rank_state(0)["rank_state"] == {"rank": 0}
        assert checkpoint.rank_state(0)["rng"].keys() == {"torch", "numpy", "random"}
    of_class = CLASSES[folder]
    for group in checkpoint.param_groups:
        assert group["optimizer_class"] == f"{of_class.__module__}.{of_class.__qualname__}"
    other = ZeroOptimizer(groups(model), torch.optim.SGD, module=model)
    with pytest.raises(ValueError, match=rf"was trained by tests\.checkpoint\..*{of_class.__name__}, but this"):
        load(folder, other, rng=False)
    assert_is_loaded(folder)
    path = Path(shutil.copytree(folder, tmp_path / folder.name))
    edit_manifest(path, version=2)
    told = r"checkpoint\.json: it has version 2 of the format, and this release of zero reads 1: read it with"
    with pytest.raises(ValueError, match=told):
        load(path, other)


def shared_bytes(folder: Path) -> dict[str, bytes]:
    """Return the files but averages and those that are a rank's own or name the run that wrote them."""
    own = ("checkpoint.json", "ranks/", "averages/")
    return {path: (folder / path).read_bytes() for path in files_of(folder) if not path.startswith(own)}


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 0)], [(2, 3), (3, 1)]))
def test_today_the_same_bytes_are_written(world_size: int, stage: int, tmp_path: Path) -> None:
    """The file of states of any shape has the order of the model; an import wrote that of the param groups."""
    on_threads(world_size, lambda transport: write(SHARDED, tmp_path / "sharded", transport, stage))
    assert shared_bytes(tmp_path / "sharded") == shared_bytes(SHARDED)
    assert open_checkpoint(tmp_path / "sharded").content == open_checkpoint(SHARDED).content
    write(OTHER_SHAPES, tmp_path / "alone", solo(), 0)
    on_threads(world_size, lambda transport: write(OTHER_SHAPES, tmp_path / "other", transport, stage))
    assert shared_bytes(tmp_path / "other") == shared_bytes(tmp_path / "alone")
    saved, kept = open_checkpoint(tmp_path / "other"), open_checkpoint(OTHER_SHAPES)
    for path in kept.paths("model"):
        assert (tmp_path / "other" / path).read_bytes() == (OTHER_SHAPES / path).read_bytes()
    assert_same_states(saved.optimizer_state_dict(), kept.optimizer_state_dict())
    assert saved.param_groups == kept.param_groups
