"""TRL's SFTTrainer by the subclass of zero/recipes, on packed texts.

Budget: 60 processor seconds; 52 were measured.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ...support.launched import launch
from ...support.loops import code_of
from ...support.plain import assert_same_value
from ..contract.ecosystem import WORDS, state_of, variables
from .texts import END, LIMIT, PAD, texts, tokenizer

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("trl")

from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

pytestmark = pytest.mark.timeout(500)

STAGES = (2, 3)
BLOCK = "Other trainers"


def llama(tied: bool) -> Any:
    set_seed(5)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=END, eos_token_id=END, pad_token_id=PAD,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


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


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Run the block at each stage."""
    results = []
    for stage in STAGES:
        args = arguments(folder / f"packed-{stage}", 2, save_strategy="no", **PACKED)
        names = variables(started, stage, args=args, dataset=TEXTS, model=llama(stage == 2), tokenizer=tokenizer())
        exec(code_of(BLOCK), names)
        results.append(outcome(names["trainer"], TEXTS))
    return results


def test_packed_texts_have_the_bits_of_trl(tmp_path: Path) -> None:
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for stage, found in zip(STAGES, results, strict=True):
        args = arguments(tmp_path / "packed", 4, save_strategy="no", **PACKED)
        plain = SFTTrainer(model=llama(stage == 2), args=args, train_dataset=TEXTS, processing_class=tokenizer())
        plain.train()
        assert_same_value(found, outcome(plain, TEXTS), f"stage {stage}")
