"""What is planned for torchao's classes of few bits is what ranks hold and send, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zero import MixedPrecision
from zero.planning.setting import PlanSetting

from ...planning.compared import compare_with_plan

CLASSES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}
BF16 = MixedPrecision(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize(
    ("name", "stage", "ranks", "precision"),
    [("adamw8bit", 3, 5, BF16), ("adamw8bit", 0, 2, None), ("adamw4bit", 1, 3, BF16), ("adamwfp8", 2, 5, None)],
)
def test_torchaos_states_are_planned_to_the_byte(
    name: str, stage: int, ranks: int, precision: Any, tmp_path: Path
) -> None:
    found = getattr(pytest.importorskip("torchao.optim"), CLASSES[name])
    sizes = {"stage": stage, "world_size": ranks, "partition": "block", "bucket_cap_mb": 0.03}
    setting = PlanSetting(**sizes, optimizer=name, threads=True, mixed_precision=precision)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        plan = compare_with_plan("in blocks", setting, tmp_path, found)
    assert plan.of_largest(setting).resident == max(plan.of_rank(setting, rank).resident for rank in range(ranks))
