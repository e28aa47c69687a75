"""The blocks of Lightning's Trainer, Fabric and accelerate train the plain loop's bits; Fabric saves and goes on."""

from __future__ import annotations

import importlib.util
import itertools
import os
from functools import partial
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
INPUTS, TARGETS = (torch.cat(parts) for parts in zip(*loops.even(COUNT), strict=True))
DATASET = TensorDataset(INPUTS, TARGETS)
STAGES = (2, 3)
LIGHTNING = dict.fromkeys(("lightning", "lightning, by hand"), "pytorch_lightning")
PACKAGES = {**LIGHTNING, "fabric": "lightning_fabric", "accelerate": "accelerate"}
HERE = [library for library, package in PACKAGES.items() if importlib.util.find_spec(package)]


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of two epochs in the plain loop's order."""
    sampler, found = MicroBatchSampler(DATASET, loops.SAMPLES, 0, 1, drop_last=True), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found += [DATASET[indices] for indices in sampler]
    return found


def names_of(started: dict[str, Any], stage: int, seed: int = 5) -> dict[str, Any]:
    """Return the variables of a block, with a model from a seed and a loader of this rank's micro-batches."""
    sampler = MicroBatchSampler(DATASET, loops.SAMPLES, started["rank"], started["world"], drop_last=True)
    more: dict[str, Any] = {"dataset": DATASET, "batch_size": loops.SAMPLES, "sampler": sampler, "epochs": 2}
    more["loader"] = DataLoader(DATASET, batch_sampler=sampler)
    return variables(started, stage, model=loops.seeded(seed, loops.network), **more)


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


def fit(names: dict[str, Any], path: Path, *, by_hand: bool = False) -> Any:
    """Fit two epochs. Return the model and its optimizer."""
    names["module"] = module_of(names["model"], by_hand=by_hand)
    block = loops.BLOCKS["Lightning's Trainer"]
    for flag in ("accumulate_grad_batches=4 // world,", "gradient_clip_val=1.0,") if by_hand else ():
        block = block.replace(flag, "")
    exec(block, names)
    return names["model"], names["trainer"].optimizers[0]


def accelerated(names: dict[str, Any], path: Path) -> Any:
    exec(loops.BLOCKS["accelerate"], names)
    return names["model"], names["optimizer"].optimizer


def fabricated(names: dict[str, Any], path: Path) -> Any:
    """Train an epoch and save; load that into another model at another stage, and train another epoch."""
    built, begin, looped = loops.BLOCKS["Fabric"].partition("for inputs, targets in loader:")
    for each in (names, names_of(names, 5 - names["stage"], 6)):
        model = each["model"]
        exec(built, each)
        objects = {name: each[name] for name in ("model", "optimizer")}
        if each is names:
            exec(begin + looped, each)
            each["fabric"].save(path, objects)
            each["optimizer"].optimizer.close()
    each["fabric"].load(path, objects)
    each["sampler"].set_epoch(1)
    exec(begin + looped, each)
    return model, each["optimizer"].optimizer


RUNS = {
    "lightning": fit,
    "lightning, by hand": partial(fit, by_hand=True),
    "fabric": fabricated,
    "accelerate": accelerated,
}


def trained(started: dict[str, Any], folder: Path) -> dict[str, list[State]]:
    """Run the block of each library at each stage. Return the states of the models."""
    os.chdir(folder)
    states: dict[str, list[State]] = {library: [] for library in HERE}
    for library, stage in itertools.product(HERE, STAGES):
        model, optimizer = RUNS[library](names_of(started, stage), folder / f"{library}-{stage}")
        optimizer.check_replicas()
        optimizer.close()
        states[library].append(state_of(model))
    return states


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[State]]]:
    """Train on two ranks; return the folder and the states."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(f"{__name__}:trained", folder, limit=LIMIT)


@pytest.mark.parametrize("library", PACKAGES)
def test_a_block_has_the_plain_loops_bits_and_fabric_saves_and_goes_on(ranks: Any, library: str) -> None:
    pytest.importorskip(PACKAGES[library])
    folder, states = ranks
    plain, batches = loops.seeded(5, loops.network), micro_batches()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if library == "fabric":
        loop = loops.PlainLoop(loops.autocast_loss, optimizer=optimizer)
        loop.run(plain, batches[:COUNT])
        for stage in STAGES:
            saved = torch.load(folder / f"fabric-{stage}", weights_only=False)
            assert_same_dict(saved["model"], plain.state_dict())
            assert_same_states(saved["optimizer"], optimizer.state_dict())
        loop.run(plain, batches[COUNT:])
    elif library == "accelerate":
        loops.PlainLoop(loops.autocast_loss, together=4, optimizer=optimizer).run(plain, loops.even(COUNT))
    else:
        halves = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
        loops.PlainLoop(together=4, optimizer=optimizer, scheduler=lambda _: halves).run(plain, batches)
    for state in states[library]:
        assert_same_dict(state, plain.state_dict())
