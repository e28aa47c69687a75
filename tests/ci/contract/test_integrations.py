"""Lightning's Trainer, Fabric and accelerate train the plain loop's bits, save, and go on with more or fewer ranks.

The blocks of the recipes run as they stand. Further habits of these libraries are those of `ci/habits`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero import MicroBatchSampler

from ...contract.recipes import assert_same_dict
from ...support.errors import assert_in_order, error_of
from ...support.launched import launch
from ...support.loops import (
    BLOCKS,
    CLASSES,
    SAMPLES,
    PlainLoop,
    autocast_loss,
    constant,
    even,
    mean_loss,
    network,
    seeded,
)
from ...support.plain import assert_same_states
from .ecosystem import COUNT, State, gpt2, state_of, training_arguments, variables
from .ecosystem import DATASET as DATASET_OF_WORDS

pytestmark = [pytest.mark.timeout(500)]

LIMIT = 240  # seconds of two ranks on a busy machine
LOOP = "for inputs, targets in loader:"
INPUTS, TARGETS = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
DATASET = TensorDataset(INPUTS, TARGETS)
STAGES = (2, 3)
LIGHTNING = ("lightning", "lightning, by hand")


def sampler_of(rank: int, world: int) -> MicroBatchSampler:
    return MicroBatchSampler(DATASET, SAMPLES, rank, world, drop_last=True)


def epochs_of(*epochs: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of epochs in the plain loop's order."""
    sampler, found = sampler_of(0, 1), []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found += [DATASET[indices] for indices in sampler]
    return found


def names_of(started: dict[str, Any], stage: int, seed: int, **more: Any) -> dict[str, Any]:
    """Return the variables of a block, with a model from a seed and a loader of this rank's micro-batches."""
    sampler = sampler_of(started["rank"], started["world"])
    more |= {"dataset": DATASET, "batch_size": SAMPLES, "sampler": sampler}
    loader = DataLoader(DATASET, batch_sampler=sampler)
    return variables(started, stage, model=seeded(seed, network), loader=loader, **more)


def halving(step: int) -> float:
    return 0.5**step


def module_of(model: nn.Module, part: Any = None, *, by_hand: bool = False) -> Any:
    """Return a module of Lightning. ``part``: what is trained; ``by_hand``: it accumulates, clips and steps itself."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        automatic_optimization = not by_hand

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = mean_loss(self.model, batch)
            if by_hand:
                optimizer: Any = self.optimizers()
                scheduler: Any = self.lr_schedulers()
                self.manual_backward(loss / 2)
                if number % 2:
                    self.clip_gradients(optimizer, gradient_clip_val=1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", mean_loss(self.model, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW((part or self).parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def fit(names: dict[str, Any], path: str, resumed: str, by_hand: bool) -> Any:
    """Fit two epochs and save, or load that and fit a third one. Return the optimizer."""
    names |= {"epochs": 3 if resumed else 2, "module": module_of(names["model"], by_hand=by_hand)}
    built, _, fitted = BLOCKS["Lightning's Trainer"].partition("trainer.fit")
    for flag in ("accumulate_grad_batches=4 // world,", "gradient_clip_val=1.0,") if by_hand else ():
        built = built.replace(flag, "")
    exec(built, names)
    load = f"trainer.fit(module, loader, loader, ckpt_path={path.format('')!r})"
    exec(load if resumed else f"trainer.fit{fitted}", names)
    names["trainer"].save_checkpoint(path.format(resumed))
    losses = [
        names["trainer"].validate(names["module"], names["loader"], verbose=False, **given)
        for given in ({}, {"ckpt_path": path.format(resumed)})
    ]
    assert losses[0] == losses[1]
    return names["trainer"].optimizers[0]


def loop(names: dict[str, Any], path: str, resumed: str, is_fabric: bool) -> Any:
    """Train an epoch and save, or load that and train another one. Return the optimizer."""
    built, _, looped = (BLOCKS["Fabric"] if is_fabric else BLOCKS["accelerate"]).partition(LOOP)
    exec(built, names)
    objects = {"model": names["model"], "optimizer": names["optimizer"]}
    if resumed and is_fabric:
        names["fabric"].load(path.format(""), objects)
        names["sampler"].set_epoch(1)
    elif resumed:
        names["accelerator"].load_state(path.format(""))
    exec(LOOP + looped, names)
    if is_fabric:
        names["fabric"].save(path.format(resumed), objects)
    else:
        names["accelerator"].save_state(path.format(resumed))
        names["accelerator"].save_model(names["model"], f"{path.format(resumed)}-model")
        names["accelerator"].free_memory()
    return names["optimizer"].optimizer


def trained(started: dict[str, Any], folder: Path, library: str, resumed: str) -> list[State]:
    """Run a block at each stage, at the other one if it goes on. Return the states."""
    os.chdir(folder)
    states = []
    for stage in STAGES:
        names = names_of(started, 5 - stage if resumed else stage, 6 if resumed else 5)
        model, path = names["model"], f"{folder}/{{}}{stage}"
        run, how = (fit, library == LIGHTNING[1]) if library in LIGHTNING else (loop, library == "fabric")
        optimizer = run(names, path, resumed, how)
        optimizer.check_replicas()
        optimizer.close()
        states.append(state_of(model))
    return states


def read_saved(library: str, path: Path) -> tuple[State, dict[str, Any]]:
    """Return the weights and the optimizer's dict that a library has saved."""
    if library == "accelerate":
        from safetensors.torch import load_file

        weights = load_file(path / "model.safetensors")
        assert_same_dict(load_file(f"{path}-model/model.safetensors"), weights)
        return weights, torch.load(path / "optimizer.bin", weights_only=True)
    saved = torch.load(path, weights_only=False)
    if library == "fabric":
        return saved["model"], saved["optimizer"]
    weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
    return weights, saved["optimizer_states"][0]


@pytest.mark.parametrize(
    ("library", "module", "steps", "epochs"),
    [
        *((name, "pytorch_lightning", (4, 4), (epochs_of(0, 1), epochs_of(2))) for name in LIGHTNING),
        ("fabric", "lightning_fabric", (2, 1), (epochs_of(0), epochs_of(1))),
        ("accelerate", "accelerate", (4, 4), (even(COUNT), even(COUNT))),
    ],
)
def test_a_block_has_the_plain_loops_bits_saves_and_goes_on_with_another_number_of_ranks(
    library: str, module: str, steps: tuple[int, int], epochs: tuple[Any, Any], tmp_path: Path
) -> None:
    """``steps``: the micro-batches of a step, with two ranks and with one."""
    pytest.importorskip(module)
    plain = seeded(5, network)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    halves = torch.optim.lr_scheduler.LambdaLR(optimizer, halving) if library in LIGHTNING else constant(optimizer)
    for resumed, ranks, together, batches in zip(("", "resumed-"), (2, 1), steps, epochs, strict=True):
        if resumed and library == LIGHTNING[1]:
            return  # with one rank a step would have other micro-batches
        loss_of = mean_loss if library in LIGHTNING else autocast_loss
        PlainLoop(loss_of, together=together, optimizer=optimizer, scheduler=lambda _: halves).run(plain, batches)
        states = launch(f"{__name__}:trained", tmp_path, library, resumed, ranks=ranks, limit=LIMIT)
        for stage, state in zip(STAGES, states, strict=True):
            assert_same_dict(state, plain.state_dict())
            weights, saved = read_saved(library, tmp_path / f"{resumed}{stage}")
            assert_same_dict({name: weights[name] for name in state}, plain.state_dict())
            assert_same_states(saved, optimizer.state_dict())


# -- gradients of no optimizer -----------------------------------------------------------------------------------------


def accelerate_without_its_optimizer(names: dict[str, Any], _: Path) -> None:
    from zero.integrations.accelerate import ZeroAccelerator

    accelerator = ZeroAccelerator()
    model, loader = accelerator.prepare(names["model"], names["loader"])
    accelerator.backward(mean_loss(model, next(iter(loader))))


def fabric_without_its_optimizer(names: dict[str, Any], _: Path) -> None:
    from lightning_fabric import Fabric

    from zero.integrations.fabric import ZeroFabricStrategy

    started = Fabric(strategy=ZeroFabricStrategy(), accelerator="cpu", devices=names["world"])
    started.launch()
    mean_loss(started.setup_module(names["model"]), next(iter(names["loader"]))).backward()


def lightning_with_an_optimizer_of_a_part(names: dict[str, Any], _: Path) -> None:
    names |= {"module": module_of(names["model"], names["model"][0]), "epochs": 1}
    exec(BLOCKS["Lightning's Trainer"], names)


def trainer_with_a_part_that_is_unfrozen(_: dict[str, Any], folder: Path) -> None:
    from transformers import TrainerCallback

    from zero.integrations.transformers import ZeroTrainer

    class Unfreezing(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **named: Any) -> None:
            named["model"].requires_grad_()

    model = seeded(5, gpt2)
    model.get_submodule("transformer.h.0").requires_grad_(False)
    given = {"args": training_arguments(folder), "train_dataset": DATASET_OF_WORDS, "callbacks": [Unfreezing()]}
    ZeroTrainer(model=model, **given).train()


HALF_PREPARED: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "accelerate": accelerate_without_its_optimizer,
    "lightning_fabric": fabric_without_its_optimizer,
    "pytorch_lightning": lightning_with_an_optimizer_of_a_part,
    "transformers": trainer_with_a_part_that_is_unfrozen,
}


def half_prepared(started: dict[str, Any], folder: Path) -> None:
    os.chdir(folder)
    for library, call in HALF_PREPARED.items():
        if importlib.util.find_spec(library):
            said = error_of(call, names_of(started, 2, 5), folder)
            assert_in_order("RuntimeError … a backward gave a gradient to ' … and no ZeroOptimizer has it", said)


def test_a_gradient_that_no_optimizer_averages_is_an_error_on_every_rank(tmp_path: Path) -> None:
    launch(f"{__name__}:half_prepared", tmp_path, limit=LIMIT)


# -- two models of one optimizer ---------------------------------------------------------------------------------------


def two() -> tuple[nn.Module, nn.Module]:
    return seeded(5, network), seeded(6, lambda: nn.Linear(CLASSES, CLASSES))


def two_models(started: dict[str, Any], folder: Path) -> None:
    """Train two models by one optimizer, and let each rank save, as if each were alone on its host."""
    from accelerate.utils import ProjectConfiguration

    from zero.integrations.accelerate import ZeroAccelerator

    os.environ["LOCAL_RANK"] = "0"
    project = ProjectConfiguration(save_on_each_node=True)
    accelerator = ZeroAccelerator(stage=3, gradient_accumulation_steps=2, project_config=project)
    first, second, sampler = *two(), sampler_of(started["rank"], started["world"])
    both = [*second.parameters(), *first.parameters()]
    optimizer, loader = torch.optim.AdamW(both, lr=1e-2), DataLoader(DATASET, batch_sampler=sampler)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(first, second):
            accelerator.backward(mean_loss(lambda inputs: second(first(inputs)), batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(both, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(f"{folder}/{started['rank']}")
    optimizer.optimizer.close()


def test_accelerate_trains_two_models_by_one_optimizer_and_saves_on_each_node(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    launch(f"{__name__}:two_models", tmp_path, limit=LIMIT)
    first, second = two()
    optimizer = torch.optim.AdamW([*second.parameters(), *first.parameters()], lr=1e-2)
    PlainLoop(together=4, optimizer=optimizer).run(nn.Sequential(first, second), epochs_of(0))
    for rank in range(2):
        for file, model in (("model", first), ("model_1", second)):
            saved = load_file(tmp_path / str(rank) / f"{file}.safetensors")
            assert_same_dict({name: saved[name] for name in model.state_dict()}, model.state_dict())
        assert_same_states(
            torch.load(tmp_path / str(rank) / "optimizer.bin", weights_only=True), optimizer.state_dict()
        )
