"""What is planned for torchao's classes of few bits is what ranks hold and send, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero import MixedPrecision
from zero.planning.setting import PlanSetting

from ...planning.compared import compare_with_plan

CLASSES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize("name", CLASSES)
def test_torchaos_states_are_planned_to_the_byte(name: str, tmp_path: Path) -> None:
    found = getattr(pytest.importorskip("torchao.optim"), CLASSES[name])
    precision = {"mixed_precision": MixedPrecision(torch.bfloat16), "partition": "block", "bucket_cap_mb": 0.03}
    setting = PlanSetting(stage=3, world_size=3, optimizer=name, threads=True, **precision)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        compare_with_plan("in blocks", setting, tmp_path, found)
