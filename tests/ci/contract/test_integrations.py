"""Lightning's Trainer, Fabric and accelerate train the plain loop's bits, save, and go on with more or fewer ranks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from zero import MicroBatchSampler

from ...contract.recipes import assert_same_dict
from ...support.errors import assert_in_order, error_of
from ...support.launched import launch
from ...support.loops import BLOCKS, SAMPLES, PlainLoop, autocast_loss, even, mean_loss, network, seeded
from ...support.plain import assert_same_states
from .ecosystem import COUNT, State, gpt2, state_of, training_arguments, variables
from .ecosystem import DATASET as DATASET_OF_WORDS

pytestmark = [pytest.mark.timeout(500)]

LIMIT = 240  # seconds of two ranks on a busy machine

STAGES = (2, 3)
LOOP = "for inputs, targets in loader:"
INPUTS, TARGETS = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
DATASET = TensorDataset(INPUTS, TARGETS)


def sampler_of(rank: int, world: int) -> MicroBatchSampler:
    return MicroBatchSampler(DATASET, SAMPLES, rank, world, drop_last=True)


def epochs_of(*epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of epochs in the plain loop's order."""
    sampler = sampler_of(0, 1)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        yield from (DATASET[indices] for indices in sampler)


def names_of(started: dict[str, Any], stage: int, seed: int, **more: Any) -> dict[str, Any]:
    """Return the variables of a block, with a model from a seed and a loader of this rank's micro-batches."""
    sampler = sampler_of(started["rank"], started["world"])
    more |= {"dataset": DATASET, "batch_size": SAMPLES, "sampler": sampler}
    loader = DataLoader(DATASET, batch_sampler=sampler)
    return variables(started, stage, model=seeded(seed, network), loader=loader, **more)


def other_stage(stage: int) -> int:
    return 5 - stage


# -- Lightning ---------------------------------------------------------------------------------------------------------


def fit(
    started: dict[str, Any], stage: int, epochs: int, seed: int, path: str | None = None, by_hand: bool = False
) -> dict[str, Any]:
    """Run the block up to an epoch, from a checkpoint if there is one. Return its variables.

    ``by_hand``: the module accumulates, clips and steps itself.
    """
    import pytorch_lightning as pl

    names = names_of(started, stage, seed, epochs=epochs)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = names["model"]

        def training_step(self, batch: Any, _: int) -> Tensor:
            return mean_loss(self.model, batch)

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", mean_loss(self.model, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class ByHand(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> Tensor:
            optimizer: Any = self.optimizers()
            scheduler: Any = self.lr_schedulers()
            loss = mean_loss(self.model, batch)
            self.manual_backward(loss / 2)
            if number % 2:
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            return loss

    names["module"] = ByHand() if by_hand else Module()
    built, _, fitted = BLOCKS["Lightning's Trainer"].partition("trainer.fit")
    for flag in ("accumulate_grad_batches=4 // world,", "gradient_clip_val=1.0,") if by_hand else ():
        built = built.replace(flag, "")
    exec(built, names)
    exec(f"trainer.fit{fitted}" if path is None else f"trainer.fit(module, loader, loader, ckpt_path={path!r})", names)
    return names


FITS = ((2, False), (3, False), (3, True))  # the stage, and whether the module steps by hand


def halving(step: int) -> float:
    return 0.5**step


def lightning(started: dict[str, Any], folder: Path, resumed: str) -> list[Any]:
    """Fit two epochs and save; or load that, at the other stage, and fit a third one.

    Return for each fit the state of the model, and the loss as measured after the fit, and again from the file.
    """
    os.chdir(folder)
    results = []
    for number, (stage, by_hand) in enumerate(FITS[: 2 if resumed else 3]):
        path = f"{folder}/{number}.ckpt"
        names = fit(started, other_stage(stage), 3, 6, path) if resumed else fit(started, stage, 2, 5, None, by_hand)
        trainer, measured = names["trainer"], []
        if not resumed:
            trainer.save_checkpoint(path)
            for given in ({}, {"ckpt_path": path}):
                measured += trainer.validate(names["module"], names["loader"], verbose=False, **given)
        trainer.optimizers[0].check_replicas()
        trainer.optimizers[0].close()
        results.append((state_of(names["model"]), measured))
    return results


def test_lightnings_trainer_has_the_plain_loops_bits_validates_saves_and_goes_on_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pytorch_lightning")
    plain = seeded(5, network)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
    loop = PlainLoop(together=4, optimizer=optimizer, scheduler=lambda _: scheduler)
    loop.run(plain, list(epochs_of(0, 1)))
    losses = set()
    results = launch(f"{__name__}:lightning", tmp_path, "", limit=LIMIT)
    assert len(results) == len(FITS)
    for number, (state, measured) in enumerate(results):
        saved = torch.load(tmp_path / f"{number}.ckpt", weights_only=False)
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        for found in (state, weights):
            assert_same_dict(found, plain.state_dict())
        assert_same_states(saved["optimizer_states"][0], optimizer.state_dict())
        losses |= {loss["loss"] for loss in measured}
    assert len(losses) == 1
    loop.run(plain, list(epochs_of(2)))
    for state, _ in launch(f"{__name__}:lightning", tmp_path, "resumed", ranks=1, limit=LIMIT):
        assert_same_dict(state, plain.state_dict())


# -- Fabric and accelerate ---------------------------------------------------------------------------------------------


def loops(started: dict[str, Any], folder: Path, library: str, resumed: str) -> list[State]:
    """Train an epoch and save; or load that, at the other stage, and train another epoch. Return the states."""
    states = []
    built, _, loop = (BLOCKS["Fabric"] if library == "fabric" else BLOCKS["accelerate"]).partition(LOOP)
    for stage in STAGES:
        names = names_of(started, other_stage(stage) if resumed else stage, 6 if resumed else 5)
        trained, saved = names["model"], f"{folder}/{{}}{library}-{stage}"
        exec(built, names)
        objects = {"model": names["model"], "optimizer": names["optimizer"]}
        if library == "fabric":
            if resumed:
                names["fabric"].load(saved.format(""), objects)
                names["sampler"].set_epoch(1)
            exec(LOOP + loop, names)
            names["fabric"].save(saved.format(resumed), objects)
        else:
            if resumed:
                names["accelerator"].load_state(saved.format(""))
            exec(LOOP + loop, names)
            names["accelerator"].save_state(saved.format(resumed))
            names["accelerator"].save_model(names["model"], f"{folder}/{resumed}model-{stage}")
            names["accelerator"].free_memory()
        names["optimizer"].optimizer.close()
        states.append(state_of(trained))
    return states


@pytest.mark.parametrize(
    ("library", "module", "steps", "epochs"),
    [
        ("fabric", "lightning_fabric", (2, 1), (list(epochs_of(0)), list(epochs_of(1)))),
        ("accelerate", "accelerate", (4, 4), (even(COUNT), even(COUNT))),
    ],
)
def test_a_loop_has_the_plain_loops_bits_saves_and_goes_on_with_another_number_of_ranks(
    library: str, module: str, steps: tuple[int, int], epochs: tuple[Any, Any], tmp_path: Path
) -> None:
    """``steps``: the micro-batches of a step, with two ranks and with one."""
    pytest.importorskip(module)
    plain = seeded(5, network)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for resumed, ranks, together, batches in zip(("", "resumed-"), (2, 1), steps, epochs, strict=True):
        PlainLoop(autocast_loss, together=together, optimizer=optimizer).run(plain, batches)
        states = launch(f"{__name__}:loops", tmp_path, library, resumed, ranks=ranks, limit=LIMIT)
        assert len(states) == len(STAGES)
        for stage, state in zip(STAGES, states, strict=True):
            assert_same_dict(state, plain.state_dict())
            weights, saved = read_saved(library, tmp_path, f"{resumed}{{}}-{stage}")
            assert_same_dict({name: weights[name] for name in state}, plain.state_dict())
            assert_same_states(saved, optimizer.state_dict())


def read_saved(library: str, folder: Path, name: str) -> tuple[State, dict[str, Any]]:
    """Return the weights and the optimizer's dict that a library has saved."""
    if library == "fabric":
        saved = torch.load(folder / name.format("fabric"), weights_only=True)
        return saved["model"], saved["optimizer"]
    from safetensors.torch import load_file

    state = folder / name.format("accelerate")
    weights = load_file(state / "model.safetensors")
    assert_same_dict(load_file(folder / name.format("model") / "model.safetensors"), weights)
    return weights, torch.load(state / "optimizer.bin", weights_only=True)


# -- habits of the other libraries' users ------------------------------------------------------------------------------


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


def lightning_with_an_optimizer_of_a_part(names: dict[str, Any], folder: Path) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = names["model"]

        def training_step(self, batch: Any, _: int) -> Tensor:
            return mean_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model[0].parameters(), lr=1e-2)

    exec(BLOCKS["Lightning's Trainer"], {**names, "module": Module(), "epochs": 1})


def trainer_with_a_part_that_is_unfrozen(names: dict[str, Any], folder: Path) -> None:
    from transformers import TrainerCallback

    from zero.integrations.transformers import ZeroTrainer

    class Unfreezing(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **named: Any) -> None:
            named["model"].requires_grad_()

    model = seeded(5, gpt2)
    model.get_submodule("transformer.h.0").requires_grad_(False)
    given = {"args": training_arguments(folder), "train_dataset": DATASET_OF_WORDS, "callbacks": [Unfreezing()]}
    ZeroTrainer(model=model, **given).train()


HALF_PREPARED = {
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
            assert_in_order("RuntimeError: … a backward gave a gradient to ' … and no ZeroOptimizer has it", said)


def test_a_gradient_that_no_optimizer_averages_is_an_error_on_every_rank(tmp_path: Path) -> None:
    launch(f"{__name__}:half_prepared", tmp_path, limit=LIMIT)
