"""Each integration that a recipe shows trains the plain loop's bits; what is not installed is skipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import open_checkpoint

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import BLOCKS, ECOSYSTEM, SAMPLES, PlainLoop, autocast_loss, code_of, even, network, seeded
from ...support.plain import assert_same_states
from .ecosystem import (
    COUNT,
    STAGES,
    WORLD_SIZE,
    State,
    by_micro_batch,
    gpt2,
    language_loss,
    llama,
    state_of,
    tokens,
    train_on_tokens,
    variables,
)

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


def run_recipe(started: dict[str, Any], _: Path, heading: str) -> list[State]:
    """Return the trained parameters after a block that creates an optimizer, at each stage."""
    states = []
    inputs, targets = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
    for stage in STAGES:
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        names = variables(started, stage, dataset=dataset, model=seeded(5, network))
        exec(code_of(heading), names)
        names["optimizer"].check_replicas()
        names["optimizer"].close()
        states.append(state_of(names["model"]))
    return states


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_trains_the_bits_of_the_plain_loop_at_every_stage(tmp_path: Path, heading: str) -> None:
    library, loop = RECIPES[heading]
    pytest.importorskip(library)
    plain = seeded(5, network)
    loop.run(plain, even(COUNT))
    states = launch(f"{__name__}:run_recipe", tmp_path, heading)
    assert len(states) == len(STAGES)
    for state in states:
        assert_same_dict(state, plain.state_dict())


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
    for batches, saved, state, measured in launch(f"{__name__}:lightning", tmp_path, limit=250):
        assert len(batches) == 3 * COUNT
        pairs = [(x["inputs"], torch.stack([target_of[tuple(row.tolist())] for row in x["inputs"]])) for x in batches]
        plain = seeded(5, network)
        optimizer = PlainLoop().run(plain, pairs[: 2 * COUNT])
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        assert_same_dict(weights, plain.state_dict())
        assert_same_states(saved["optimizer_states"][0], optimizer.state_dict())
        PlainLoop(optimizer=optimizer).run(plain, pairs[2 * COUNT :])
        assert_same_dict(state, plain.state_dict())
        losses |= {loss["loss"] for each in measured for loss in each}
    assert len(losses) == 1


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
