"""A checkpoint of an optimizer that has no states: before the first step, or of a class that keeps none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from zero import ZeroOptimizer

pytestmark = pytest.mark.contract


def optimizer_of(module: nn.Module, name: str) -> ZeroOptimizer:
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "before a step": (torch.optim.AdamW, {"lr": 0.25}),
        "sgd": (torch.optim.SGD, {"lr": 0.25}),
    }
    return ZeroOptimizer(module, classes[name][0], **classes[name][1])


@pytest.mark.parametrize("name", ["before a step", "sgd"])
def test_a_checkpoint_without_states_is_whole_and_restores_weights_and_options(name: str, tmp_path: Path) -> None:
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    source, target = optimizer_of(saved, name), optimizer_of(loaded, name)
    if name == "sgd":
        saved(torch.ones(3)).sum().backward()
        source.step()
        source.zero_grad()
    target.param_groups[0]["lr"] = 7.0
    zero.save(tmp_path / "saved", source)
    checkpoint = zero.open_checkpoint(tmp_path / "saved")
    checkpoint.verify()
    assert checkpoint.optimizer_state_dict()["param_groups"][0]["lr"] == 0.25
    zero.load(tmp_path / "saved", target)
    assert target.param_groups[0]["lr"] == 0.25
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.detach().view(torch.int32), other.detach().view(torch.int32))


def test_a_parameter_that_was_never_used_has_no_state_after_a_load(tmp_path: Path) -> None:
    def built() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    saved, target = built(), optimizer_of(built(), "before a step")
    source = optimizer_of(saved, "before a step")
    saved[1](torch.ones(3)).sum().backward()
    source.step()
    source.zero_grad()
    zero.save(tmp_path / "saved", source)
    zero.load(tmp_path / "saved", target)
    target.consolidate_state_dict(to=0)
    assert sorted(target.state_dict()["state"]) == [2, 3]
