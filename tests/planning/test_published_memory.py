"""The memory that papers and other tools state for a rank is that of the library's own formulas."""

from __future__ import annotations

import math
from typing import Any

import torch

from zero import MixedPrecision
from zero.planning.memory import MemoryPlan, RankBytes
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import PlanSetting

BF16, FP32 = torch.bfloat16, torch.float32

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


def held(model: Model, ranks: int, stage: int, **gradients: Any) -> RankBytes:
    """Return the bytes of the last rank with bf16 and Adam, each rank on its own host, so that units are gathered.

    ``gradients``: their dtypes, as `MixedPrecision` has them.
    """
    precision = MixedPrecision(BF16, **gradients)
    setting = PlanSetting(stage=stage, world_size=ranks, mixed_precision=precision, ranks_per_host=1)
    return MemoryPlan(model).of_largest(setting)


def states(found: RankBytes) -> int:
    """Return the model states, without step counts."""
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
            found = states(held(model, int(ranks), stage, accumulate_dtype=BF16))
            assert as_printed(found) == float(printed), "padding is below the last digit"
            cells += 1
    assert cells == 54


def test_the_bytes_of_a_parameter_in_megatron_core() -> None:
    """Source: Megatron-LM's docs, "Distributed Optimizer", its table of theoretical bytes of a parameter."""
    model = Model("one matrix", (ParameterShape(("weight",), (64, 64)),))
    for ranks in (1, 2, 8, 64):
        assert states(held(model, ranks, 1, reduce_dtype=FP32)) == model.numel * (6 + 12 / ranks)
        assert states(held(model, ranks, 1, accumulate_dtype=BF16)) == model.numel * (4 + 12 / ranks)


def test_the_estimates_of_deepspeed_are_parts_of_a_plan() -> None:
    """Stage 3 is equal. Stage 2 of DeepSpeed keeps a 16-bit copy of the owned gradients, which is scratch memory here.

    Source: DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py (estimate_zero2_model_states_mem_needs) and stage3.py
    (estimate_zero3_model_states_mem_needs), the GPU memory without offload. Its CPU memory is a factor of 1.5 above
    buffers that this library does not have, so it is not compared; nor is stage 1, which DeepSpeed does not estimate.
    """
    layers = tuple(ParameterShape((f"{n}.weight",), (512, 512), n + 1) for n in range(16))
    model = Model("layers", layers, ("the root's rest", *map(str, range(16))))
    largest, total = 512**2, model.numel
    for ranks in (2, 8, 64):
        two, three = (held(model, ranks, stage) for stage in (2, 3))
        assert states(two) + 2 * total // ranks == 2 * total + int(18 * total / ranks)
        assert states(three) + three.gathered_peak == 4 * largest + int(18 * total / ranks)
