"""The equations of compute: cases by hand, and faster hardware is never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.core.layout import Dtypes
from zero.planning.hardware import presets
from zero.planning.model import UnitWork
from zero.planning.seconds.compute import CONSTANTS, Compute, PassSeconds, update_bytes, values

BF16, FP32 = torch.bfloat16, torch.float32


def test_a_block_by_hand() -> None:
    """241 features are half of the share of a large product, so 1e15 operations take 1e15/(989e12 x 0.669/2)."""
    shares = {"matmul.hopper": 0.669, "attention.hopper": 0.177, "elementwise": 0.5}
    compute = Compute(presets().gpu("h100"), "bfloat16", values(hidden=241, **shares))
    work = UnitWork(matmul_flops=1e15, attention_flops=1e14, moved_bytes=1e12, kernels=10)
    product, attended = 1e15 / (989e12 * 0.669 / 2), 1e14 / (989e12 * 0.177)
    moved = 1e12 / (3.35e12 * 0.5)
    half = UnitWork(matmul_flops=5e14, attention_flops=5e13, moved_bytes=5e11, kernels=5)
    passes = compute.passes(work, hidden=241, repeated=half)
    assert passes.forward == pytest.approx(product + attended + moved)
    assert passes.backward == pytest.approx(2 * product + 2.5 * attended + 2 * moved)
    assert passes.recompute == pytest.approx(passes.forward / 2)
    assert passes.host == pytest.approx(0.12e-3 + 10 * 5e-6)
    assert passes.host_backward == pytest.approx(0.12e-3 + 25 * 5e-6)
    assert compute.passes(UnitWork()) == PassSeconds(0, 0, 0, 0.12e-3, 0.12e-3)


def test_an_update_reads_and_writes_what_its_precision_needs() -> None:
    assert update_bytes(Dtypes.all(FP32), 2) == 28
    assert update_bytes(Dtypes.all(BF16), 2) == 14
    assert update_bytes(Dtypes(BF16, BF16, FP32, FP32), 2) == 30
    assert update_bytes(Dtypes(BF16, BF16, BF16, FP32), 2) == 28
    assert update_bytes(Dtypes.all(FP32), 0) == 12
    compute = Compute(presets().gpu("a100-80"), "bfloat16")
    assert compute.update(2.04e12, Dtypes.all(FP32), 2) == pytest.approx(28)


def test_measured_shares_come_before_those_of_the_family() -> None:
    gpu = replace(presets().gpu("h100"), efficiency={"matmul": 0.5, "memory": 0.25})
    work = UnitWork(matmul_flops=1e15, moved_bytes=1e12)
    expected = 1e15 / (989e12 * 0.5) + 1e12 / (3.35e12 / 4)
    assert Compute(gpu, "bfloat16").forward(work) == pytest.approx(expected)


def test_constants_can_be_changed_by_name_alone() -> None:
    assert values(hidden=3.0) == {name: constant.value for name, constant in CONSTANTS.items()} | {"hidden": 3.0}


def test_an_unknown_family_is_an_error_with_a_remedy() -> None:
    gpu = replace(presets().gpu("h100"), family="vega")
    with pytest.raises(ValueError, match=r"unknown family 'vega': use one of ada, .*or write .efficiency. into"):
        Compute(gpu, "bfloat16")


@given(
    flops=st.floats(0, 1e18),
    attention=st.floats(0, 1e18),
    moved=st.floats(0, 1e13),
    hidden=st.sampled_from([0, 64, 4096]),
    factor=st.floats(1, 100),
    quicker=st.sampled_from(["flops", "memory_bandwidth"]),
)
def test_a_faster_gpu_is_never_slower(
    flops: float, attention: float, moved: float, hidden: int, factor: float, quicker: str
) -> None:
    gpu, work = presets().gpu("a100-40"), UnitWork(flops, attention, moved)
    if quicker == "flops":
        fast = replace(gpu, flops={dtype: peak * factor for dtype, peak in gpu.flops.items()})
    else:
        fast = replace(gpu, memory_bandwidth=gpu.memory_bandwidth * factor)
    before, after = Compute(gpu, "bfloat16"), Compute(fast, "bfloat16")
    assert after.forward(work, hidden) <= before.forward(work, hidden) * (1 + 1e-12)
    assert after.backward(work, hidden) <= before.backward(work, hidden) * (1 + 1e-12)
