"""TRL's SFTTrainer by the subclass of zero/recipes: packed texts, and the loss of completions under PEFT's adapters.

Budget: 60 processor seconds; 52 were measured.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.launched import launch
from ...support.loops import code_of
from ...support.plain import assert_same_states, assert_same_value
from ..contract.ecosystem import WORDS, state_of, variables

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("trl")

from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
from peft import LoraConfig  # type: ignore[import-not-found, import-untyped, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

from zero.integrations.transformers import ZeroConfig

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine
STAGES = (2, 3)
BLOCK = "Other trainers"
PAD, END = 0, 1
HALF, LAST = "checkpoint-2", "checkpoint-4"


def llama(tied: bool) -> Any:
    set_seed(5)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=END, eos_token_id=END, pad_token_id=PAD,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Return a tokenizer of numbers, made without a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "</s>": END, **{str(number): number for number in range(2, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def texts(count: int, seed: int) -> list[str]:
    """Return texts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(2, WORDS, (2 + 3 * number % 7,), generator=generator).tolist() for number in range(count)]
    return [" ".join(map(str, each)) for each in numbers]


def arguments(folder: Path, accumulated: int, **others: Any) -> Any:
    return SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, num_train_epochs=2,
        gradient_accumulation_steps=accumulated, max_grad_norm=0.0, bf16=False, use_cpu=True, report_to=[],
        disable_tqdm=True, **others,
    )  # fmt: skip


def outcome(trainer: Any, evaluation: Any) -> list[Any]:
    """Return the state of the model and the loss of an evaluation."""
    loss = trainer.evaluate(evaluation)["eval_loss"]
    with trainer.zero_optimizer.gathered() if hasattr(trainer, "zero_optimizer") else nullcontext():
        return [state_of(trainer.model), loss]


PACKED: dict[str, Any] = {"packing": True, "max_length": 16, "learning_rate": 1e-2}
PACKED["gradient_checkpointing_kwargs"] = {"selective": True}
TEXTS = Dataset.from_list([{"text": text} for text in texts(40, 1)])  # 16 packed samples
COMPLETIONS = Dataset.from_list(
    [{"prompt": prompt, "completion": f" {text}"} for prompt, text in zip(texts(16, 1), texts(16, 2), strict=True)]
)


def completions(trainer_class: Any, folder: Path, accumulated: int, resume: Path | None = None, **zero: Any) -> Any:
    """Train adapters with the loss of completions, from a checkpoint if there is one."""
    learned = {"completion_only_loss": True, "loss_type": "dft", "learning_rate": 0.1}
    learned |= {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = trainer_class(
        model=llama(tied=True), args=arguments(folder, accumulated, **learned), train_dataset=COMPLETIONS,
        eval_dataset=COMPLETIONS, processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), **zero,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume and str(resume))
    measured = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    return [*outcome(trainer, COMPLETIONS), measured]


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Run the block at each stage. With its class train adapters at the other one, also from Trainer's checkpoint."""
    results = []
    for stage in STAGES:
        args = arguments(folder / f"packed-{stage}", 2, save_strategy="no", **PACKED)
        names = variables(started, stage, args=args, dataset=TEXTS, model=llama(stage == 2), tokenizer=tokenizer())
        exec(code_of(BLOCK), names)
        results.append(outcome(names["trainer"], TEXTS))
    zero = ZeroConfig(stage=3)
    results.append(completions(names["ZeroSFTTrainer"], folder / "3", 2, zero=zero))
    results.append(completions(names["ZeroSFTTrainer"], folder / "resumed", 2, folder / "plain" / HALF, zero=zero))
    return results


def test_packed_texts_and_completions_have_the_bits_of_trl_and_go_on_from_its_checkpoints(tmp_path: Path) -> None:
    expected = [completions(SFTTrainer, tmp_path / "plain", 4)] * 2
    for stage in reversed(STAGES):
        args = arguments(tmp_path / "packed", 4, save_strategy="no", **PACKED)
        plain = SFTTrainer(model=llama(stage == 2), args=args, train_dataset=TEXTS, processing_class=tokenizer())
        plain.train()
        expected.insert(0, outcome(plain, TEXTS))
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for number, (found, plain_one) in enumerate(zip(results, expected, strict=True)):
        assert_same_value(found, plain_one, f"run {number}")
    states = [torch.load(tmp_path / which / LAST / "optimizer.pt") for which in ("3", "plain")]
    assert_same_states(*states)
    back = completions(SFTTrainer, tmp_path / "back", 4, tmp_path / "3" / HALF)
    assert_same_value(back, expected[-1], "back in one process")
