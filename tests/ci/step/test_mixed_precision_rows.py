"""Mixed precision and loss scaling are those of the plain loop, at each stage, with each precision and class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ...support.narrowed import PRECISIONS
from ...support.programs import Program, Round, Step, check

pytestmark = pytest.mark.contract

OFF, ON = Round(sync=False), Round()
STEPS = (
    Step(clips=((0.1, 2.0),)),
    Step((OFF, OFF, ON), clear="zeros"),
    Step((ON, OFF), toggle=("frozen", "first.weight"), clear="module zeros"),
    Step((OFF, ON, OFF), step=False, clear="none"),
    Step((ON, ON, ON), toggle=("last.bias",), clips=((0.1, 2.0),)),
)
ROWS = [  # ranks, stage, class, cap, the dtype in which the model was made, precision
    (2, 0, "adamw", 25.0, torch.float64, "bf16, sent in fp32"),
    (3, 0, "sgd momentum", 1e-6, torch.float32, "fp32, added up in bf16"),
    (1, 0, "adamw fused", 0.0005, torch.float16, "fp16"),
    (3, 1, "adamw fused", 1e-6, torch.float32, "bf16"),
    (2, 1, "adamw", 25.0, torch.bfloat16, "fp16"),
    (1, 1, "sgd momentum", 0.0005, torch.float64, "bf16, added up in bf16"),
    (2, 2, "adamw", 0.0005, torch.float16, "fp32, added up in bf16"),
    (3, 2, "adamw fused", 25.0, torch.float64, "fp16"),
    (1, 2, "sgd momentum", 1e-6, torch.bfloat16, "bf16, sent in fp32"),
    (3, 3, "adamw", 25.0, torch.bfloat16, "fp32, sent in bf16"),
    (2, 3, "adamw fused", 0.0005, torch.float64, "bf16"),
    (1, 3, "sgd momentum", 1e-6, torch.float16, "bf16, sent in fp32"),
    (3, 3, "adagrad", 0.0005, torch.float32, "bf16, added up in bf16"),
]


SCALED = [
    Program(3, 0, "adamw fused", 25.0),
    Program(2, 1, "adamw fused"),
    Program(3, 3, "sgd momentum"),
    Program(1, 1, "adamw", 25.0, precision=PRECISIONS["fp16"]),
]
OVERFLOWS = (Step(), Step(overflow=(1, 0), clips=((0.1, 2.0),)), Step(unscale=False, overflow=(0, 0)), Step())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_training_is_that_of_the_plain_loop(row: tuple[int, int, str, float, torch.dtype, str]) -> None:
    world_size, stage, optimizer, cap, dtype, precision = row
    check(Program(world_size, stage, optimizer, cap, dtype=dtype, precision=PRECISIONS[precision], steps=STEPS))


@pytest.mark.parametrize("program", SCALED, ids=lambda program: f"{program.stage}-{program.optimizer}")
def test_an_overflow_skips_the_step_everywhere(program: Program) -> None:
    check(replace(program, scaled=True, steps=OVERFLOWS))
