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

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import (  # type: ignore[import-not-found, unused-ignore]
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from zero.integrations.transformers import ZeroConfig, ZeroTrainer

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine
PAD, END = 0, 1


def t5() -> Any:
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bart() -> Any:
    config = BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, decoder_start_token_id=END, pad_token_id=PAD, bos_token_id=END,
        eos_token_id=END, forced_eos_token_id=END, init_std=0.4,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def tokenizer() -> Any:
    """Return a tokenizer of numbers, made without a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<pad>": PAD, "</s>": END, **{str(number): number for number in range(2, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def samples(words: Any, count: int, seed: int) -> list[dict[str, Sequence[int]]]:
    """Return texts of unequal lengths, each with its reverse as the target."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(count):
        text = [str(int(word)) for word in torch.randint(2, WORDS, (2 + 3 * number % 7,), generator=generator)]
        one = words(" ".join(text), text_target=" ".join(reversed(text)))
        found.append({name: one[name] for name in ("input_ids", "attention_mask", "labels")})
    return found


def script(trainer_class: Any, build: Any, folder: Path, accumulated: int, **zero: Any) -> list[Any]:
    """Train with evaluations that generate, evaluate with other beams, and predict.

    Return the model's state, the evaluations of the training and after it, the predictions, and all texts in order.
    """
    set_seed(5)
    model, words, texts = build(), tokenizer(), []

    def compute_metrics(found: Any) -> dict[str, float]:
        predicted, labels = (each.clip(min=PAD) for each in (found.predictions, found.label_ids))  # -100 is padding
        texts.append([words.batch_decode(each) for each in (predicted, labels)])
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
    return [state, evaluated, numbers, torch.as_tensor(predicted.predictions), texts]


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):  # type: ignore[misc, unused-ignore]
    pass


RUNS = (  # in the second one ranks gather units from each other, as those of several hosts do
    (bart, ZeroConfig(stage=2)),
    (t5, ZeroConfig(stage=3, collective="pairwise")),
)


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Return what the script returns in each run."""
    return [
        script(ZeroSeq2SeqTrainer, build, folder / f"{number}", 1, zero=zero)
        for number, (build, zero) in enumerate(RUNS)
    ]


def test_evaluations_that_generate_have_the_bits_metrics_and_texts_of_one_process(tmp_path: Path) -> None:
    expected = {build: script(Seq2SeqTrainer, build, tmp_path / build.__name__, 2) for build in (t5, bart)}
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for (build, zero), found in zip(RUNS, results, strict=True):
        assert_same_value(found, expected[build], f"{build.__name__}, {zero}")
    lengths = {len(text.replace("<pad>", "").split()) for texts in expected[t5][-1] for text in texts[0]}
    assert len(lengths) > 1  # else ranks would run as many forwards without a word
