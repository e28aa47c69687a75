"""Two low-rank adapters of PEFT, trained in turn under Trainer and resumed, with a module that is trained whole.

Budget: 60 processor seconds; 54 were measured on a busy machine.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.plain import assert_same_states, assert_same_value
from ..contract.ecosystem import DATASET, llama, state_of, training_arguments

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found, import-untyped, unused-ignore]
from transformers import Trainer, set_seed  # type: ignore[import-not-found, unused-ignore]

from zero.integrations.transformers import ZeroConfig, ZeroTrainer

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine
STAGES = (2, 3)
EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "per_device_eval_batch_size": 2}


def script(trainer_class: Any, folder: Path, accumulated: int, **zero: Any) -> list[Any]:
    """Train one adapter, add another one, train that, and go on from the checkpoint of its first epoch.

    Return the metrics of the evaluations, the logits of the second adapter, without adapters, and of the first, and the
    weights of the base with the first one merged, also when both are read from their files.
    """
    set_seed(5)
    base: Any = llama()
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, config)
    metrics = []

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
    with trainer.zero_optimizer.gathered() if zero else nullcontext():  # it copies the head, which stage 3 shards
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


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Return what the script returns, at each stage."""
    return [script(ZeroTrainer, folder / f"{stage}", 2, zero=ZeroConfig(stage=stage)) for stage in STAGES]


def test_two_adapters_have_the_bits_of_trainer_in_its_losses_its_files_and_after_it_goes_on(tmp_path: Path) -> None:
    expected = script(Trainer, tmp_path / "plain", 4)
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for stage, found in zip(STAGES, results, strict=True):
        assert_same_value(found, expected, f"stage {stage}")
        assert files(tmp_path / f"{stage}") == files(tmp_path / "plain")
        for name in files(tmp_path / "plain"):
            assert_same_file(tmp_path / f"{stage}" / name, tmp_path / "plain" / name)


def files(folder: Path) -> set[str]:
    """Return the files of adapters and optimizers below a folder."""
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
