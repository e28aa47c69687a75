"""Training goes on from a checkpoint where its bytes or states are of another kind than in the rows of the laws."""

from __future__ import annotations

from typing import Any

import pytest

from ..dials.loops import steps
from ..dials.record import config_with
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import FOLDER, Consolidate, Describe, Load, Setting
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.programs import BY_PARAMETER
from ..support.shampoo import Rotated

SETTINGS = (Setting(3, 3), Setting(0, 1), Setting(3, 2, sharding_factor=1, units="inside units"))
PROGRAMS: dict[str, dict[str, Any]] = {
    "nadam": {"optimizer": "nadam"},
    "fp16 sgd": {"optimizer": "sgd momentum", "precision": "fp16"},
    "by kind": {"precision": "by kind"},
    "bf16 adagrad, accelerated": {"optimizer": "adagrad", "precision": "bf16"},
    "strides": {"optimizer": "rotated", "parts": (Part("linear", 5), Part("matrix"), Part("turned"), Part("norm"))},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_topology_writes_the_same_bytes_and_training_goes_on(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator, shards without parameters lie beside their master weights. Strides of states change bits."""
    monkeypatch.setitem(BY_PARAMETER, "rotated", (Rotated, {}))
    if "accelerated" in name:
        request.getfixturevalue("accelerated")
    commands: list[Any] = [*steps(2)]
    for setting in SETTINGS:
        way = {} if name == "strides" and setting.stage == 0 else {"folder": FOLDER}
        commands += [Load(setting, **way), Consolidate(0), *steps(1, 60), Describe(exact=True)]
    run(config_with({"stage": 2, "world_size": 2, **PROGRAMS[name]}), *commands, backend=ThreadsOnHosts())
