"""Each integration that a recipe shows trains the plain loop's bits; what is not installed is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import open_checkpoint

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import BLOCKS, ECOSYSTEM, INTEGRATIONS, PlainLoop, code_of, seeded
from .ecosystem import (
    DATASET,
    STAGES,
    WORLD_SIZE,
    State,
    by_micro_batch,
    gpt2,
    language_loss,
    llama,
    note_inputs,
    plain_trainer,
    state_of,
    tokens,
    train_on_tokens,
    trainer_names,
    training_arguments,
    variables,
)

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


def test_every_recipe_is_run() -> None:
    folders = ("From a transformers folder", "A transformers model without memory", "To a transformers folder")
    assert {*INTEGRATIONS, *folders, "Trainer"} == set(ECOSYSTEM)


FAMILIES = {"gpt2": gpt2, "llama": llama}  # the first has tied embeddings, the second buffers that no file has


def come_and_leave(started: dict[str, Any], folder: Path) -> list[tuple[str, list[tuple[str, State]]]]:
    """Train what `save_pretrained` wrote, with memory and built without, and leave for a folder of transformers.

    Return for each stage the folder of the checkpoint, and models: gpt2, as it came back from there; both families.
    """
    results = []
    for stage in STAGES:
        names = variables(started, stage, path=str(folder / "gpt2"), checkpoint=str(folder / f"stage-{stage}"))
        exec(code_of("From a transformers folder"), names)
        train_on_tokens(names)
        exec(code_of("To a transformers folder"), names)
        names["optimizer"].close()
        assert_same_dict(state_of(names["whole"]), state_of(names["model"]))
        names["path"] = f"{names['checkpoint']}/model"
        exec(code_of("From a transformers folder"), names)
        assert names["model"].training
        names["optimizer"].close()
        states = [("gpt2", state_of(names["model"]))]
        for family in FAMILIES:
            built = variables(started, stage, path=folder / family)
            exec(code_of("A transformers model without memory"), built)
            train_on_tokens(built)
            built["optimizer"].check_replicas()
            built["optimizer"].close()
            states.append((family, state_of(built["model"])))
        results.append((names["checkpoint"], states))
    return results


def test_training_comes_from_a_transformers_folder_also_without_memory_and_leaves_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = {}
    for family, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(tmp_path / family)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
        plain.train()
        PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
        expected[family] = state_of(plain)
    results, contents = launch(f"{__name__}:come_and_leave", tmp_path, limit=200), set()
    assert len(results) == len(STAGES)
    for path, states in results:
        assert len(states) == 1 + len(FAMILIES)
        for family, state in states:
            assert_same_dict(state, expected[family])
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        contents.add(checkpoint.content)
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/model", output_loading_info=True)
        assert not any(loading.values()), loading
        for name in ("config.json", "generation_config.json"):
            assert (checkpoint.path / "model" / name).read_bytes() == (tmp_path / "gpt2" / name).read_bytes()
    assert len(contents) == 1


# -- Trainer -----------------------------------------------------------------------------------------------------------

COMPILED = {
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
}  # as a whole, which at stage 3 is another graph
TRAININGS: list[tuple[int, dict[str, Any]]] = [
    (0, {"bf16": True}),
    (1, {}),
    (2, COMPILED),
    (3, {}),
    (3, {"bf16": True}),
]


def train_with_trainer(started: dict[str, Any], folder: Path) -> list[Any]:
    """Train, and train on from the checkpoint at half the steps.

    Return for each training: the model's inputs in the order of the micro-batches (not of a compiled one), its state
    after either training, and the evaluation loss.
    """
    results = []
    for number, (stage, changes) in enumerate(TRAININGS):
        output = folder / f"training-{number}"
        arguments = training_arguments(output, save_strategy="steps", save_steps=2, **changes)
        names = trainer_names(started, stage, arguments)
        calls: list[dict[str, Tensor]] = []
        if changes is not COMPILED:
            handle = note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        if changes is not COMPILED:
            handle.remove()
        loss = names["trainer"].evaluate(DATASET)["eval_loss"]
        names["trainer"].zero.check_replicas()
        names["trainer"].zero.close()

        later = names["ZeroTrainer"](model=seeded(6, gpt2), args=arguments, train_dataset=DATASET)
        later.train(resume_from_checkpoint=str(output / "checkpoint-2"))
        later.zero.close()
        results.append((by_micro_batch(calls), state_of(names["model"]), state_of(later.model), loss))
    return results


def test_trainer_trains_the_bits_of_the_plain_loop_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    compiled: dict[nn.Module, Any] = {}

    def loss_of(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in changes):
            loss: Tensor = compiled.get(model, model)(**call).loss
        return loss.float() * WORLD_SIZE  # as Trainer scales it

    def compiled_loss(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        if model not in compiled:
            compiled[model] = torch.compile(model, backend="aot_eager")
        return loss_of(model, call)

    losses = set()
    results = launch(f"{__name__}:train_with_trainer", tmp_path, limit=280)
    inputs = results[0][0]
    assert len(inputs) == 16
    for (_, changes), (calls, state, resumed, loss) in zip(TRAININGS, results, strict=True):
        plain = plain_trainer(compiled_loss if changes is COMPILED else loss_of, calls or inputs)
        for found in (state, resumed):
            assert_same_dict(found, state_of(plain))
        losses |= set() if changes else {loss}
    assert len(losses) == 1


@pytest.mark.parametrize("name", ["fp16", "fsdp", "deepspeed"])
def test_an_argument_that_the_trainer_of_the_guide_cannot_do_is_an_error(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = training_arguments(tmp_path)
    setattr(arguments, name, True)
    names = trainer_names({"torch": torch}, 3, arguments)
    exec(BLOCKS["Trainer"].partition("\ntrainer = ")[0], names)
    with pytest.raises(ValueError, match=f"ZeroTrainer does not take {name}"):
        names["ZeroTrainer"](model=seeded(5, gpt2), args=arguments, train_dataset=DATASET)
