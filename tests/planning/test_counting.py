"""What a unit computes, moves and keeps is the closed form of transformers, and what a real forward allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan.rows import from_numbers
from zero.commands.train.model import GPT, PRESETS, loss_fn
from zero.planning.model import Transformer, UnitWork
from zero.planning.models.reference import ReferenceModel, TransformerBlock
from zero.planning.models.shapes import from_config
from zero.planning.models.works import count_module, count_transformer, kept_bytes, recomputed, together

from .configs import PUBLISHED

GPT_BLOCK = Transformer(2, 64, 4, 256, 100, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True)
LLAMA_BLOCK = Transformer(2, 64, 4, 176, 100, 2, gated=True, activation="silu", norm="rms", rotary=True)
EAGER_BLOCK = replace(GPT_BLOCK, attention="eager", activation="relu", norms=1)
STATISTICS = {"layer": 16, "rms": 8}  # bytes a token that two norms keep: float32 mean and deviation, or the latter
MICRO, SEQUENCE = 2, 32


def works(numbers: Transformer, micro: int = MICRO, sequence: int = SEQUENCE, **more: Any) -> tuple[UnitWork, ...]:
    """Return the work of each unit of a transformer."""
    found = count_transformer(from_numbers(numbers, "model"), micro, sequence, **more)
    assert found is not None
    return found


def allocated(run: Any) -> int:
    """Return the bytes that ``run`` leaves allocated on the CPU, by the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    assert kept is not None
    return sum(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("numbers", [GPT_BLOCK, replace(GPT_BLOCK, kv_heads=1, ffn=96), LLAMA_BLOCK])
def test_a_block_keeps_the_bytes_of_the_closed_form(numbers: Transformer) -> None:
    """Of Korthikanti et al. (2022), without dropout and with flash attention: 32 h + 4 a a token for GPT-2."""
    h, f, a, k = numbers.hidden, numbers.ffn, numbers.heads, numbers.kv_heads
    inside = 8 * f if numbers.gated else 4 * f
    a_token = 2 * h + 2 * h + 2 * h * (1 + 2 * k / a) + 2 * h + 4 * a + 2 * h + 2 * h + inside
    block, larger = works(numbers, 1)[1], works(numbers, 3)[1]
    assert (block.saved_bytes + block.input_bytes) / SEQUENCE == a_token + STATISTICS[numbers.norm]
    assert block.input_bytes == 2 * h * SEQUENCE
    for kind in ("saved_bytes", "matmul_flops", "attention_flops"):
        assert getattr(larger, kind) == 3 * getattr(block, kind), kind
    assert larger.kernels == block.kernels


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "falcon-7b", "Phi-3-mini-4k-instruct"])
def test_products_take_two_operations_a_weight_and_token(name: str) -> None:
    model, sequence = from_config(PUBLISHED[name][0], name), 128
    counted, numbers = count_transformer(model, 1, sequence), model.transformer
    assert numbers is not None
    assert counted is not None
    weights = sum(p.numel for p in model.parameters if p.unit == 1 and len(p.shape) == 2)
    assert counted[1].matmul_flops == 2 * weights * sequence
    assert counted[0].matmul_flops == 2 * model.vocabulary * model.hidden * sequence
    assert counted[1].attention_flops == 2 * sequence * sequence * numbers.heads * numbers.head_dim, "the causal half"
    assert count_transformer(replace(model, transformer=None), 1, sequence) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_block_allocates_the_bytes_that_are_counted(dtype: torch.dtype) -> None:
    """Within 1 %: allocations are rounded, and on the CPU statistics of norms have another dtype."""
    for numbers in (GPT_BLOCK, replace(LLAMA_BLOCK, norm="layer"), EAGER_BLOCK):  # the CPU has no fused RMSNorm
        block = TransformerBlock(numbers).to(dtype)
        x = torch.randn(2, 64, numbers.hidden, dtype=dtype, requires_grad=True)
        rotary = torch.randn(2, 64, numbers.head_dim, dtype=dtype) if numbers.rotary else None
        block(x, rotary)  # the first call allocates what stays
        counted = works(numbers, 2, 64, dtype=dtype)[1].saved_bytes + x.numel() * x.element_size()
        assert allocated(lambda block=block, x=x, rotary=rotary: block(x, rotary)) == pytest.approx(counted, rel=0.01)


def test_a_real_model_allocates_the_bytes_that_are_counted() -> None:
    def run(module: nn.Module, device: str) -> Tensor:
        tokens = torch.ones(4, 64, dtype=torch.int64, device=device)
        return loss_fn(module(tokens), tokens)

    with torch.device("meta"):
        described = GPT(PRESETS["tiny"], 64)
    counted = count_module(described, lambda module: run(module, "meta"))
    module = GPT(PRESETS["tiny"], 64)
    run(module, "cpu")
    expected = sum(kept_bytes(work, False) for work in counted) + 8 * 4 * 64
    assert allocated(lambda: run(module, "cpu")) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("numbers", [GPT_BLOCK, replace(GPT_BLOCK, tied=True, positions=16, layers=3)])
def test_a_module_has_the_work_of_its_plain_numbers(numbers: Transformer) -> None:
    def loss_of(module: Any) -> Tensor:
        tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
        x = module.embed(tokens)
        for block in module.blocks:
            x = block(x)
        return module.loss(module.logits(x), tokens)

    with torch.device("meta"):
        module = ReferenceModel(numbers).to(torch.bfloat16)
    counted, described = count_module(module, loss_of), works(numbers, 2, 16)
    assert counted[1:] == described[1:]
    assert counted[0].matmul_flops == described[0].matmul_flops
    assert counted[0].saved_bytes == pytest.approx(described[0].saved_bytes, abs=8 * 16 * (2 + 1))  # integers


def test_equal_units_are_counted_once_and_each_call_of_a_unit_is_work() -> None:
    calls = []

    class Unit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x).relu()

    with torch.device("meta"):
        module, x = nn.Sequential(*(Unit(4, 4) for _ in range(5)), Unit(4, 7)), torch.empty(3, 4, requires_grad=True)
    counted = count_module(module, lambda module: module(x).sum())
    assert len(calls) == 6 + 2, "each in its model, and each kind by itself"
    assert [work.matmul_flops for work in counted] == [0, *[2 * 3 * 4 * 4] * 5, 2 * 3 * 4 * 7]
    twice = count_module(module[:1], lambda module: module(module(x)).sum())
    assert twice[1].matmul_flops == 2 * counted[1].matmul_flops
    (root,) = count_module(module[5], lambda module: module(x).sum())
    assert root.matmul_flops == counted[6].matmul_flops, "a module without units is its root's rest"
    with pytest.raises(ValueError, match="Unit cannot run on the meta device"):
        count_module(module[0], lambda module: module(x).sum() * x.sum().item())


def test_checkpointing_keeps_the_input_of_what_is_recomputed() -> None:
    block = works(GPT_BLOCK)[1]
    kept = {kind: [kept_bytes(block, again) for again in recomputed(3, kind)] for kind in ("none", "selective", "full")}
    least, most = block.input_bytes, block.input_bytes + block.saved_bytes
    assert kept == {"none": [most] * 3, "selective": [least, most, least], "full": [least] * 3}
    with pytest.raises(ValueError, match="checkpoint 'some' is unknown: it is 'none', 'selective' or 'full'"):
        recomputed(5, "some")
    first, second = UnitWork(saved_bytes=3, peak_bytes=10, kernels=1), UnitWork(saved_bytes=4, peak_bytes=5, kernels=2)
    assert together([first, second]) == UnitWork(saved_bytes=7, peak_bytes=3 + 4 + 7, kernels=3)
