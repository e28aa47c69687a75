"""The strides of what is saved come back; those of states of classes, with the bits of training: `test_topology`."""

from __future__ import annotations

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
from ..support.errors import error_of
from ..support.plain import assert_same_states, assert_same_value
from ..support.shampoo import Rotated

pytestmark = pytest.mark.filterwarnings("ignore:Rotated is not element-wise")


def strides_of(value: Any) -> Any:
    """Return a tree with the strides of its tensors and arrays in their place."""
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.stride() if isinstance(value, Tensor) else value.strides)
    if isinstance(value, (list, tuple)):
        return [strides_of(inside) for inside in value]
    return {key: strides_of(inside) for key, inside in value.items()} if isinstance(value, dict) else None


def test_those_of_a_state_come_back_and_files_of_before_they_were_noted_are_read(tmp_path: Path) -> None:
    """Files are row-major. The class itself takes the states."""
    model = nn.Linear(9, 9)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    optimizer = ZeroOptimizer(model, Rotated, process_group=solo())
    model(torch.ones(2, 9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, path = optimizer.state_dict(), tmp_path / "saved"
    zero.save(path, optimizer)
    assert "state.weight.momentum" in json.loads(open_checkpoint(path).header(OPTIMIZER).metadata[STRIDES])
    zero.load(path, optimizer)
    for found in (optimizer.state_dict(), open_checkpoint(path).optimizer_state_dict()):
        assert_same_states(found, before)
        assert strides_of(found["state"]) == strides_of(before["state"])
    rewrite_header(path / OPTIMIZER, **{STRIDES: "{}"})
    forge(path)
    zero.load(path, optimizer)
    assert_same_states(optimizer.state_dict(), before)
    for parameter, state in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
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
        optimizer = ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, process_group=transport)
        zero.save(tmp_path / "saved", optimizer, {**given, **gaps}, {"own": vectors + transport.rank})
        restored = zero.load(tmp_path / "saved", optimizer, rng=False)
        found = dict(restored.state)
        assert strides_of(found) == {**strides_of(given), "gaps": (3, 1), "turned": (1, 3), "windows": (3, 1)}
        assert np.array_equal(found.pop("rows"), given["rows"])
        assert_same_value(found, {key: {**given, **gaps}[key] for key in found}, "the state")
        assert all(copied(value).stride() == found[name].stride() for name, value in gaps.items())
        own = restored.rank_state["own"]
        assert own.stride() == vectors.stride()
        assert_same_value(own, vectors + transport.rank, "the rank's own")

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
            assert "state.safetensors: its strides" in error_of(read)
