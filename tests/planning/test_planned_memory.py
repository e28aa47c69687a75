"""What is planned is what ranks hold and send, to the byte, and what the paper of ZeRO states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zero import MixedPrecision, Offload, StochasticRounding, ZeroOptimizer
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.models.shapes import model_of
from zero.planning.setting import OptimizerStates, PlanSetting, Quantized
from zero.runtime.offload import Staging

from ..support.pairs import Row, pair_rows
from ..support.rows import placed
from .compared import compare_with_plan

BF16, KEPT = MixedPrecision(torch.bfloat16), MixedPrecision(torch.float32, output_dtype=torch.bfloat16)
BY_MODULE: tuple[dict[str, MixedPrecision], ...] = (
    {"*": BF16, "parts.1": KEPT, "parts.2": MixedPrecision(torch.float16, output_dtype=torch.bfloat16)},
    {"*": BF16, "1": KEPT},
)
"""Patterns for models with parts, and for a sequence."""
CAPS = {"frozen": 0.003, "tied": 0.006, "aligned": 25.0}
"""Models by name, with the MiB of their buckets."""

ON_HOST, STEPPED_THERE = Offload("cpu", parameters="cpu"), Offload("cpu", parameters="cpu", step="cpu")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": ("frozen", "tied", "aligned"),
    "stage": (0, 1, 2, 3),
    "world_size": (1, 3, 8),
    "sharding_factor": (None, 1, 2, 4),
    "reshard_after_forward": (True, False, 2, 4),
    "prefetch_depth": (1, 0, 2),
    "offload": (None, Offload(".")),
    "mixed_precision": (None, BF16, "by module"),
    "optimizer": ("adamw", "momentum", "adagrad", "muon"),
    "rounding": (None, StochasticRounding(0)),
}
ON_ACCELERATORS: dict[str, tuple[Any, ...]] = {
    **SETTINGS,
    "device": ("cuda",),
    "stage": (3,),
    "world_size": (3, 1, 4, 2),
    "reshard_after_forward": (True, False, 2),
    "offload": (ON_HOST, None, STEPPED_THERE),
    "mixed_precision": (BF16, None),
    "rounding": (None,),
}


def setting_of(row: Row) -> PlanSetting:
    """Return the setting of a row, which has a model and arguments of `PlanSetting`."""
    given = {"bucket_cap_mb": CAPS[row["model"]], **{name: value for name, value in row.items() if name != "model"}}
    if given["mixed_precision"] == "by module":
        given["mixed_precision"] = BY_MODULE[row["model"] == "aligned"]
    return PlanSetting(**given, threads=True)


def there_is(row: Row) -> bool:
    """Return whether the library takes the setting of a row, and an accelerator makes a difference: where 16 bits are
    gathered, or parameters are on the host. At stage 0 nothing is offloaded."""
    try:
        setting_of(row)
    except ValueError:
        return False
    rounds = row["rounding"] is None or row["mixed_precision"] == BF16  # of patterns some ask for fp16
    gathers = row["world_size"] > 1 != row["sharding_factor"] and row["mixed_precision"]
    makes_a_difference = "device" not in row or row["offload"] or gathers
    return rounds and bool(makes_a_difference and (row["stage"] or not row["offload"]))


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize(
    "row",
    placed("row", pair_rows(SETTINGS, there_is), 0, 6, 8, 11)
    + placed("accelerator", pair_rows(ON_ACCELERATORS, there_is), 0, 1, 2, 3, 5, 9),
)
def test_a_rank_holds_and_sends_what_is_planned(row: Row, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    setting = setting_of(row)
    if setting.device == "cuda":
        request.getfixturevalue("accelerated")
    if setting.offloads_parameters:
        request.getfixturevalue("copied_from_the_host")
    plan = compare_with_plan(row["model"], setting, tmp_path)
    largest, ranks = plan.of_largest(setting), [plan.of_rank(setting, rank) for rank in range(setting.world_size)]
    if setting.optimizer != "muon" and setting.device == "cpu":  # else unused parameters may be the first rank's
        for kind in ("parameters", "gradients", "states", "masters"):
            assert max(getattr(rank, kind) for rank in ranks) <= getattr(largest, kind), (row, kind)
    for here in ranks if setting.offloads_parameters else ():
        assert here.resident == (0 if setting.steps_on_host else here.scalars)
        assert (here.staged_peak == 0) is setting.steps_on_host
        assert here.offloaded >= here.parameters + here.gradients + here.states + here.masters


@pytest.mark.usefixtures("accelerated", "copied_from_the_host")
def test_a_step_has_copies_of_three_buckets_and_one_gradient_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    live: dict[Staging, int] = {}
    peak = 0
    fetch, free = Staging.fetch, Staging.let_go

    def fetched(self: Staging, kept: Any) -> None:
        nonlocal peak
        fetch(self, kept)
        live[self] = sum(tensor.nbytes for tensor in self.tensors.values())
        peak = max(peak, sum(live.values()))

    def freed(self: Staging) -> None:
        free(self)
        live.pop(self, None)

    monkeypatch.setattr(Staging, "fetch", fetched)
    monkeypatch.setattr(Staging, "let_go", freed)
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    setting = PlanSetting(stage=3, mixed_precision=BF16, offload=ON_HOST, bucket_cap_mb=0.002)
    optimizer = ZeroOptimizer(module, torch.optim.AdamW, lr=1e-3, **setting.arguments())
    for _ in range(2):
        module(torch.ones(2, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, numel = MemoryPlan(model_of(module, "equal")).of_rank(setting, 0), 32 * 32
    assert peak + 4 * numel == found.staged_peak
    assert found.gathered_peak == 2 * (2 + 2) * numel + 4 * numel, "two units, their shards, and one before its cast"
    optimizer.close()


def test_a_state_in_8_bits_has_a_quarter_of_the_bytes_with_scales_and_a_table() -> None:
    of_8_bits = Quantized(8, 256, 1024)
    assert of_8_bits.nbytes(4096) == 4096 + 16 * 4 + 1024
    assert Quantized(4, 128, 64).nbytes(4096) == 2048 + 32 * 4 + 64
    sizes = (4095, 4096, 4097, 8192, 8192 + 256, 8192 + 128)
    assert [of_8_bits.fits(numel) for numel in sizes] == [False, True, False, True, True, False]
    assert [of_8_bits.is_cut(numel) for numel in sizes] == [False, False, False, True, True, False]
    assert OptimizerStates(2, quantized=of_8_bits).moved == 2 * 65 / 256


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
    precision = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    found = MemoryPlan(model).of_largest(PlanSetting(stage=stage, world_size=ranks, mixed_precision=precision))
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
