"""The memory that papers and other tools state for a rank is that of the library's own formulas."""

from __future__ import annotations

import math

import pytest
import torch

from zero import MixedPrecision
from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes
from zero.core.layout import Dtypes
from zero.core.stage import STAGES
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import PlanSetting

BF16, FP32 = torch.bfloat16, torch.float32
STATES = ("parameters", "gradients", "optimizer")

TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
"""Elements -> ranks -> GB of a rank with P_os, P_os+g and P_os+g+p: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models" (arXiv 1910.02054), Table 1. K = 12, 16-bit gradients."""


def one(numel: float) -> Model:
    return Model("one matrix", (ParameterShape(("weight",), (int(numel),)),))


def states(numel: float, ranks: int, stage: int, dtypes: Dtypes) -> int:
    """Return the bytes of Adam's model states on the last rank by formula, without step counts."""
    layout = build(one(numel).specs(dtypes, with_units=False), ranks, 25 << 20)
    kept = KeptStates(2 * dtypes.itemsize("master_dtype"), dtypes.has_master)
    found = formula_bytes(layout, STAGES[stage], ranks - 1, lambda _: kept)
    return sum(found[kind] for kind in STATES)


def as_printed(nbytes: int) -> float:
    """Return GB as Table 1 prints them: from 100 on without decimals, cut off; else three digits, at most two of them
    decimals, half rounded up."""
    gigabytes = nbytes / 1e9
    if gigabytes >= 100:
        return math.floor(gigabytes)
    decimals = 1 if gigabytes >= 10 else 2
    return math.floor(gigabytes * 10**decimals + 0.5) / 10**decimals


def test_all_54_cells_of_table_1_of_the_zero_paper() -> None:
    cells = 0
    for numel, by_ranks in TABLE_1.items():
        for ranks, row in by_ranks.items():
            for stage, printed in enumerate(row, start=1):
                assert as_printed(states(numel, ranks, stage, Dtypes(BF16, BF16, BF16, FP32))) == printed
                held = MemoryPlan(one(numel)).of_largest(
                    PlanSetting(
                        stage=stage,
                        world_size=ranks,
                        mixed_precision=MixedPrecision(BF16, accumulate_dtype=BF16),
                        ranks_per_host=1,
                    )
                )
                exact = held.parameters + held.gradients + held.optimizer
                assert as_printed(exact) == printed, "padding and step counts are below the last digit"
                cells += 1
    assert cells == 54


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.by_default
def test_the_bytes_of_a_parameter_in_megatron_core(ranks: int) -> None:
    """Source: Megatron-LM's docs, "Distributed Optimizer", its table of theoretical bytes of a parameter."""
    numel = 64 * 64
    fp32_gradients, bf16_gradients = Dtypes(BF16, FP32, FP32, FP32), Dtypes(BF16, BF16, BF16, FP32)
    assert states(numel, ranks, 1, fp32_gradients) == numel * (6 + 12 / ranks)
    assert states(numel, ranks, 1, bf16_gradients) == numel * (4 + 12 / ranks)


def layers(width: int, count: int) -> Model:
    """Return equal layers without anything beside them, each a unit."""
    shapes = (ParameterShape((f"{n}.weight",), (width, width), n + 1) for n in range(count))
    return Model("layers", tuple(shapes), ("the root's rest", *map(str, range(count))))


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.by_default
def test_the_estimates_of_deepspeed_are_parts_of_a_plan(ranks: int) -> None:
    """Stage 3 is equal. Stage 2 of DeepSpeed keeps a 16-bit copy of the owned gradients, which is scratch memory here.

    Source: DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py (estimate_zero2_model_states_mem_needs) and stage3.py
    (estimate_zero3_model_states_mem_needs), the GPU memory without offload. Its CPU memory is a factor of 1.5 above
    buffers that this library does not have, so it is not compared; nor is stage 1, which DeepSpeed does not estimate.
    """
    width, count = 512, 16
    largest, total = width**2, count * width**2
    plan = MemoryPlan(layers(width, count))
    # hosts of one rank each, so that units are gathered
    two, three = (
        PlanSetting(stage=stage, world_size=ranks, mixed_precision=MixedPrecision(BF16), ranks_per_host=1)
        for stage in (2, 3)
    )

    held = plan.of_largest(two)
    zero2 = 2 * total + int(18 * total / ranks)
    assert held.parameters + held.gradients + held.states + held.masters + 2 * total // ranks == zero2

    held = plan.of_largest(three)
    zero3 = 4 * largest + int(18 * total / ranks)
    assert held.parameters + held.gradients + held.states + held.masters + held.gathered_peak == zero3
