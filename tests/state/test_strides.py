"""The strides of a state come back, whichever way it takes: products with it have the bits of the undisturbed run."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero
from collectives import Transport, on_threads, solo
from zero import CheckpointManager, MixedPrecision, ShardedAverage, ZeroOptimizer, open_checkpoint
from zero.checkpoint.format.tensorfile import STRIDES
from zero.commands.cli import main
from zero.core.bits import copied

from ..checkpoint.saved import OPTIMIZER, forge, rewrite_header
from ..support.loops import seeded
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, plain_step
from ..support.pool import GlooPool
from ..support.shampoo import Rotated

pytestmark = [
    pytest.mark.filterwarnings("ignore:Rotated is not element-wise", "ignore:not restored from"),
]

MICRO_BATCHES, SAVED, STEPS = 6, 2, 4
Topology = tuple[int, int]  # ranks, stage


def mixed() -> nn.Module:
    """Return a model of square matrices, of which one is transposed in memory, another matrix, and vectors."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5))
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def square() -> nn.Module:
    """Return a model whose eigenvectors have the shapes of its parameters."""
    return nn.Sequential(nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 9, bias=False))


def batches(step: int) -> Tensor:
    return torch.randn(MICRO_BATCHES, 4, 9, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
    return found


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range, average: ShardedAverage | None = None) -> None:
    optimizer.divisor = MICRO_BATCHES
    for step in steps:
        for batch in batches(step)[optimizer.rank :: optimizer.world_size]:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters()


def strides_of(value: Any) -> Any:
    """Return a tree with the strides of its tensors and arrays in their place."""
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.stride() if isinstance(value, Tensor) else value.strides)
    if isinstance(value, (list, tuple)):
        return [strides_of(inside) for inside in value]
    return {key: strides_of(inside) for key, inside in value.items()} if isinstance(value, dict) else None


def assert_same_dict(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert_same_states(ours, theirs)
    for index, state in theirs["state"].items():
        assert strides_of(ours["state"][index]) == strides_of(state), index


def plainly(build: Callable[[], nn.Module], steps: int) -> tuple[nn.Module, dict[str, Any]]:
    model = seeded(0, build)
    optimizer = Rotated(model.named_parameters())
    for step in range(steps):
        plain_step(model, optimizer, loss_of, batches(step), MICRO_BATCHES)
        optimizer.zero_grad()
    return model, copy.deepcopy(optimizer.state_dict())


@dataclass(frozen=True)
class Begun:
    """What was saved after `SAVED` steps on two ranks at stage 2: a checkpoint, and a file of torch.save.

    ``undisturbed``: what each rank has after all steps.
    """

    folder: Path
    file: Path
    undisturbed: list[tuple[nn.Module, dict[str, Any]]]


BUILDS = {"mixed": mixed, "square": square}


@pytest.fixture(scope="module", params=BUILDS)
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Begun]:
    return request.param, begin(BUILDS[request.param], tmp_path_factory.mktemp(request.param))


def begin(build: Callable[[], nn.Module], folder: Path) -> Begun:
    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model = seeded(0, build)
        optimizer = ZeroOptimizer(model, Rotated, stage=2, process_group=transport)
        train(model, optimizer, range(SAVED))
        with CheckpointManager(folder, optimizer) as checkpoints:
            checkpoints.save(SAVED)
        optimizer.consolidate_state_dict(1)
        if transport.rank == 1:
            found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(copy.deepcopy(found), folder / "file")
        train(model, optimizer, range(SAVED, STEPS))
        optimizer.consolidate_state_dict(None)
        found = optimizer.state_dict()
        optimizer.close()
        return model, found

    undisturbed = on_threads(2, program)
    return Begun(folder / f"step-{SAVED:08d}", folder / "file", undisturbed)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.by_default
def test_an_undisturbed_run_and_its_dict_are_those_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    begun = begin(BUILDS[name], tmp_path)
    assert_same_dict(torch.load(begun.file, weights_only=True)["optimizer"], plainly(BUILDS[name], SAVED)[1])
    expected, states = plainly(BUILDS[name], STEPS)
    for model, found in begun.undisturbed:
        assert_same_model(model, expected)
        assert_same_dict(found, states)


def by_dict(optimizer: ZeroOptimizer, begun: Begun, folder: Path) -> None:
    optimizer.load_state_dict(torch.load(begun.file, weights_only=True)["optimizer"])


def by_load(optimizer: ZeroOptimizer, begun: Begun, folder: Path) -> None:
    zero.load(begun.folder, optimizer, rng=False)


def by_restore(optimizer: ZeroOptimizer, begun: Begun, folder: Path) -> None:
    with CheckpointManager(begun.folder.parent, optimizer) as checkpoints:
        checkpoints.restore(rng=False)


def by_export(optimizer: ZeroOptimizer, begun: Begun, folder: Path) -> None:
    out = folder / f"exported-{optimizer.rank}"
    assert main(["checkpoint", "export", str(begun.folder), "--to", "torch", str(out)]) == 0
    optimizer.load_state_dict(torch.load(out, weights_only=True)["optimizer"])


WAYS = {"dict": by_dict, "load": by_load, "restore": by_restore, "export": by_export}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("topology", [(2, 2), (1, 0), (3, 3), (3, 1)], ids=str)
@pytest.mark.by_default(
    *("mixed-(2, 2)-load", "mixed-(3, 1)-dict", "mixed-(3, 3)-load", "square-(1, 0)-restore", "square-(3, 3)-export")
)
def test_a_resumed_run_is_the_undisturbed_one(
    way: str, topology: Topology, begun: tuple[str, Begun], tmp_path: Path
) -> None:
    ranks, stage = topology
    name, saved = begun

    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
        model = seeded(0, BUILDS[name])
        model.load_state_dict(torch.load(saved.file, weights_only=True)["model"])
        optimizer = ZeroOptimizer(model, Rotated, stage=stage, process_group=transport)
        WAYS[way](optimizer, saved, tmp_path)
        optimizer.consolidate_state_dict(None)
        before = optimizer.state_dict()
        train(model, optimizer, range(SAVED, STEPS))
        optimizer.consolidate_state_dict(None)
        after = optimizer.state_dict()
        optimizer.close()
        return model, before, after

    expected, states = plainly(BUILDS[name], STEPS)
    for model, before, after in on_threads(ranks, program):
        assert_same_dict(before, plainly(BUILDS[name], SAVED)[1])
        assert_same_model(model, expected)
        assert_same_dict(after, states)


def test_the_class_itself_goes_on_from_a_checkpoint_and_from_a_dict(begun: tuple[str, Begun]) -> None:
    name, saved = begun
    expected, states = plainly(BUILDS[name], STEPS)
    found = torch.load(saved.file, weights_only=True)
    for state_dict in (found["optimizer"], open_checkpoint(saved.folder).optimizer_state_dict()):
        model = seeded(0, BUILDS[name])
        model.load_state_dict(found["model"])
        optimizer = Rotated(model.parameters())
        optimizer.load_state_dict(state_dict)
        for step in range(SAVED, STEPS):
            plain_step(model, optimizer, loss_of, batches(step), MICRO_BATCHES)
            optimizer.zero_grad()
        assert_same_model(model, expected)
        assert_same_dict(optimizer.state_dict(), states)


def test_every_topology_writes_the_same_bytes_and_they_are_row_major(begun: tuple[str, Begun], tmp_path: Path) -> None:
    name, saved = begun

    def program(transport: Transport, stage: int, path: Path) -> None:
        optimizer = ZeroOptimizer(seeded(0, BUILDS[name]), Rotated, stage=stage, process_group=transport)
        zero.load(saved.folder, optimizer, rng=False)
        zero.save(path, optimizer, step=SAVED)

    for ranks, stage in ((1, 0), (3, 3)):
        on_threads(ranks, partial(program, stage=stage, path=tmp_path / f"{stage}"))
        assert open_checkpoint(tmp_path / f"{stage}").content == open_checkpoint(saved.folder).content
    read = safetensors.torch.load_file(saved.folder / OPTIMIZER)
    state = plainly(BUILDS[name], SAVED)[1]["state"][0]
    for key, tensor in (("first", state["first"]), ("bases.1", state["bases"][1]), ("one", state["one"])):
        assert read[f"state.0.weight.{key}"].is_contiguous()
        assert_same_bits(read[f"state.0.weight.{key}"], tensor, key)


def test_files_from_before_strides_were_noted_are_read_as_they_were(begun: tuple[str, Begun], tmp_path: Path) -> None:
    """A state that lay flat lies as its parameter does, and any other one is row-major."""
    name, saved = begun
    path = Path(shutil.copytree(saved.folder, tmp_path / "older"))
    noted = json.loads(open_checkpoint(path).header(OPTIMIZER).metadata[STRIDES])
    assert ("state.2.weight.momentum" in noted) == (name == "mixed")
    rewrite_header(path / OPTIMIZER, **{STRIDES: "{}"})
    forge(path)
    model = seeded(0, BUILDS[name])
    optimizer = ZeroOptimizer(model, Rotated, process_group=solo())
    zero.load(path, optimizer, rng=False)
    assert_same_states(optimizer.state_dict(), plainly(BUILDS[name], SAVED)[1])
    for parameter, state in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        assert state["momentum"].stride() == parameter.stride()
        assert all(tensor.is_contiguous() for tensor in (state["first"], *state["bases"], state["one"]))


def resumed_on_a_process(group: Any, rank: int, saved: Begun) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    model = seeded(0, mixed)
    model.load_state_dict(torch.load(saved.file, weights_only=True)["model"])
    optimizer = ZeroOptimizer(model, Rotated, stage=3, process_group=group)
    by_dict(optimizer, saved, saved.folder)
    train(model, optimizer, range(SAVED, STEPS))
    optimizer.consolidate_state_dict(None)
    dicts = [optimizer.state_dict()]
    zero.save(saved.folder.parent / "on-processes", optimizer)
    zero.load(saved.folder.parent / "on-processes", optimizer)
    optimizer.consolidate_state_dict(None)
    dicts.append(optimizer.state_dict())
    optimizer.close()
    return model, dicts[0], dicts[1]


@pytest.mark.full
@pytest.mark.parametrize("begun", ["mixed"], indirect=True)
def test_so_it_is_on_processes(gloo: GlooPool, begun: tuple[str, Begun]) -> None:
    expected, states = plainly(mixed, STEPS)
    for model, *dicts in gloo.run(resumed_on_a_process, begun[1], ranks=(0, 1)):
        assert_same_model(model, expected)
        for found in dicts:
            assert_same_dict(found, states)


# -- element-wise classes, averages, what a user gives -----------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.by_default("3-bf16")
def test_states_averages_and_masters_of_a_class_that_is_element_wise_have_those_of_the_parameters(
    stage: int, precision: MixedPrecision | None, tmp_path: Path
) -> None:
    def program(transport: Transport) -> None:
        model = seeded(0, mixed)
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, process_group=transport, mixed_precision=precision
        )
        average = ShardedAverage(optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        train(model, optimizer, range(1), average)
        optimizer.consolidate_state_dict(None)
        found = optimizer.state_dict()
        zero.save(tmp_path / "saved", optimizer)
        train(model, optimizer, range(1, 2), average)
        zero.load(tmp_path / "saved", optimizer)
        saved = open_checkpoint(tmp_path / "saved")
        states = saved.optimizer_state_dict()
        assert_same_dict(states, found)
        averages = [average.gather(to=None) or {}, saved.averages("average")]
        for index, (name, parameter) in enumerate(seeded(0, mixed).named_parameters()):
            of = [*averages, states["state"][index], found["state"][index]]
            tensors = [of[0][name], of[1][name], *(each[key] for each in of[2:] for key in ("exp_avg", "exp_avg_sq"))]
            tensors += [each["masters"][index] for each in (states, found)] if precision else []
            assert {tensor.stride() for tensor in tensors} == {parameter.stride()}, name
            assert_same_bits(of[0][name], of[1][name], name)
        optimizer.close()

    on_threads(2, program)


def test_an_average_has_those_of_the_averaged_model() -> None:
    model = seeded(0, mixed)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    average, expected = ShardedAverage(optimizer), AveragedModel(model)
    average.update_parameters()
    expected.update_parameters(model)
    found = average.gather() or {}
    assert strides_of(found) == {name: p.stride() for name, p in expected.module.named_parameters()}


def trees() -> dict[str, Any]:
    vectors = torch.linalg.eigh(torch.eye(3) + 1)[1]
    return {
        "vectors": vectors,
        "nested": [(vectors.t(), {"conv": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)})],
        "expanded": torch.arange(3.0).expand(2, 3),
        "rows": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "plain": torch.ones(2, 3),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_user_gives_comes_back_with_its_strides(world_size: int, tmp_path: Path) -> None:
    given = trees()

    def program(transport: Transport) -> None:
        optimizer = ZeroOptimizer(seeded(0, square), torch.optim.SGD, process_group=transport)
        zero.save(tmp_path / "saved", optimizer, given, {"own": given["vectors"] + transport.rank})
        restored = zero.load(tmp_path / "saved", optimizer, rng=False)
        assert strides_of(restored.state) == strides_of(given)
        found = dict(restored.state)
        assert np.array_equal(found.pop("rows"), given["rows"])
        assert_same_states({"state": {0: found}}, {"state": {0: {key: given[key] for key in found}}})
        assert restored.rank_state["own"].stride() == given["vectors"].stride()
        assert_same_bits(restored.rank_state["own"], given["vectors"] + transport.rank)

    on_threads(world_size, program)


def test_what_has_gaps_or_overlaps_comes_back_dense_with_its_order_of_dimensions(tmp_path: Path) -> None:
    part = torch.arange(24.0).view(4, 6)[:, :3]
    given = {"gaps": part, "turned": part.t(), "windows": torch.arange(6.0).unfold(0, 3, 1)}
    optimizer = ZeroOptimizer(seeded(0, square), torch.optim.SGD, process_group=solo())
    zero.save(tmp_path / "saved", optimizer, given)
    found = open_checkpoint(tmp_path / "saved").state
    assert strides_of(found) == {"gaps": (3, 1), "turned": (1, 3), "windows": (3, 1)}
    for name, value in given.items():
        assert_same_bits(found[name], value, name)
        assert copied(value).stride() == found[name].stride()


def test_only_what_is_not_row_major_is_noted(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(seeded(0, square), torch.optim.AdamW, process_group=solo())
    train(parts_of(optimizer).module, optimizer, range(1))  # type: ignore[arg-type]
    zero.save(tmp_path / "plain", optimizer, {"a": torch.ones(2, 3), "b": torch.ones(1, 1)[:, :1].t()})
    zero.save(tmp_path / "noted", optimizer, trees())
    for path, names in (("plain", set()), ("noted", {"vectors", "nested.0.1.conv", "expanded", "rows"})):
        saved = open_checkpoint(tmp_path / path)
        files = [file for file in saved.manifest.files if file.endswith(".safetensors")]
        notes = [json.loads(saved.header(file).metadata.get(STRIDES, "{}")) for file in files]
        assert {name for note in notes for name in note} == names


FORGED = (  # of "a", which has shape (2, 3)
    *("[]", "no JSON", '{"b": [3, 1]}', '{"a": [1]}', '{"a": [3, 1, 1]}', '{"a": [-3, 1]}', '{"a": [3, 1.0]}'),
    *('{"a": [3, true]}', '{"a": "31"}', '{"a": [1, 1]}', '{"a": [4, 1]}', '{"a": [9000000000000000, 1]}'),
)


@pytest.mark.parametrize("note", FORGED)
@pytest.mark.by_default
def test_strides_that_no_tensor_of_the_file_has_are_an_error_that_names_the_file(note: str, tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(seeded(0, square), torch.optim.SGD, process_group=solo())
    zero.save(tmp_path / "saved", optimizer, {"a": torch.zeros(2, 3)})
    rewrite_header(tmp_path / "saved/state.safetensors", **{STRIDES: note})
    forge(tmp_path / "saved")
    for read in (lambda: open_checkpoint(tmp_path / "saved").state, lambda: zero.load(tmp_path / "saved", optimizer)):
        with pytest.raises(zero.CheckpointError, match=r"state\.safetensors: its strides"):
            read()


def test_a_parameter_may_be_called_as_the_note_is(tmp_path: Path) -> None:
    """In `model/` the metadata has the aliases of tied parameters."""
    tied = nn.Module()
    tied.weight = tied.strides = nn.Parameter(torch.ones(2, 3))
    zero.save(tmp_path / "saved", ZeroOptimizer(tied, torch.optim.SGD, process_group=solo()))
    assert open_checkpoint(tmp_path / "saved").model_state_dict().keys() == {"weight", "strides"}
