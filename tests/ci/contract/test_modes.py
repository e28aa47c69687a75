"""Classes with `train()` and `eval()`: further settings, processes, and the classes of two libraries."""

from __future__ import annotations

from typing import Any

import pytest

from ...dials.loops import steps
from ...dials.record import config_with
from ...support.machine.backends import Processes
from ...support.machine.program import Freeze, Modes
from ...support.machine.run import run
from ...support.pool import GlooPool
from ...support.two_modes import TWO_MODES

LOOP = [*steps(2), Modes(3), *steps(1), Freeze((2, 9)), *steps(1), Modes(4), *steps(1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 3, "stage": 3, "optimizer": "schedule-free", "precision": "bf16"},
        {"world_size": 4, "stage": 3, "optimizer": "averaged", "collective": "pairwise", "reshard": False},
    ],
    ids=str,
)
def test_weights_of_each_mode_are_those_of_the_plain_loop_on_processes(gloo: GlooPool, changes: dict[str, Any]) -> None:
    run(config_with(changes), *LOOP, backend=Processes(gloo))


CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "warmup_steps": 2, "weight_decay": 0.1}),
    "adamw for-loop": ("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "foreach": False}),
    "radam": ("schedulefree", "RAdamScheduleFree", {"lr": 0.01}),
    "sgd": ("schedulefree", "SGDScheduleFree", {"lr": 0.05}),
    "adamw of a collection": ("pytorch_optimizer", "ScheduleFreeAdamW", {"lr": 0.01}),
    "sgd of a collection": ("pytorch_optimizer", "ScheduleFreeSGD", {"lr": 0.05}),
    "radam of a collection": ("pytorch_optimizer", "ScheduleFreeRAdam", {"lr": 0.01}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_libraries_have_the_bits_of_the_plain_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, cls, arguments = CLASSES[name]
    monkeypatch.setitem(TWO_MODES, name, (getattr(pytest.importorskip(library), cls), arguments))
    for changes in ({"world_size": 3, "stage": 2, "precision": "bf16"}, {"world_size": 2, "stage": 3}):
        run(config_with({**changes, "optimizer": name}), *LOOP)
