"""The checkpoints of format 1 that are kept here are read by every later release, and still written byte by byte."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Transport, on_threads
from zero import ZeroOptimizer, load, open_checkpoint
from zero.checkpoint.user_state import generators, set_generators
from zero.commands.cli import main

from ..support.plain import assert_same_bits, assert_same_states
from .format_1.toys import HalfMomentum, OtherShapes, Small, gradients, groups, train
from .format_1.write import STEPS, trained_other_shapes, write_other_shapes, write_sharded, zero_optimizer
from .saved import edit_manifest, files_of

FOLDER = Path(__file__).parent / "format_1"
SHARDED, OTHER_SHAPES = FOLDER / "sharded", FOLDER / "other_shapes"
BOTH = pytest.mark.parametrize("folder", [SHARDED, OTHER_SHAPES], ids=["sharded", "other_shapes"])
BF16, I8, I64 = torch.bfloat16, torch.int8, torch.int64

FIRST_RATE, SECOND_RATE = 0.5, 0.0009765625
NAMES = ["weight", "scale", "unused", "bias"]  # in the order of the optimizer

SHARDED_MASTERS = {
    "weight": torch.tensor([[-1.75, 3.0, 1.5], [-1.25, 3.5, 5.75]]),
    "bias": torch.tensor([0.9951171875, -1.0, 0.5087890625]),
    "scale": torch.tensor(1.75),
    "unused": torch.tensor([[8.0]]),
}
SHARDED_MODEL = {
    "weight": torch.tensor([[-1.75, 3.0, 1.5], [-1.25, 3.5, 5.75]], dtype=BF16),
    "bias": torch.tensor([0.99609375, -1.0, 0.5078125], dtype=BF16),
    "scale": torch.tensor(1.75, dtype=BF16),
    "unused": torch.tensor([[8.0]], dtype=BF16),
    "frozen": torch.tensor([0.25, -0.0], dtype=BF16),
    "seen": torch.tensor([3, 4]),
}
SHARDED_STATES: dict[str, dict[str, Any]] = {
    "weight": {"momentum": torch.tensor([[2.5, -2.0, 1.0], [5.5, 1.0, -0.5]]), "step": torch.tensor(2)},
    "bias": {"momentum": torch.tensor([3.0, 0.0, -5.0]), "step": torch.tensor(2)},
    "scale": {"momentum": torch.tensor(-0.5), "step": torch.tensor(2)},
}
OTHER_MODEL = {
    "weight": torch.tensor([[-1.5, 2.5, 0.625], [-0.875, 2.625, 4.75]]),
    "bias": torch.tensor([0.994140625, -1.0, 0.5107421875]),
    "scale": torch.tensor(2.5),
    "unused": torch.tensor([[8.0]]),
    "frozen": torch.tensor([0.25, -0.0]),
    "seen": torch.tensor([3, 4]),
}
OTHER_STATES: dict[str, dict[str, Any]] = {
    "weight": {
        "rows": torch.tensor([7.0, 9.0]),
        "columns": torch.tensor([10.0, 4.0, 2.0]),
        "signs": torch.tensor([[1], [-1], [1], [1], [1], [0]], dtype=I8),
        "limit": math.inf,
        "step": torch.tensor(2),
    },
    "bias": {"history": torch.tensor([[2.0, 0.0, -4.0], [2.0, 0.0, -3.0]], dtype=BF16), "step": torch.tensor(2)},
    "scale": {"step": torch.tensor(2)},
}
AVERAGES = {"weight": torch.full((2, 3), 0.5, dtype=torch.float64), "count": torch.tensor(7)}


def assert_same_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def plain_dict(states: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the dict of torch.optim that these states make."""
    return {
        "state": {NAMES.index(name): found for name, found in states.items()},
        "param_groups": [
            {"lr": FIRST_RATE, **options, "param_names": NAMES[:3], "params": [0, 1, 2]},
            {"lr": SECOND_RATE, **options, "param_names": NAMES[3:], "params": [3]},
        ],
    }


def with_alias(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**values, "inner.weight": values["weight"]}


# -- what is in them ---------------------------------------------------------------------------------------------------


def test_a_sharded_training_has_the_values_that_were_saved() -> None:
    checkpoint = open_checkpoint(SHARDED)
    assert (checkpoint.step, checkpoint.world_size, checkpoint.not_saved) == (STEPS, 1, ())
    assert_same_values(checkpoint.model_state_dict(), with_alias(SHARDED_MODEL))
    assert_same_values(checkpoint.masters(), SHARDED_MASTERS)
    found = checkpoint.optimizer_state_dict()
    masters = found.pop("masters")
    assert_same_values({NAMES[index]: value for index, value in masters.items()}, SHARDED_MASTERS)
    assert_same_states(found, plain_dict(SHARDED_STATES, bounds=(-64.0, 64.0)))
    state = checkpoint.state
    assert_same_bits(state.pop("losses"), torch.tensor([0.5, 0.25], dtype=torch.float64), "losses")
    assert state == {"epoch": 1, "position": (2, b"\x00\xff")}
    own = checkpoint.rank_state(0)
    assert own["rank_state"] == {"rank": 0}
    assert own["rng"].keys() == {"torch", "numpy", "random"}


def test_states_of_any_shape_dtype_and_number_have_the_values_that_were_saved() -> None:
    checkpoint = open_checkpoint(OTHER_SHAPES)
    assert (checkpoint.step, checkpoint.state, checkpoint.masters()) == (STEPS, {"epoch": 1}, {})
    assert_same_values(checkpoint.model_state_dict(), with_alias(OTHER_MODEL))
    assert_same_states(checkpoint.optimizer_state_dict(), plain_dict(OTHER_STATES))
    assert checkpoint.average_names == ["ema"]
    assert_same_values(checkpoint.averages("ema"), AVERAGES)


def test_each_state_has_a_byte_range_of_its_own() -> None:
    path, entry = open_checkpoint(OTHER_SHAPES).states()["weight"]["signs"]
    header = open_checkpoint(OTHER_SHAPES).header(path)
    data = (OTHER_SHAPES / path).read_bytes()
    assert data[header.data + entry.begin : header.data + entry.end] == bytes([1, 255, 1, 1, 1, 0])
    assert [(e.name, e.dtype, e.shape) for e in header.tensors] == [
        ("state.weight.columns", "F32", (3,)),
        ("state.weight.rows", "F32", (2,)),
        ("state.weight.signs", "I8", (6, 1)),
        ("state.bias.history", "BF16", (2, 3)),
        ("state.weight.step", "I64", ()),
        ("state.scale.step", "I64", ()),
        ("state.bias.step", "I64", ()),
    ]


# -- today's code writes them ------------------------------------------------------------------------------------------


def shared_bytes(folder: Path) -> dict[str, bytes]:
    """Return the files but averages and those that are a rank's own or name the run that wrote them."""
    own = ("checkpoint.json", "ranks/", "averages/")
    return {path: (folder / path).read_bytes() for path in files_of(folder) if not path.startswith(own)}


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 1)])
def test_states_of_any_shape_are_written_to_the_same_bytes(world_size: int, stage: int, tmp_path: Path) -> None:
    """Their order in the file is that of the model; an import wrote them in the order of the param groups."""
    write_other_shapes(tmp_path / "alone")
    on_threads(world_size, lambda transport: write_other_shapes(tmp_path / "saved", transport, stage))
    assert shared_bytes(tmp_path / "saved") == shared_bytes(tmp_path / "alone")
    saved, kept = open_checkpoint(tmp_path / "saved"), open_checkpoint(OTHER_SHAPES)
    for path in kept.paths("model"):
        assert (tmp_path / "saved" / path).read_bytes() == (OTHER_SHAPES / path).read_bytes()
    assert_same_states(saved.optimizer_state_dict(), kept.optimizer_state_dict())
    assert saved.param_groups == kept.param_groups


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 1)])
def test_a_sharded_training_is_still_written_to_the_same_bytes(world_size: int, stage: int, tmp_path: Path) -> None:
    on_threads(world_size, lambda transport: write_sharded(tmp_path / "saved", transport, stage))
    assert shared_bytes(tmp_path / "saved") == shared_bytes(SHARDED)
    assert open_checkpoint(tmp_path / "saved").content == open_checkpoint(SHARDED).content


# -- training goes on --------------------------------------------------------------------------------------------------


def plain_sharded(steps: range) -> dict[str, Tensor]:
    """Train the written values by plain torch, as mixed precision does. Return the master weights."""
    masters = {name: torch.nn.Parameter(value.clone()) for name, value in SHARDED_MASTERS.items()}
    first = [(name, masters[name]) for name in NAMES[:3]]
    optimizer = HalfMomentum([{"params": first}, {"params": [("bias", masters["bias"])]}], lr=7.0)
    optimizer.load_state_dict(copy.deepcopy(plain_dict(SHARDED_STATES, bounds=(-64.0, 64.0))))
    for step in steps:
        for name, gradient in gradients(step).items():
            masters[name].grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in masters.items()}


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_a_sharded_training_goes_on_at_any_topology(world_size: int, stage: int) -> None:
    further = range(STEPS, STEPS + 3)
    expected = plain_sharded(further)
    assert any(not torch.equal(value, SHARDED_MASTERS[name]) for name, value in expected.items())

    def program(transport: Transport) -> dict[str, Tensor]:
        model = Small()
        for parameter in model.parameters():
            parameter.data.fill_(-3.0)
        optimizer = zero_optimizer(model, transport, stage)
        restored = load(SHARDED, optimizer, rng=world_size == 1)
        assert restored.state["epoch"] == 1
        train(model, optimizer, further)
        optimizer.consolidate_state_dict(None)
        found = {name: optimizer.state_dict()["masters"][index] for index, name in enumerate(NAMES)}
        with optimizer.gathered():
            for name, parameter in model.named_parameters():
                whole = SHARDED_MODEL["frozen"] if name == "frozen" else found[name].to(BF16)
                assert_same_bits(parameter.detach(), whole, name)
        optimizer.close()
        return found

    before = generators()
    try:
        for found in on_threads(world_size, program):
            assert_same_values(found, expected)
    finally:
        set_generators(before)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (3, 3), (4, 2)])
def test_a_training_with_states_of_any_shape_goes_on_at_any_topology(world_size: int, stage: int) -> None:
    """Each parameter has one owner."""
    expected, reference = trained_other_shapes()
    train(expected, reference, range(STEPS, STEPS + 3))
    checkpoint, plain = open_checkpoint(OTHER_SHAPES), Small()
    plain.load_state_dict(checkpoint.model_state_dict())
    resumed = OtherShapes(groups(plain), lr=7.0)
    resumed.load_state_dict(checkpoint.optimizer_state_dict())
    train(plain, resumed, range(STEPS, STEPS + 3))
    assert_same_values(plain.state_dict(), expected.state_dict())

    def program(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = Small()
        optimizer = ZeroOptimizer(
            groups(model),
            OtherShapes,
            stage=stage,
            module=model,
            process_group=transport,
            partition="parameter",
        )
        load(OTHER_SHAPES, optimizer, rng=False)
        train(model, optimizer, range(STEPS, STEPS + 3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model.state_dict(), states

    with pytest.warns(RuntimeWarning, match="the averages 'ema'"):
        results = on_threads(world_size, program)
    for values, states in results:
        assert_same_values(values, expected.state_dict())
        assert_same_states(states, reference.state_dict())


def test_a_training_by_another_class_is_refused_and_its_model_is_loaded() -> None:
    model = Small()
    optimizer = ZeroOptimizer(groups(model), HalfMomentum, module=model)
    with pytest.raises(ValueError, match=r"was trained by tests\.checkpoint\.format_1\.toys\.OtherShapes, but this"):
        load(OTHER_SHAPES, optimizer, rng=False)
    with pytest.warns(RuntimeWarning, match="the averages 'ema'"):
        load(OTHER_SHAPES, optimizer, with_states=False, rng=False)
    assert_same_values(model.state_dict(), with_alias(OTHER_MODEL))


@BOTH
def test_a_folder_is_whole_names_its_class_and_a_newer_version_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    of_class = HalfMomentum if folder == SHARDED else OtherShapes
    for group in open_checkpoint(folder).param_groups:
        assert group["optimizer_class"] == f"{of_class.__module__}.{of_class.__qualname__}"
    path = Path(shutil.copytree(folder, tmp_path / folder.name))
    edit_manifest(path, version=2)
    told = r"checkpoint\.json: it has version 2 of the format, and this release of zero reads 1: read it with"
    model = Small()
    with pytest.raises(ValueError, match=told):
        load(path, ZeroOptimizer(groups(model), of_class, module=model))
