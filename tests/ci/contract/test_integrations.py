"""Lightning's Trainer, Fabric and accelerate train the plain loop's bits, save, and go on with more or fewer ranks.

The blocks of the recipes run as they stand. Further habits of these libraries are those of `ci/habits`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero import MicroBatchSampler

from ...contract.recipes import assert_same_dict
from ...support import loops
from ...support.launched import launch
from ...support.plain import assert_same_states
from .ecosystem import COUNT, State, state_of, variables

pytestmark = [pytest.mark.timeout(500)]

LIMIT = 400  # seconds of two ranks on a busy machine
LOOP = "for inputs, targets in loader:"
INPUTS, TARGETS = (torch.cat(parts) for parts in zip(*loops.even(COUNT), strict=True))
DATASET = TensorDataset(INPUTS, TARGETS)
STAGES = (2, 3)
LIGHTNING = ("lightning", "lightning, by hand")
PACKAGES = {**dict.fromkeys(LIGHTNING, "pytorch_lightning"), "fabric": "lightning_fabric", "accelerate": "accelerate"}
HERE = [library for library, package in PACKAGES.items() if importlib.util.find_spec(package)]


def sampler_of(rank: int, world: int) -> MicroBatchSampler:
    return MicroBatchSampler(DATASET, loops.SAMPLES, rank, world, drop_last=True)


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
    more |= {"dataset": DATASET, "batch_size": loops.SAMPLES, "sampler": sampler}
    loader = DataLoader(DATASET, batch_sampler=sampler)
    return variables(started, stage, model=loops.seeded(seed, loops.network), loader=loader, **more)


def halving(step: int) -> float:
    return 0.5**step


def module_of(model: nn.Module, *, by_hand: bool) -> Any:
    """Return a module of Lightning. ``by_hand``: it accumulates, clips and steps itself."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        automatic_optimization = not by_hand

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = loops.mean_loss(self.model, batch)
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
            self.log("loss", loops.mean_loss(self.model, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def fit(names: dict[str, Any], path: str, resumed: str, by_hand: bool) -> Any:
    """Fit two epochs and save, or load that and fit a third one. Return the optimizer."""
    names |= {"epochs": 3 if resumed else 2, "module": module_of(names["model"], by_hand=by_hand)}
    built, _, fitted = loops.BLOCKS["Lightning's Trainer"].partition("trainer.fit")
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
    built, _, looped = (loops.BLOCKS["Fabric"] if is_fabric else loops.BLOCKS["accelerate"]).partition(LOOP)
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


def trained(started: dict[str, Any], folder: Path, resumed: str) -> dict[str, list[State]]:
    """Run the block of each library at each stage, at the other one if it goes on. Return the states."""
    os.chdir(folder)
    states: dict[str, list[State]] = {library: [] for library in HERE}
    for library in HERE:
        for stage in STAGES:
            if resumed and library == LIGHTNING[1]:
                continue  # with one rank a step would have other micro-batches
            names = names_of(started, 5 - stage if resumed else stage, 6 if resumed else 5)
            model, path = names["model"], f"{folder}/{library}-{{}}{stage}"
            run, how = (fit, library == LIGHTNING[1]) if library in LIGHTNING else (loop, library == "fabric")
            optimizer = run(names, path, resumed, how)
            optimizer.check_replicas()
            optimizer.close()
            states[library].append(state_of(model))
    return states


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[State]]]]:
    """Train on two ranks, and go on with one; return the folder and the states of either."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = (("", 2), ("resumed-", 1))
    return folder, [launch(f"{__name__}:trained", folder, resumed, ranks=ranks, limit=LIMIT) for resumed, ranks in runs]


def read_saved(library: str, path: Path) -> tuple[State, dict[str, Any]]:
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
    ("library", "steps", "epochs"),
    [
        *((name, (4, 4), (epochs_of(0, 1), epochs_of(2))) for name in LIGHTNING),
        ("fabric", (2, 1), (epochs_of(0), epochs_of(1))),
        ("accelerate", (4, 4), (loops.even(COUNT), loops.even(COUNT))),
    ],
)
def test_a_block_has_the_plain_loops_bits_saves_and_goes_on_with_another_number_of_ranks(
    ranks: Any, library: str, steps: tuple[int, int], epochs: tuple[Any, Any]
) -> None:
    """``steps``: the micro-batches of a step, with two ranks and with one."""
    pytest.importorskip(PACKAGES[library])
    folder, states = ranks
    plain = loops.seeded(5, loops.network)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    halves = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, halving) if library in LIGHTNING else loops.constant(optimizer)
    )
    loss_of = loops.mean_loss if library in LIGHTNING else loops.autocast_loss
    for resumed, found, together, batches in zip(("", "resumed-"), states, steps, epochs, strict=True):
        loops.PlainLoop(loss_of, together=together, optimizer=optimizer, scheduler=lambda _: halves).run(plain, batches)
        for stage, state in zip(STAGES, found[library], strict=library != LIGHTNING[1]):
            assert_same_dict(state, plain.state_dict())
            weights, saved = read_saved(library, folder / f"{library}-{resumed}{stage}")
            assert_same_dict({name: weights[name] for name in state}, plain.state_dict())
            assert_same_states(saved, optimizer.state_dict())
