"""What a unit computes, moves and keeps: the closed forms of transformers, and what a real forward allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan.rows import from_numbers
from zero.commands.train.model import GPT, PRESETS, loss_fn
from zero.planning.model import Model, Transformer, UnitWork
from zero.planning.models.counting import count
from zero.planning.models.reference import ReferenceModel, TransformerBlock
from zero.planning.models.shapes import from_config, model_of
from zero.planning.models.works import count_module, count_transformer, kept_bytes, recomputed, together

from .configs import LLAMA_3_8B, PUBLISHED, llama, of_numbers

STATISTICS = {"layer": 16, "rms": 8}  # bytes a token that two norms keep: float32 mean and deviation, or the latter
GPT_BLOCK = Transformer(2, 64, 4, 256, 100, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True)
LLAMA_BLOCK = Transformer(2, 64, 4, 176, 100, 2, gated=True, activation="silu", norm="rms", rotary=True)


def works(model: Model, micro: int, sequence: int, dtype: torch.dtype = torch.bfloat16) -> tuple[UnitWork, ...]:
    """Return the work of each unit of a model that says what it computes."""
    found = count_transformer(model, micro, sequence, dtype)
    assert found is not None
    assert len(found) == len(model.units)
    return found


def saved_a_token(numbers: Transformer) -> float:
    """Return the bytes a token that a block keeps in 16 bits, its input included.

    Norm's input and output, queries, keys and values, attention's output and its float32 a row and head, second norm's
    input and output, and what is inside the feed-forward network (Korthikanti et al. 2022, section 4.1, without
    dropout and with flash attention).
    """
    h, f, a, k = numbers.hidden, numbers.ffn, numbers.heads, numbers.kv_heads
    inside = 8 * f if numbers.gated else 4 * f
    return 2 * h + 2 * h + 2 * h * (1 + 2 * k / a) + 2 * h + 4 * a + 2 * h + 2 * h + inside


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [GPT_BLOCK, replace(GPT_BLOCK, kv_heads=1, ffn=96), LLAMA_BLOCK])
@pytest.mark.parametrize(("micro", "sequence"), [(1, 32), (3, 8)])
@pytest.mark.by_default
def test_a_block_keeps_the_bytes_of_the_closed_form(numbers: Transformer, micro: int, sequence: int) -> None:
    block = works(from_numbers(numbers, "model"), micro, sequence)[1]
    kept = (block.saved_bytes + block.input_bytes) / (micro * sequence)
    assert kept == saved_a_token(numbers) + STATISTICS[numbers.norm]
    assert block.input_bytes == 2 * numbers.hidden * micro * sequence


def test_a_gpt_block_keeps_32_bytes_a_token_and_feature() -> None:
    assert saved_a_token(GPT_BLOCK) == 32 * GPT_BLOCK.hidden + 4 * GPT_BLOCK.heads


def test_rectified_units_keep_their_output_alone() -> None:
    gelu, relu = (works(from_numbers(replace(GPT_BLOCK, activation=a), a), 1, 8)[1] for a in ("gelu", "relu"))
    assert gelu.saved_bytes - relu.saved_bytes == 2 * GPT_BLOCK.ffn * 8


def test_eager_attention_keeps_its_scores() -> None:
    """In float32 for the softmax and in 16 bits for the product: 6 bytes for each head and pair of tokens."""
    micro, sequence = 2, 32
    eager, flash = (
        works(from_numbers(replace(GPT_BLOCK, attention=a), a), micro, sequence)[1] for a in ("eager", "flash")
    )
    scores = GPT_BLOCK.heads * micro * sequence**2
    rows = 4 * GPT_BLOCK.heads * micro * sequence
    assert eager.saved_bytes - flash.saved_bytes == pytest.approx(6 * scores - rows, abs=scores)  # a mask of 1 byte
    assert eager.attention_flops == 2 * flash.attention_flops, "it computes the half that is masked, too"
    assert eager.matmul_flops == flash.matmul_flops


def test_the_loss_holds_14_bytes_a_token_and_word_at_its_worst_moment() -> None:
    """Logits in 16 bits, log-probabilities and two gradients in float32; before the backward 4 of them are saved."""
    micro, sequence, model = 2, 64, of_numbers(1, 32, 2, 5000, gated=True, tied=False)
    root, tokens = works(model, micro, sequence)[0], micro * sequence
    table = 2 * sequence * 16 * 2  # of rotary angles, in 16 bits
    few = 4 * tokens + 16  # a norm's statistics, and scalars
    normed = 2 * 32 * tokens
    assert root.saved_bytes == pytest.approx(4 * 5000 * tokens + normed + table, abs=few)
    assert root.peak_bytes == pytest.approx(14 * 5000 * tokens + normed + table, abs=few)


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "Qwen3-8B", "falcon-7b", "Phi-3-mini-4k-instruct", "mpt-7b"])
@pytest.mark.by_default
def test_products_take_two_operations_a_weight_and_token(name: str) -> None:
    model, sequence = from_config(PUBLISHED[name][0], name), 128
    counted, numbers = works(model, 1, sequence), model.transformer
    assert numbers is not None
    weights = sum(p.numel for p in model.parameters if p.unit == 1 and len(p.shape) == 2)
    assert counted[1].matmul_flops == 2 * weights * sequence
    assert counted[0].matmul_flops == 2 * model.vocabulary * model.hidden * sequence
    causal_half = 2 * sequence * sequence * numbers.heads * numbers.head_dim
    assert counted[1].attention_flops == causal_half


def test_element_wise_operations_move_what_they_read_and_write() -> None:
    x = torch.empty(4, 8, device="meta", requires_grad=True)

    def run() -> Tensor:
        y = x.view(8, 4).t()  # views move nothing
        return (y * 2.0 + torch.empty(8, device="meta")).relu()

    work = count(run, [x])
    assert (work.kernels, work.matmul_flops) == (3, 0)
    assert work.moved_bytes == 4 * (2 * 32 + (2 * 32 + 8) + 2 * 32)


def test_an_embedding_reads_the_rows_that_it_needs() -> None:
    weight = torch.empty(1000, 4, device="meta", requires_grad=True)
    words = torch.empty(3, dtype=torch.int64, device="meta")
    work = count(lambda: nn.functional.embedding(words, weight), [words], [weight])
    assert work.moved_bytes == 3 * 8 + 2 * 3 * 4 * 4


@pytest.mark.parametrize("numbers", [GPT_BLOCK, LLAMA_BLOCK], ids=["gpt", "llama"])
def test_work_of_a_block_grows_with_the_micro_batch_alone(numbers: Transformer) -> None:
    one, three = (works(from_numbers(numbers, "model"), micro, 16)[1] for micro in (1, 3))
    assert 3 * one.matmul_flops == three.matmul_flops
    assert 3 * one.attention_flops == three.attention_flops
    assert 3 * one.saved_bytes == three.saved_bytes
    assert one.kernels == three.kernels


# -- real forwards -----------------------------------------------------------------------------------------------------


def allocated(run: Any) -> int:
    """Return the bytes that ``run`` leaves allocated on the CPU, by the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    assert kept is not None
    return sum(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "numbers",
    [
        GPT_BLOCK,
        replace(LLAMA_BLOCK, norm="layer"),  # the CPU has no fused RMSNorm
        replace(GPT_BLOCK, attention="eager", activation="relu", norms=1),
    ],
    ids=["gpt", "llama", "eager"],
)
@pytest.mark.by_default
def test_a_real_block_allocates_the_bytes_that_are_counted(numbers: Transformer, dtype: torch.dtype) -> None:
    """Within 1 %: allocations are rounded, and on the CPU statistics of norms have another dtype."""
    block = TransformerBlock(numbers).to(dtype)
    x = torch.randn(2, 64, numbers.hidden, dtype=dtype, requires_grad=True)
    rotary = torch.randn(2, 64, numbers.head_dim, dtype=dtype) if numbers.rotary else None
    block(x, rotary)  # the first call allocates what stays
    work = works(from_numbers(numbers, "model"), 2, 64, dtype)[1]
    output = x.numel() * x.element_size()
    assert allocated(lambda: block(x, rotary)) == pytest.approx(work.saved_bytes + output, rel=0.01)


@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.by_default
def test_a_real_model_allocates_the_bytes_that_are_counted(preset: str) -> None:
    micro, sequence = 4, 64

    def run(module: nn.Module, device: str) -> Tensor:
        tokens = torch.ones(micro, sequence, dtype=torch.int64, device=device)
        return loss_fn(module(tokens), tokens)

    with torch.device("meta"):
        described = GPT(PRESETS[preset], sequence)
    counted = count_module(described, lambda module: run(module, "meta"))
    module = GPT(PRESETS[preset], sequence)
    run(module, "cpu")
    tokens = 8 * micro * sequence
    found = allocated(lambda: run(module, "cpu"))
    assert found == pytest.approx(sum(kept_bytes(work, False) for work in counted) + tokens, rel=0.01)


# -- modules -----------------------------------------------------------------------------------------------------------


def loss_of(module: Any, micro: int = 2, sequence: int = 16) -> Tensor:
    """Return the loss of a reference network on the meta device."""
    tokens = torch.empty(micro, sequence, dtype=torch.int64, device="meta")
    x = module.embed(tokens)
    for block in module.blocks:
        x = block(x)
    return module.loss(module.logits(x), tokens)


@pytest.mark.parametrize("numbers", [GPT_BLOCK, replace(GPT_BLOCK, tied=True, positions=16, layers=3)])
@pytest.mark.by_default
def test_a_module_has_the_work_of_its_plain_numbers(numbers: Transformer) -> None:
    with torch.device("meta"):
        module = ReferenceModel(numbers).to(torch.bfloat16)
    model = from_numbers(numbers, "model")
    assert model.units == model_of(module, "module").units
    counted, described = count_module(module, loss_of), works(model, 2, 16)
    assert counted[1:] == described[1:]
    assert counted[0].matmul_flops == described[0].matmul_flops
    assert counted[0].saved_bytes == pytest.approx(described[0].saved_bytes, abs=8 * 16 * (2 + 1))  # integers


def test_equal_units_are_counted_once_and_called_once() -> None:
    calls = []

    class Unit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x).relu()

    with torch.device("meta"):
        module = nn.Sequential(*(Unit(4, 4) for _ in range(5)), Unit(4, 7))
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    counted = count_module(module, lambda module: module(x).sum())
    assert len(calls) == 6 + 2, "each in its model, and each kind by itself"
    assert [work.matmul_flops for work in counted] == [0, *[2 * 3 * 4 * 4] * 5, 2 * 3 * 4 * 7]
    assert counted[1] == counted[5]


def test_a_module_without_units_is_counted_as_the_root() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 5)
    (root,) = count_module(module, lambda module: module(torch.empty(3, 4, device="meta")).sum())
    assert (root.matmul_flops, root.kernels) == (2 * 3 * 4 * 5, 2)


def test_a_unit_that_is_called_twice_does_the_work_of_both() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"units": nn.ModuleList([nn.Linear(4, 4)])})

    def run(module: Any) -> Tensor:
        unit = module["units"][0]
        return torch.as_tensor(unit(unit(torch.empty(3, 4, device="meta"))).sum())

    assert count_module(module, run)[1].matmul_flops == 2 * 2 * 3 * 4 * 4


def test_a_module_that_needs_values_is_named() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum().item()

    with torch.device("meta"):
        module = Reads(2, 2)
    with pytest.raises(ValueError, match="Reads cannot run on the meta device"):
        count_module(module, lambda module: module(torch.empty(3, 2, device="meta")).sum())


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_checkpointing_keeps_the_input_of_what_is_recomputed() -> None:
    model = of_numbers(5, 64, 4, 100)
    blocks = works(model, 1, 16)[1:]
    kept = {
        kind: sum(kept_bytes(work, again) for work, again in zip(blocks, recomputed(5, kind), strict=True))
        for kind in ("none", "selective", "full")
    }
    inputs = blocks[0].input_bytes
    assert inputs == 2 * 64 * 16
    assert kept["full"] == 5 * inputs
    assert kept["selective"] == 5 * inputs + 2 * blocks[0].saved_bytes
    assert kept["none"] == 5 * (inputs + blocks[0].saved_bytes)
    with pytest.raises(ValueError, match="checkpoint 'some' is unknown: it is 'none', 'selective' or 'full'"):
        recomputed(5, "some")


def test_parts_that_follow_each_other_hold_what_the_others_saved() -> None:
    first, second = UnitWork(saved_bytes=3, peak_bytes=10, kernels=1), UnitWork(saved_bytes=4, peak_bytes=5, kernels=2)
    assert together([first, second]) == UnitWork(saved_bytes=7, peak_bytes=3 + 4 + 7, kernels=3)


def test_the_work_of_a_list_of_parameters_is_not_known() -> None:
    model = from_config(LLAMA_3_8B, "model")
    assert count_transformer(replace(model, transformer=None), 1, 8) is None


# -- speed -------------------------------------------------------------------------------------------------------------


def test_equal_blocks_of_the_largest_models_are_counted_once() -> None:
    model = from_config(llama("llama", 126, 16384, 128, 8, 53248, 128256), "Llama-3.1-405B")
    assert model.numel == 405_853_388_800
    counted = works(model, 1, 8192)
    assert counted[126].matmul_flops > 5e13
    assert all(work is counted[1] for work in counted[1:])
