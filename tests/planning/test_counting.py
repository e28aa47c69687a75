"""What a unit computes is the closed form of transformers, and what it keeps is what a real forward allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan.rows import from_numbers
from zero.planning.hardware import presets
from zero.planning.model import Transformer, UnitWork
from zero.planning.models.shapes import from_config
from zero.planning.models.works import TransformerBlock, count_module, count_transformer, products_in_fp32
from zero.planning.seconds.compute import Compute
from zero.precision import MixedPrecision, Patterns

from ..support.rows import placed
from .configs import PUBLISHED

GPT_BLOCK = Transformer(2, 64, 4, 256, 100, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True)
LLAMA_BLOCK = Transformer(2, 64, 4, 176, 100, 2, gated=True, activation="silu", norm="rms", rotary=True)
EAGER_BLOCK = replace(GPT_BLOCK, attention="eager", activation="relu", norms=1)


def allocated(run: Any) -> int:
    """Return the bytes that ``run`` leaves allocated on the CPU, by the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    assert kept is not None
    return sum(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "falcon-7b", "Phi-3-mini-4k-instruct"])
def test_products_take_two_operations_a_weight_and_token(name: str) -> None:
    model, sequence = from_config(PUBLISHED[name][0], name), 128
    counted, numbers = count_transformer(model, 1, sequence), model.transformer
    assert numbers is not None
    weights = sum(p.numel for p in model.parameters if p.unit == 1 and len(p.shape) == 2)
    assert counted[1].matmul_flops == 2 * weights * sequence
    assert counted[0].matmul_flops == 2 * numbers.vocabulary * numbers.hidden * sequence
    assert counted[1].attention_flops == 2 * sequence * sequence * numbers.heads * numbers.head_dim, "the causal half"


def test_products_in_fp32_are_those_of_the_weights_that_are() -> None:
    model, kept = from_config(PUBLISHED["gpt2"][0], "gpt2"), MixedPrecision(torch.float32)
    rule = Patterns(
        (("*", MixedPrecision(torch.bfloat16)), ("*.0.mlp", kept), ("*wpe", kept), ("*wte", kept), ("lm_head", kept))
    )
    numbers, works = model.transformer, count_transformer(model, 1, 128)
    assert numbers is not None
    found = products_in_fp32(model, works, model.dtypes(rule), 128)
    of_mlp = 2 * 2 * numbers.hidden * numbers.ffn * 128
    assert [work.fp32_flops for work in found[:3]] == [works[0].matmul_flops, of_mlp, 0]
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
        x = torch.ones(4, 8)
    counted = count_module(module, lambda made: made[1](made[0](x).bfloat16()).sum())  # type: ignore[index]
    cluster, work = presets().cluster("h100:8"), UnitWork(matmul_flops=1e12)
    compute, ratio = Compute(cluster, "bfloat16"), cluster.gpu.peak("bfloat16") / cluster.gpu.peak("float32")
    assert compute.forward(replace(work, fp32_flops=1e12)) == pytest.approx(ratio * compute.forward(work))
    assert sum(work.fp32_flops for work in counted) == 2 * 8 * 8 * 4 == sum(work.matmul_flops for work in counted) / 2


@pytest.mark.parametrize("dtype", placed("dtype", [torch.float32, torch.bfloat16], 1))
def test_a_real_block_allocates_the_bytes_that_are_counted(dtype: torch.dtype) -> None:
    """Within 1 %: allocations are rounded, and on the CPU statistics of norms have another dtype."""
    for numbers in (GPT_BLOCK, replace(LLAMA_BLOCK, norm="layer"), EAGER_BLOCK):  # the CPU has no fused RMSNorm
        block = TransformerBlock(numbers).to(dtype)
        x = torch.randn(2, 64, numbers.hidden, dtype=dtype, requires_grad=True)
        rotary = torch.randn(2, 64, numbers.head_dim, dtype=dtype) if numbers.rotary else None
        block(x, rotary)  # the first call allocates what stays
        works = count_transformer(from_numbers(numbers, "model"), 2, 64, dtype)
        counted = works[1].saved_bytes + x.numel() * x.element_size()
        assert allocated(lambda block=block, x=x, rotary=rotary: block(x, rotary)) == pytest.approx(counted, rel=0.01)


class Unit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_units_of_a_module_are_counted_and_each_call_is_work() -> None:
    with torch.device("meta"):
        module, x = nn.Sequential(*(Unit(4, 4) for _ in range(5)), Unit(4, 7)), torch.empty(3, 4, requires_grad=True)
    counted = count_module(module, lambda module: module(x).sum())
    assert [work.matmul_flops for work in counted] == [0, *[2 * 3 * 4 * 4] * 5, 2 * 3 * 4 * 7]
    twice = count_module(module[:1], lambda module: module(module(x)).sum())
    assert twice[1].matmul_flops == 2 * counted[1].matmul_flops
    (root,) = count_module(module[5], lambda module: module(x).sum())
    assert root.matmul_flops == counted[6].matmul_flops, "a module without units is its root's rest"
    with pytest.raises(ValueError, match="Unit cannot run on the meta device"):
        count_module(module[0], lambda module: module(x).sum() * x.sum().item())
