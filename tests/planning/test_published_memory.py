"""The memory that the paper of ZeRO states for a rank is that of the library's own formulas."""

from __future__ import annotations

import math

import torch

from zero import MixedPrecision
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import PlanSetting

BF16 = torch.bfloat16

TABLE_1 = """
    1     120  120  120    2048 2048 2048    16000 16000 16000
    4     52.5 41.3 30     896  704  512     7000  5500  4000
    16    35.6 21.6 7.5    608  368  128     4750  2875  1000
    64    31.4 16.6 1.88   536  284  32      4187  2218  250
    256   30.4 15.4 0.47   518  263  8       4046  2054  62.5
    1024  30.1 15.1 0.12   513  257  2       4011  2013  15.6
"""
"""Ranks, and GB of a rank of 7.5, 128 and 1,000 billion parameters, each with P_os, P_os+g and P_os+g+p: Rajbhandari
et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), Table 1. K = 12,
16-bit gradients."""


def states(model: Model, ranks: int, stage: int) -> int:
    """Return the model states of the last rank with bf16 and Adam, without step counts."""
    setting = PlanSetting(stage=stage, world_size=ranks, mixed_precision=MixedPrecision(BF16, accumulate_dtype=BF16))
    found = MemoryPlan(model).of_largest(setting)
    return found.parameters + found.gradients + found.states + found.masters


def as_printed(nbytes: int) -> float:
    """Return GB as Table 1 prints them: from 100 on without decimals, cut off; else three digits, at most two of them
    decimals, half rounded up."""
    gigabytes = nbytes / 1e9
    if gigabytes >= 100:
        return math.floor(gigabytes)
    decimals = 1 if gigabytes >= 10 else 2
    return math.floor(gigabytes * 10**decimals + 0.5) / 10.0**decimals


def test_all_54_cells_of_table_1_of_the_zero_paper() -> None:
    cells = 0
    for ranks, *row in map(str.split, TABLE_1.split("\n")[1:-1]):
        for column, printed in enumerate(row):
            numel, stage = (7.5e9, 128e9, 1e12)[column // 3], column % 3 + 1
            model = Model("one matrix", (ParameterShape(("weight",), (int(numel),)),))
            found = states(model, int(ranks), stage)
            assert as_printed(found) == float(printed), "padding is below the last digit"
            cells += 1
    assert cells == 54
