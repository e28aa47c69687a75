"""The checkpoints of format 1 that are kept here are read by every later release, and still written byte by byte."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, load, open_checkpoint
from zero.checkpoint.user_state import generators, set_generators
from zero.commands.cli import main

from ..support.plain import assert_same_bits, assert_same_states
from ..support.rows import rows
from .format_1.toys import HalfMomentum, OtherShapes, Small, groups, train
from .format_1.write import STEPS, write_other_shapes, write_sharded, zero_optimizer
from .saved import edit_manifest, files_of

FOLDER = Path(__file__).parent / "format_1"
SHARDED, OTHER_SHAPES = FOLDER / "sharded", FOLDER / "other_shapes"
CLASSES = {SHARDED: HalfMomentum, OTHER_SHAPES: OtherShapes}
TRAINED = ["weight", "scale", "unused", "bias"]  # in the order of the optimizer
AVERAGES = {"weight": torch.full((2, 3), 0.5, dtype=torch.float64), "count": torch.tensor(7)}


def plain(folder: Path, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of a folder after so many steps of plain torch in fp32.

    Nothing is rounded: what is saved as bf16 are these values, and master weights and states are these bits.
    """
    model = Small()
    optimizer = CLASSES[folder](groups(model))
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_same_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def expected_model(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the values of a model that the folder has: parameters in its dtype, and the buffer."""
    narrow = folder == SHARDED
    return {
        name: value.bfloat16() if narrow and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("folder", CLASSES, ids=lambda folder: folder.name)
def test_a_folder_has_the_values_that_were_saved(folder: Path) -> None:
    checkpoint, (model, optimizer) = open_checkpoint(folder), plain(folder, STEPS)
    assert (checkpoint.step, checkpoint.not_saved) == (STEPS, ())
    assert_same_values(checkpoint.model_state_dict(), expected_model(folder, model))
    masters = {name: model.get_parameter(name).detach() for name in TRAINED} if folder == SHARDED else {}
    assert_same_values(checkpoint.masters(), masters)
    found = checkpoint.optimizer_state_dict()
    assert_same_values({TRAINED[index]: value for index, value in found.pop("masters", {}).items()}, masters)
    assert_same_states(found, optimizer.state_dict())
    state = checkpoint.state
    if folder == OTHER_SHAPES:
        assert state == {"epoch": 1}
        assert checkpoint.average_names == ["ema"]
        assert_same_values(checkpoint.averages("ema"), AVERAGES)
        return
    assert_same_bits(state.pop("losses"), torch.tensor([0.5, 0.25], dtype=torch.float64), "losses")
    assert state == {"epoch": 1, "position": (2, b"\x00\xff")}
    assert checkpoint.world_size == 1
    own = checkpoint.rank_state(0)
    assert own["rank_state"] == {"rank": 0}
    assert own["rng"].keys() == {"torch", "numpy", "random"}


def shared_bytes(folder: Path) -> dict[str, bytes]:
    """Return the files but averages and those that are a rank's own or name the run that wrote them."""
    own = ("checkpoint.json", "ranks/", "averages/")
    return {path: (folder / path).read_bytes() for path in files_of(folder) if not path.startswith(own)}


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 0)], [(2, 3), (3, 1)]))
def test_today_the_same_bytes_are_written(world_size: int, stage: int, tmp_path: Path) -> None:
    """The file of states of any shape has the order of the model; an import wrote that of the param groups."""
    on_threads(world_size, lambda transport: write_sharded(tmp_path / "sharded", transport, stage))
    assert shared_bytes(tmp_path / "sharded") == shared_bytes(SHARDED)
    assert open_checkpoint(tmp_path / "sharded").content == open_checkpoint(SHARDED).content
    write_other_shapes(tmp_path / "alone")
    on_threads(world_size, lambda transport: write_other_shapes(tmp_path / "other", transport, stage))
    assert shared_bytes(tmp_path / "other") == shared_bytes(tmp_path / "alone")
    saved, kept = open_checkpoint(tmp_path / "other"), open_checkpoint(OTHER_SHAPES)
    for path in kept.paths("model"):
        assert (tmp_path / "other" / path).read_bytes() == (OTHER_SHAPES / path).read_bytes()
    assert_same_states(saved.optimizer_state_dict(), kept.optimizer_state_dict())
    assert saved.param_groups == kept.param_groups


def loaded(folder: Path, transport: Transport, stage: int) -> tuple[nn.Module, ZeroOptimizer]:
    """Load a folder into a model of other values."""
    model = Small()
    for parameter in model.parameters():
        parameter.data.fill_(-3.0)
    if folder == SHARDED:
        optimizer = zero_optimizer(model, transport, stage)
    else:
        optimizer = ZeroOptimizer(
            groups(model), OtherShapes, stage=stage, module=model, process_group=transport, partition="parameter"
        )
    assert load(folder, optimizer, rng=folder == SHARDED and transport.world_size == 1).state["epoch"] == 1
    return model, optimizer


@pytest.mark.filterwarnings("ignore:not restored from")
@pytest.mark.parametrize("folder", CLASSES, ids=lambda folder: folder.name)
def test_training_goes_on_with_the_bits_of_plain_torch_at_any_topology(folder: Path) -> None:
    expected, reference = plain(folder, STEPS + 3)

    def program(transport: Transport, stage: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = loaded(folder, transport, stage)
        train(model, optimizer, range(STEPS, STEPS + 3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        with optimizer.gathered():
            values = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.close()
        return values, states

    before = generators()
    try:
        for world_size, stage in ((1, 0), (2, 2), (2, 3), (3, 1), (4, 2)):
            for values, states in on_threads(world_size, partial(program, stage=stage)):
                assert_same_values(values, expected_model(folder, expected))
                assert_same_states(states, reference.state_dict())
                for index, master in states.get("masters", {}).items():
                    assert_same_bits(master, expected.get_parameter(TRAINED[index]).detach(), TRAINED[index])
                assert ("masters" in states) == (folder == SHARDED)
    finally:
        set_generators(before)


@pytest.mark.filterwarnings("ignore:not restored from")
@pytest.mark.parametrize("folder", CLASSES, ids=lambda folder: folder.name)
def test_a_folder_is_whole_and_another_class_or_a_newer_version_is_one_clear_error(
    folder: Path, tmp_path: Path
) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    model, of_class = Small(), CLASSES[folder]
    for group in open_checkpoint(folder).param_groups:
        assert group["optimizer_class"] == f"{of_class.__module__}.{of_class.__qualname__}"
    optimizer = ZeroOptimizer(groups(model), torch.optim.SGD, module=model)
    with pytest.raises(ValueError, match=rf"was trained by tests\.checkpoint\..*{of_class.__name__}, but this"):
        load(folder, optimizer, rng=False)
    restored = load(folder, optimizer, with_states=False, rng=False)
    left = () if folder == SHARDED else ("the averages 'ema' (open_checkpoint reads them)",)
    assert restored.not_restored == left
    assert_same_values(model.state_dict(), plain(folder, STEPS)[0].state_dict())
    path = Path(shutil.copytree(folder, tmp_path / folder.name))
    edit_manifest(path, version=2)
    told = r"checkpoint\.json: it has version 2 of the format, and this release of zero reads 1: read it with"
    with pytest.raises(ValueError, match=told):
        load(path, optimizer)
