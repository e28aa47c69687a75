"""What is planned for torchao's classes of few bits is what ranks hold and send, to the byte."""

from __future__ import annotations

import pytest
import torch

from zero.planning.setting import PlanSetting

from ...planning.test_planned_blocks import BF16, compare_with_plan

CLASSES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize("name", CLASSES)
def test_torchaos_states_are_planned_to_the_byte(name: str) -> None:
    found = getattr(pytest.importorskip("torchao.optim"), CLASSES[name])
    setting = PlanSetting(
        stage=3, world_size=3, optimizer=name, partition="block", mixed_precision=BF16, bucket_cap_mb=0.03, threads=True
    )
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        compare_with_plan(setting, found)
