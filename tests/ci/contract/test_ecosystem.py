"""Each integration that a recipe shows trains the plain loop's bits; what is not installed is skipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import open_checkpoint

from ...contract.ecosystem import (
    COUNT,
    DATASET,
    STAGES,
    WORLD_SIZE,
    State,
    assert_same_state,
    by_micro_batch,
    gpt2,
    language_loss,
    llama,
    note_inputs,
    plain_trainer,
    run_recipe,
    state_of,
    tokens,
    trainer_names,
    training_arguments,
    variables,
)
from ...support.launched import launch
from ...support.loops import BLOCKS, ECOSYSTEM, SAMPLES, PlainLoop, autocast_loss, code_of, even, network, seeded
from ...support.plain import assert_same_states

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


def halved(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss as accelerate divides it for each of two accumulated micro-batches."""
    return autocast_loss(model, batch) / 2


RECIPES: dict[str, tuple[str, PlainLoop]] = {  # the library that a block needs, and its plain loop
    "accelerate": ("accelerate", PlainLoop()),
    "accelerate with autocast and accumulation": (
        "accelerate",
        PlainLoop(halved, together=4, divisor=lambda _: WORLD_SIZE),
    ),
    "Fabric": ("lightning_fabric", PlainLoop(autocast_loss)),
    "Fabric with a strategy": ("lightning_fabric", PlainLoop(autocast_loss)),
}


def test_every_recipe_is_run() -> None:
    folders = ("From a transformers folder", "A transformers model without memory", "To a transformers folder")
    assert {*RECIPES, *folders, "Trainer", "Lightning's Trainer"} == set(ECOSYSTEM)
    assert all(len(inputs) == SAMPLES for inputs, _ in even(COUNT))  # the blocks' batch_size
    assert all("batch_size=4" in BLOCKS[heading] for heading in RECIPES)


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_trains_the_bits_of_the_plain_loop_at_every_stage(tmp_path: Path, heading: str) -> None:
    library, loop = RECIPES[heading]
    pytest.importorskip(library)
    plain = seeded(5, network)
    loop.run(plain, even(COUNT))
    states = launch(f"{run_recipe.__module__}:run_recipe", tmp_path, heading)
    assert len(states) == len(STAGES)
    for stage, state in enumerate(states):
        assert_same_state(state, state_of(plain), f"stage {stage}")


def lightning(started: dict[str, Any], folder: Path) -> list[Any]:
    """Fit two epochs at each stage, save, and fit a third one from there with another model and trainer.

    Return for each stage: the inputs in the order of the micro-batches, the saved file, the state after three epochs,
    and the loss as measured after two epochs, and again when the saved weights were loaded into the trained model.
    """
    os.chdir(folder)
    inputs, targets = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=SAMPLES)
    results = []
    for stage in STAGES:
        batches: list[dict[str, Tensor]] = []
        names = variables(started, stage, loader=loader)

        class Noting(nn.Sequential):
            def forward(self, x: Tensor, batches: list[dict[str, Tensor]] = batches) -> Any:
                batches.extend([{"inputs": x.clone()}] * torch.is_grad_enabled())
                return super().forward(x)

        names["model"] = seeded(5, lambda: Noting(*network()))
        exec(code_of("Lightning's Trainer"), names)
        path = str(folder / f"stage-{stage}.ckpt")
        names["trainer"].save_checkpoint(path)
        measured = [names["trainer"].validate(names["module"], loader)]

        names["model"] = seeded(6, lambda: Noting(*network()))
        later = names["Module"]()
        trainer = names["pl"].Trainer(
            accelerator="cpu", devices=WORLD_SIZE, strategy=names["ZeroStrategy"](), gradient_clip_val=1.0, max_epochs=3
        )
        trainer.fit(later, loader, loader, ckpt_path=path)
        trainer.strategy.optimizers[0].check_replicas()
        with trainer.strategy.gathered():
            state = state_of(names["model"])
        measured.append(trainer.validate(later, loader, ckpt_path=path))
        results.append((by_micro_batch(batches), torch.load(path, weights_only=False), state, measured))
    return results


def test_lightnings_trainer_trains_the_bits_of_the_plain_loop_validates_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    target_of = {tuple(row.tolist()): target for x, y in even(COUNT) for row, target in zip(x, y, strict=True)}
    losses = set()
    for stage, (batches, saved, state, measured) in enumerate(launch(f"{__name__}:lightning", tmp_path, limit=250)):
        assert len(batches) == 3 * COUNT
        pairs = [(x["inputs"], torch.stack([target_of[tuple(row.tolist())] for row in x["inputs"]])) for x in batches]
        plain = seeded(5, network)
        optimizer = PlainLoop().run(plain, pairs[: 2 * COUNT])
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        assert_same_state(weights, state_of(plain), f"stage {stage}, saved")
        assert_same_states(saved["optimizer_states"][0], optimizer.state_dict())
        PlainLoop(optimizer=optimizer).run(plain, pairs[2 * COUNT :])
        assert_same_state(state, state_of(plain), f"stage {stage}, from a checkpoint")
        losses |= {loss["loss"] for each in measured for loss in each}
    assert len(losses) == 1


def come_and_leave(started: dict[str, Any], folder: Path) -> list[tuple[str, State]]:
    """Train what `save_pretrained` wrote, leave for a folder of transformers, and come back from there at each stage.

    Return the folder of each checkpoint, and the state of the model that came back.
    """
    results = []
    for stage in STAGES:
        names = variables(started, stage, path=str(folder / "origin"), checkpoint=str(folder / f"stage-{stage}"))
        exec(code_of("From a transformers folder"), names)
        for batch in tokens(4)[names["rank"] :: WORLD_SIZE]:
            language_loss(names["model"], batch).backward()
            names["optimizer"].step()
            names["optimizer"].zero_grad()
        exec(code_of("To a transformers folder"), names)
        names["optimizer"].close()
        assert_same_state(state_of(names["whole"]), state_of(names["model"]), "the folder that was left behind")

        names["path"] = f"{names['checkpoint']}/model"
        exec(code_of("From a transformers folder"), names)
        assert names["model"].training
        names["optimizer"].close()
        results.append((names["checkpoint"], state_of(names["model"])))
    return results


def test_training_comes_from_a_transformers_folder_and_leaves_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    built: Any = seeded(5, gpt2)  # with tied embeddings
    built.save_pretrained(tmp_path / "origin")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "origin")
    plain.train()
    PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
    contents = set()
    for stage, (path, state) in enumerate(launch(f"{__name__}:come_and_leave", tmp_path)):
        assert_same_state(state, state_of(plain), f"stage {stage}")
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        contents.add(checkpoint.content)
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/model", output_loading_info=True)
        assert not any(loading.values()), loading
        for name in ("config.json", "generation_config.json"):
            assert (checkpoint.path / "model" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()
    assert len(contents) == 1


FAMILIES = {"gpt2": gpt2, "llama": llama}  # the first has tied embeddings, the second buffers that no file has


def without_memory(started: dict[str, Any], folder: Path) -> list[tuple[str, int, State]]:
    """Train models of the folders, which were built on the meta device, at each stage; return their states."""
    results = []
    for stage in STAGES:
        for name in FAMILIES:
            names = variables(started, stage, path=folder / name)
            exec(code_of("A transformers model without memory"), names)
            for batch in tokens(4)[names["rank"] :: WORLD_SIZE]:
                language_loss(names["model"], batch).backward()
                names["optimizer"].step()
                names["optimizer"].zero_grad()
            names["optimizer"].check_replicas()
            names["optimizer"].close()
            results.append((name, stage, state_of(names["model"])))
    return results


def test_a_transformers_model_without_memory_trains_as_one_with_memory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = {}
    for name, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(tmp_path / name)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        plain.train()
        PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
        expected[name] = state_of(plain)
    results = launch(f"{__name__}:without_memory", tmp_path)
    assert len(results) == len(STAGES) * len(FAMILIES)
    for name, stage, state in results:
        assert_same_state(state, expected[name], f"{name}, stage {stage}")


def train_with_trainer(started: dict[str, Any], folder: Path) -> list[Any]:
    """Train at each stage, and train on from the checkpoint at half the steps.

    Return for each stage: the model's inputs in the order of the micro-batches, its state after either training, and
    the evaluation loss.
    """
    results = []
    for stage in STAGES:
        arguments = training_arguments(folder / f"stage-{stage}", save_strategy="steps", save_steps=2)
        names = trainer_names(started, stage, arguments)
        calls: list[dict[str, Tensor]] = []
        handle = note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        handle.remove()
        loss = names["trainer"].evaluate(DATASET)["eval_loss"]
        names["trainer"].zero.close()

        later = names["ZeroTrainer"](model=seeded(6, gpt2), args=arguments, train_dataset=DATASET)
        later.train(resume_from_checkpoint=str(folder / f"stage-{stage}" / "checkpoint-2"))
        later.zero.close()
        results.append((by_micro_batch(calls), state_of(names["model"]), state_of(later.model), loss))
    return results


def test_trainer_trains_the_bits_of_the_plain_loop_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def loss_of(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**call).loss * WORLD_SIZE  # as Trainer scales it
        return loss

    losses = set()
    results = launch(f"{__name__}:train_with_trainer", tmp_path, limit=250)
    for stage, (calls, state, resumed, loss) in enumerate(results):
        assert len(calls) == 16
        plain = plain_trainer(loss_of, calls)
        assert_same_state(state, state_of(plain), f"stage {stage}")
        assert_same_state(resumed, state_of(plain), f"stage {stage}, from a checkpoint")
        losses.add(loss)
    assert len(losses) == 1
