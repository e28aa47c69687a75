"""Seq2SeqTrainer whose evaluations generate, with beams, unequal lengths and a number of samples that does not divide.

Budget: 60 processor seconds; 47 were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.launched import launch
from ...support.plain import assert_same_value
from ..contract.ecosystem import WORDS, state_of
from .texts import END, LIMIT, PAD, texts, tokenizer

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import (  # type: ignore[import-not-found, unused-ignore]
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from zero.integrations.transformers import ZeroConfig, ZeroTrainer

pytestmark = pytest.mark.timeout(500)


def t5() -> Any:
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def samples(words: Any, count: int, seed: int) -> list[dict[str, Sequence[int]]]:
    """Return texts of unequal lengths, each with its reverse as the target."""
    found = []
    for text in texts(count, seed):
        one = words(text, text_target=" ".join(reversed(text.split())))
        found.append({name: one[name] for name in ("input_ids", "attention_mask", "labels")})
    return found


def script(trainer_class: Any, folder: Path, accumulated: int, **zero: Any) -> list[Any]:
    """Train with evaluations that generate, evaluate with other beams, and predict.

    Return the model's state, the evaluations of the training and after it, the predictions, and all texts in order.
    """
    set_seed(5)
    model, words, decoded = t5(), tokenizer(ends=True), []

    def compute_metrics(found: Any) -> dict[str, float]:
        predicted, labels = (each.clip(min=PAD) for each in (found.predictions, found.label_ids))  # -100 is padding
        decoded.append([words.batch_decode(each) for each in (predicted, labels)])
        width = min(predicted.shape[1] - 1, labels.shape[1])
        return {"right": float((predicted[:, 1 : 1 + width] == labels[:, :width]).mean())}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulated, num_train_epochs=2, learning_rate=1e-2, max_grad_norm=0.0,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="right",
        predict_with_generate=True, generation_max_length=14, label_smoothing_factor=0.1, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=samples(words, 16, 1), eval_dataset=samples(words, 8, 2),
        processing_class=words, data_collator=DataCollatorForSeq2Seq(words, model, pad_to_multiple_of=4),
        compute_metrics=compute_metrics, **zero,
    )  # fmt: skip
    trainer.train()
    evaluated = [{name: each[name] for name in ("eval_loss", "eval_right")} for each in trainer.state.log_history[:-1]]
    beams = trainer.evaluate(num_beams=3, max_length=9)
    short = trainer.evaluate(samples(words, 7, 3), max_new_tokens=6)  # one rank's last batch repeats a sample
    predicted = trainer.predict(samples(words, 5, 4), num_beams=2)
    with trainer.zero_optimizer.gathered() if zero else nullcontext():
        state = state_of(model)
    numbers = [beams["eval_loss"], beams["eval_right"], short["eval_right"], predicted.metrics["test_right"]]
    return [state, evaluated, numbers, torch.as_tensor(predicted.predictions), decoded]


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):  # type: ignore[misc, unused-ignore]
    pass


RUNS = (ZeroConfig(stage=2), ZeroConfig(stage=3, collective="pairwise"))
"""In the second one ranks gather units from each other, as those of several hosts do."""


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Return what the script returns in each run."""
    return [script(ZeroSeq2SeqTrainer, folder / f"{number}", 1, zero=zero) for number, zero in enumerate(RUNS)]


def test_evaluations_that_generate_have_the_bits_metrics_and_texts_of_one_process(tmp_path: Path) -> None:
    expected = script(Seq2SeqTrainer, tmp_path / "plain", 2)
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for zero, found in zip(RUNS, results, strict=True):
        assert_same_value(found, expected, f"{zero}")
    lengths = {len(text.replace("<pad>", "").split()) for texts in expected[-1] for text in texts[0]}
    assert len(lengths) > 1  # else ranks would run as many forwards without a word
