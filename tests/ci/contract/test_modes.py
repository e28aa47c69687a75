"""Classes with `train()` and `eval()`: further settings, processes, and the classes of two libraries."""

from __future__ import annotations

from typing import Any

import pytest

from ...contract.on_processes import whole_program
from ...contract.space import HABITS
from ...support.narrowed import PRECISIONS
from ...support.pool import GlooPool
from ...support.programs import Program, check, compare
from ...support.two_modes import TWO_MODES

BF16 = PRECISIONS["bf16"]


@pytest.mark.parametrize(
    "program",
    [
        Program(3, 3, "schedule-free", precision=BF16, steps=HABITS["freezes"]),
        Program(4, 3, "averaged", collective="pairwise", reshard=False, steps=HABITS["no sync"]),
        Program(2, 1, "schedule-free", precision=BF16, steps=HABITS["clips"]),
    ],
    ids=lambda program: f"{program.world_size}-{program.stage}-{program.optimizer}",
)
def test_weights_of_each_mode_are_those_of_the_plain_loop_on_processes(gloo: GlooPool, program: Program) -> None:
    compare(program, gloo.run(whole_program, program, ranks=range(program.world_size)))


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
    check(Program(3, 2, name, precision=BF16, steps=HABITS["clips"]))
    check(Program(2, 3, name, steps=HABITS["no sync"]))
