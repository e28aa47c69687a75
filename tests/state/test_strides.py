"""The strides of a state come back, so that products with it have the bits of the undisturbed run."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer, open_checkpoint
from zero.checkpoint.format.tensorfile import STRIDES
from zero.core.bits import copied

from ..checkpoint.saved import OPTIMIZER, forge, rewrite_header
from ..support.loops import seeded
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.rows import rows
from ..support.shampoo import Rotated
from ..support.sides import AsPlain, OnRank, train
from .training import TOGETHER

pytestmark = pytest.mark.filterwarnings("ignore:Rotated is not element-wise", "ignore:not restored from")

SAVED, STEPS = 2, 4


def mixed() -> nn.Module:
    """Return a model of square matrices, whose eigenvectors have their shapes, one transposed, another, and vectors."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5))
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
    return found


def batches(step: int) -> Tensor:
    return torch.randn(TOGETHER, 4, 9, generator=torch.Generator().manual_seed(step))


run = functools.partial(train, batches_of=batches, loss_of=loss_of)


@functools.cache
def plainly(steps: int) -> tuple[nn.Module, dict[str, Any]]:
    model = seeded(0, mixed)
    loop = AsPlain(model, lambda _: Rotated(model.named_parameters()), divisor=TOGETHER)
    run(loop, range(steps))
    return model, copy.deepcopy(loop.optimizer.state_dict())


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


@pytest.mark.law("strides")
@pytest.mark.parametrize(("ranks", "stage", "way"), rows([(3, 1, "dict")], [(3, 3, "checkpoint")]))
def test_a_resumed_run_is_the_undisturbed_one(ranks: int, stage: int, way: str, tmp_path: Path) -> None:
    """The class itself takes its dicts, too. Files are row-major, and those of before strides were noted are read."""

    def program(transport: Transport, stage: int, saved: Any) -> Any:
        model = seeded(0, mixed)
        if saved is not None:
            model.load_state_dict(saved[0])
        arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "divisor": TOGETHER}
        optimizer = ZeroOptimizer(model, Rotated, **arguments)
        if saved is None:
            run(OnRank(model, optimizer), range(SAVED))
            zero.save(tmp_path / "saved", optimizer, step=SAVED)
        elif way == "dict":
            optimizer.load_state_dict(saved[1])
        else:
            zero.load(tmp_path / "saved", optimizer, rng=False)
            zero.save(tmp_path / "again", optimizer, step=SAVED)
        optimizer.consolidate_state_dict(None)
        before = copy.deepcopy(optimizer.state_dict())
        assert_same_dict(before, plainly(SAVED)[1])
        run(OnRank(model, optimizer), range(SAVED, STEPS))
        optimizer.consolidate_state_dict(None)
        assert_same_dict(optimizer.state_dict(), plainly(STEPS)[1])
        optimizer.close()
        assert_same_model(model, plainly(STEPS)[0])
        return before

    begun = on_threads(2, lambda transport: program(transport, 2, None))[0]
    weights = {name: value.clone() for name, value in plainly(SAVED)[0].state_dict().items()}
    on_threads(ranks, lambda transport: program(transport, stage, (weights, begun)))
    saved = open_checkpoint(tmp_path / "saved")
    assert way == "dict" or open_checkpoint(tmp_path / "again").content == saved.content
    for states in (begun, saved.optimizer_state_dict()):
        model = seeded(0, mixed)
        model.load_state_dict(weights)
        loop = AsPlain(model, Rotated, divisor=TOGETHER)
        loop.optimizer.load_state_dict(states)
        run(loop, range(SAVED, STEPS))
        assert_same_model(model, plainly(STEPS)[0])
    assert "state.2.weight.momentum" in json.loads(saved.header(OPTIMIZER).metadata[STRIDES])
    rewrite_header(tmp_path / "saved" / OPTIMIZER, **{STRIDES: "{}"})
    forge(tmp_path / "saved")
    model = seeded(0, mixed)
    older = ZeroOptimizer(model, Rotated, process_group=solo())
    zero.load(tmp_path / "saved", older, rng=False)
    assert_same_states(older.state_dict(), plainly(SAVED)[1])
    for parameter, state in zip(model.parameters(), older.state_dict()["state"].values(), strict=True):
        assert state["momentum"].stride() == parameter.stride(), "it lies as its parameter does"
        assert all(tensor.is_contiguous() for tensor in (state["first"], *state["bases"], state["one"]))


def test_what_a_user_gives_comes_back_with_its_strides(tmp_path: Path) -> None:
    vectors, part = torch.linalg.eigh(torch.eye(3) + 1)[1], torch.arange(24.0).view(4, 6)[:, :3]
    given = {
        "vectors": vectors,
        "nested": [(vectors.t(), {"conv": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)})],
        "expanded": torch.arange(3.0).expand(2, 3),
        "rows": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "plain": torch.ones(2, 3),
    }
    gaps = {"gaps": part, "turned": part.t(), "windows": torch.arange(6.0).unfold(0, 3, 1)}

    def program(transport: Transport) -> None:
        optimizer = ZeroOptimizer(seeded(0, mixed), torch.optim.SGD, process_group=transport)
        zero.save(tmp_path / "saved", optimizer, {**given, **gaps}, {"own": vectors + transport.rank})
        restored = zero.load(tmp_path / "saved", optimizer, rng=False)
        found = dict(restored.state)
        dense = {"gaps": (3, 1), "turned": (1, 3), "windows": (3, 1)}
        assert strides_of(found) == {**strides_of(given), **dense}
        assert np.array_equal(found.pop("rows"), given["rows"])
        assert_same_states({"state": {0: found}}, {"state": {0: {key: {**given, **gaps}[key] for key in found}}})
        assert all(copied(value).stride() == found[name].stride() for name, value in gaps.items())
        assert restored.rank_state["own"].stride() == vectors.stride()
        assert_same_bits(restored.rank_state["own"], vectors + transport.rank)

    on_threads(2, program)


FORGED = (  # of "a", which has shape (2, 3)
    *("[]", "no JSON", '{"b": [3, 1]}', '{"a": [1]}', '{"a": [3, 1, 1]}', '{"a": [-3, 1]}', '{"a": [3, 1.0]}'),
    *('{"a": [3, true]}', '{"a": "31"}', '{"a": [1, 1]}', '{"a": [4, 1]}', '{"a": [9000000000000000, 1]}'),
)


def test_strides_that_no_tensor_has_are_an_error(tmp_path: Path) -> None:
    """A parameter may be called as the note is."""
    tied = nn.Module()
    tied.weight = tied.strides = nn.Parameter(torch.ones(2, 3))
    optimizer = ZeroOptimizer(tied, torch.optim.SGD, process_group=solo())
    path = tmp_path / "saved"
    zero.save(path, optimizer, {"a": torch.zeros(2, 3)})
    assert open_checkpoint(path).model_state_dict().keys() == {"weight", "strides"}
    for note in FORGED:
        rewrite_header(path / "state.safetensors", **{STRIDES: note})
        forge(path)
        for read in (lambda: open_checkpoint(path).state, lambda: zero.load(path, optimizer)):
            with pytest.raises(zero.CheckpointError, match=r"state\.safetensors: its strides"):
                read()
