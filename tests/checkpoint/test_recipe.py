"""The recipe of `zero/checkpoint/README.md`: plain dicts become a checkpoint, and training goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.loops import blocks_of
from ..support.plain import assert_same_model, assert_same_states
from ..support.rows import rows
from .saved import TiedModel, built, train

RECIPE = blocks_of((Path(zero.__file__).parent / "checkpoint" / "README.md").read_text())["From plain dicts"]


@pytest.mark.parametrize(("world_size", "stage"), rows([(2, 3)], [(1, 0), (4, 1)]))
def test_training_goes_on_from_a_checkpoint_of_plain_dicts(
    world_size: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = built()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, range(2))
    torch.save({"model": plain.state_dict(), "optimizer": reference.state_dict()}, tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    found = torch.load(tmp_path / "file", weights_only=True)
    exec(RECIPE, {"found": found, "Model": TiedModel, "ZeroOptimizer": ZeroOptimizer, "torch": torch, "zero": zero})
    path = tmp_path / "runs" / "a" / "step-00000100"
    assert_same_states(zero.open_checkpoint(path).optimizer_state_dict(), reference.state_dict())
    train(plain, reference, range(2, 4))

    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model = built()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport)
        assert zero.load(path, optimizer, rng=False).step == 100
        train(model, optimizer, range(2, 4))  # the mean of equal gradients is exact, since W is a power of two
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model, states

    for model, states in on_threads(world_size, program):
        assert_same_model(model, plain)
        assert_same_states(states, reference.state_dict())
