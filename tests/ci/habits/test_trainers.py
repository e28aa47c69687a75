"""Subclasses of transformers' Trainer: two adapters of PEFT, evaluations that generate, and TRL on packed texts.

Two processes run all of it, and one process the same scripts with the classes of the libraries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import code_of
from ...support.plain import assert_same_states, assert_same_value
from ..contract.ecosystem import DATASET, WORDS, llama, state_of, training_arguments, variables

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("trl")

from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found, import-untyped, unused-ignore]
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    set_seed,
)
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

from zero.integrations.transformers import ZeroConfig, ZeroTrainer

pytestmark = pytest.mark.timeout(500)

PAD, END = 0, 1
EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "per_device_eval_batch_size": 2}
SHORT: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2,
    "max_grad_norm": 0.0, "use_cpu": True, "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def whole(trainer: Any) -> Any:
    """Return a context in which the parameters of a trainer are whole."""
    return trainer.zero_optimizer.gathered() if hasattr(trainer, "zero_optimizer") else nullcontext()


def tokenizer(*, ends: bool = False) -> Any:
    """Return a tokenizer of numbers. ``ends``: each text has an end."""
    words = {"<pad>": PAD, "</s>": END, **{str(number): number for number in range(2, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def texts(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(2, WORDS, (2 + 3 * number % 7,), generator=generator).tolist() for number in range(count)]
    return [" ".join(map(str, each)) for each in numbers]


def adapters(trainer_class: Any, folder: Path, accumulated: int, **zero: Any) -> list[Any]:
    """Train one adapter, add another one, train that, and go on from the checkpoint of its first epoch.

    Return the metrics of the evaluations, the logits of the second adapter, without adapters, and of the first, and the
    weights of the base with the first one merged, also when both are read from their files.
    """
    set_seed(5)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    base: Any = llama()
    model, metrics = get_peft_model(base, config), []

    def compute_metrics(found: Any) -> dict[str, float]:
        return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    def evaluate() -> None:
        found = trainer.evaluate()
        metrics.append((found["eval_loss"], found["eval_right"]))

    def trainer_of(name: str, **more: Any) -> Any:
        changes = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.0, **EPOCH, **more}
        arguments = training_arguments(folder / name, **changes)
        given = {"train_dataset": DATASET, "eval_dataset": DATASET[:8], "compute_metrics": compute_metrics, **zero}
        return trainer_class(model=model, args=arguments, **given)

    trainer = trainer_of("default", load_best_model_at_end=True, learning_rate=0.3)
    trainer.train()
    evaluate()
    trainer.save_model(str(folder / "first"))
    second = LoraConfig(r=3, target_modules=["down_proj", "q_proj"], modules_to_save=["lm_head"])
    with whole(trainer):  # it copies the head, which stage 3 shards
        model.add_adapter("poet", second)
    model.set_adapter("poet")
    for resume in (None, str(folder / "poet" / "checkpoint-2")):
        trainer = trainer_of("poet")
        trainer.train(resume_from_checkpoint=resume)
        evaluate()
        trainer.save_model(str(folder / f"both-{resume is not None}"))
    logits = [trainer.predict(DATASET[:4]).predictions]
    with model.disable_adapter():
        logits += [trainer.predict(DATASET[:4]).predictions]
    model.set_adapter("default")
    logits += [trainer.predict(DATASET[:4]).predictions]
    if zero:
        trainer.zero_optimizer.close()  # to merge is to change the base
    set_seed(5)
    reread = PeftModel.from_pretrained(llama(), str(folder / "both-True"))
    merged = [state_of(each.merge_and_unload()) for each in (model, reread)]
    return [metrics, [torch.as_tensor(each) for each in logits], merged]


def files(folder: Path) -> set[str]:
    names = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt")
    return {str(path.relative_to(folder)) for name in names for path in folder.rglob(name)}


def assert_same_file(mine: Path, other: Path) -> None:
    from safetensors.torch import load_file

    if mine.suffix == ".json":
        configs = [json.loads(path.read_text()) for path in (mine, other)]
        for config in configs:
            config["target_modules"].sort()  # a set
        assert configs[0] == configs[1]
    elif mine.suffix == ".pt":
        assert_same_states(torch.load(mine, weights_only=True), torch.load(other, weights_only=True))
    else:
        assert_same_dict(load_file(mine), load_file(other))


def samples(words: Any, count: int, seed: int) -> list[dict[str, Sequence[int]]]:
    """Return texts of unequal lengths, each with its reverse as the target."""
    found = [words(text, text_target=" ".join(reversed(text.split()))) for text in texts(count, seed)]
    return [{name: one[name] for name in ("input_ids", "attention_mask", "labels")} for one in found]


def generating(trainer_class: Any, folder: Path, accumulated: int, **zero: Any) -> list[Any]:
    """Train with evaluations that generate, evaluate with other beams, and predict.

    Return the model's state, the evaluations of the training and after it, the predictions, and all texts in order.
    """
    set_seed(5)
    words, decoded = tokenizer(ends=True), []
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
        )
    )  # fmt: skip

    def compute_metrics(found: Any) -> dict[str, float]:
        predicted, labels = (each.clip(min=PAD) for each in (found.predictions, found.label_ids))  # -100 is padding
        decoded.append([words.batch_decode(each) for each in (predicted, labels)])
        width = min(predicted.shape[1] - 1, labels.shape[1])
        return {"right": float((predicted[:, 1 : 1 + width] == labels[:, :width]).mean())}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), gradient_accumulation_steps=accumulated, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="right", predict_with_generate=True,
        generation_max_length=14, label_smoothing_factor=0.1, logging_strategy="no", **SHORT,
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
    with whole(trainer):
        state = state_of(model)
    numbers = [beams["eval_loss"], beams["eval_right"], short["eval_right"], predicted.metrics["test_right"]]
    return [state, evaluated, numbers, torch.as_tensor(predicted.predictions), decoded]


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):  # type: ignore[misc, unused-ignore]
    pass


BLOCK = "Other trainers"
TEXTS = Dataset.from_list([{"text": text} for text in texts(40, 1)])  # 16 packed samples


def packed(folder: Path, accumulated: int, stage: int) -> dict[str, Any]:
    """Return the arguments of a trainer, for a model that is tied at stage 2."""
    set_seed(5)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=END, eos_token_id=END, pad_token_id=PAD,
        tie_word_embeddings=stage == 2,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=str(folder), gradient_accumulation_steps=accumulated, bf16=False, save_strategy="no", packing=True,
        max_length=16, gradient_checkpointing_kwargs={"selective": True}, **SHORT,
    )  # fmt: skip
    return {"model": LlamaForCausalLM(config), "args": arguments}


def outcome(trainer: Any) -> list[Any]:
    """Return the state of the model and the loss of an evaluation."""
    loss = trainer.evaluate(TEXTS)["eval_loss"]
    with whole(trainer):
        return [state_of(trainer.model), loss]


STAGES = (2, 3)
GENERATING = (ZeroConfig(stage=2), ZeroConfig(stage=3, collective="pairwise"))
"""In the second one ranks gather units from each other, as those of several hosts do."""


def on_two_ranks(started: dict[str, Any], folder: Path) -> dict[str, list[Any]]:
    """Return what each script returns, at each stage."""
    found: dict[str, list[Any]] = {"adapters": [], "generating": [], "packed": []}
    for stage, zero in zip(STAGES, GENERATING, strict=True):
        found["adapters"].append(adapters(ZeroTrainer, folder / f"adapters-{stage}", 2, zero=ZeroConfig(stage=stage)))
        found["generating"].append(generating(ZeroSeq2SeqTrainer, folder / f"generating-{stage}", 1, zero=zero))
        given = packed(folder / f"packed-{stage}", 2, stage)
        names = variables(started, stage, dataset=TEXTS, tokenizer=tokenizer(), **given)
        exec(code_of(BLOCK), names)
        found["packed"].append(outcome(names["trainer"]))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Return the folder of two ranks, and what they returned."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(f"{__name__}:on_two_ranks", folder, limit=400)


def test_two_adapters_have_the_bits_of_trainer_in_its_losses_its_files_and_after_it_goes_on(
    results: Any, tmp_path: Path
) -> None:
    folder, expected = results[0], adapters(Trainer, tmp_path, 4)
    for stage, found in zip(STAGES, results[1]["adapters"], strict=True):
        ours = folder / f"adapters-{stage}"
        assert_same_value(found, expected, f"stage {stage}")
        assert files(ours) == files(tmp_path)
        for name in files(tmp_path):
            assert_same_file(ours / name, tmp_path / name)


def test_evaluations_that_generate_have_the_bits_metrics_and_texts_of_one_process(results: Any, tmp_path: Path) -> None:
    expected = generating(Seq2SeqTrainer, tmp_path, 2)
    for zero, found in zip(GENERATING, results[1]["generating"], strict=True):
        assert_same_value(found, expected, f"{zero}")
    lengths = {len(text.replace("<pad>", "").split()) for texts in expected[-1] for text in texts[0]}
    assert len(lengths) > 1  # else ranks would run as many forwards without a word


def test_packed_texts_have_the_bits_of_trl(results: Any, tmp_path: Path) -> None:
    for stage, found in zip(STAGES, results[1]["packed"], strict=True):
        plain = SFTTrainer(train_dataset=TEXTS, processing_class=tokenizer(), **packed(tmp_path, 4, stage))
        plain.train()
        assert_same_value(found, outcome(plain), f"stage {stage}")
