"""An adversarial training in the way of accelerate: two models, each with its optimizer and schedule.

Budget: 60 processor seconds; 34 were measured.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero import clip_grad_norm_

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.plain import assert_same_states

pytest.importorskip("accelerate")

from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed  # type: ignore[import-not-found, import-untyped, unused-ignore]

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine

EPOCHS, MICRO_BATCHES, NOISE = 3, 4, 3
STAGES = (0, 2, 3)


def points(count: int, seed: int) -> TensorDataset:
    angle = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 6.28
    noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(seed + 1))
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), noise)


def script(accelerator: Any, resume: Path | None = None) -> list[Any]:
    """Train a generator and a discriminator. Return what was measured after each epoch."""
    set_seed(1)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.LayerNorm(16), nn.Linear(16, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.AdamW(discriminator.parameters(), lr=2e-2, weight_decay=0.1)
    steps = EPOCHS * 4 * accelerator.num_processes  # a prepared scheduler steps once for each process
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for optimizer in (generator_optimizer, discriminator_optimizer)
    ]
    loader = DataLoader(points(MICRO_BATCHES * 4 * 5, 0), batch_size=5, shuffle=True)
    held_out = DataLoader(points(20, 7), batch_size=4)  # five batches: the last rank repeats one, which is cut off
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader, held_out, *schedulers = (
        accelerator.prepare(
            generator, discriminator, generator_optimizer, discriminator_optimizer, loader, held_out, *schedulers
        )
    )
    optimizers = (generator_optimizer, discriminator_optimizer)
    parts = list(zip((generator, discriminator), optimizers, schedulers, strict=True))
    began = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        began = int(resume.name.rpartition("_")[2]) + 1
    loss_of, measured = nn.BCEWithLogitsLoss(), []
    for epoch in range(began, EPOCHS):
        loader.set_epoch(epoch)
        generator.train()
        discriminator.train()
        for real, noise in loader:
            with accelerator.accumulate(generator, discriminator):
                made = generator(noise)
                discriminator.requires_grad_(True)
                rated = discriminator(torch.cat([real, made.detach()]))
                truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])
                accelerator.backward(loss_of(rated, truth))
                discriminator.requires_grad_(False)  # else the generator's backward would add to its gradients
                accelerator.backward(loss_of(discriminator(made), torch.ones(len(made), 1)))
                # Both step after both losses: a step between them would reach the loss of the last micro-batch alone.
                for model, optimizer, scheduler in parts:
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.requires_grad_(True).parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        generator.eval()
        discriminator.eval()
        rated_all, real_all = [], []
        for real, noise in held_out:
            with torch.no_grad():
                pair = accelerator.gather_for_metrics((discriminator(generator(noise)), real))
            rated_all.append(pair[0])
            real_all.append(pair[1])
        rated, real = torch.cat(rated_all), torch.cat(real_all)
        measured.append((rated.tolist(), real.tolist(), schedulers[0].get_last_lr()[0]))
        accelerator.save_state()
        accelerator.wait_for_everyone()
    return measured


class Plain(Accelerator):  # type: ignore[misc, unused-ignore]
    """accelerate's own, but for torch's norm of a clip: its last bits depend on how gradients are cut."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)


def options(folder: Path, accumulated: int) -> dict[str, Any]:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, save_on_each_node=True)
    return {
        "cpu": True, "project_config": project, "gradient_accumulation_steps": accumulated,
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    }  # fmt: skip


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Run the script at each stage, and again from the checkpoint of the first epoch, which another stage saved.

    Each rank saves in its own folder, as if it were alone on its host.
    """
    from zero.integrations.accelerate import ZeroAccelerator

    os.environ["LOCAL_RANK"] = "0"
    results, folder = [], folder / str(started["rank"])
    for stage in STAGES:
        accelerator = ZeroAccelerator(stage=stage, **options(folder / str(stage), MICRO_BATCHES // 2))
        results.append(script(accelerator))
        accelerator.free_memory()
    for stage, saved in zip(STAGES, (*STAGES[1:], 0), strict=True):
        accelerator = ZeroAccelerator(stage=stage, **options(folder / f"resumed-{stage}", MICRO_BATCHES // 2))
        accelerator.project_configuration.iteration = 1
        results.append(script(accelerator, folder / str(saved) / "checkpoints" / "checkpoint_0"))
    return results


def test_two_models_with_optimizers_of_their_own_have_accelerates_bits_files_and_resumptions(
    tmp_path: Path,
) -> None:
    measured = script(Plain(**options(tmp_path / "plain", MICRO_BATCHES)))
    assert len(measured) == EPOCHS
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for number, result in enumerate(results):
        began = number >= len(STAGES)  # at the second epoch, if resumed
        assert result == measured[began:]
    for rank, stage, which in itertools.product(range(2), STAGES, ("", "resumed-")):
        for epoch in range(bool(which), EPOCHS):
            names = (f"{rank}/{which}{stage}", "plain")
            assert_same_files(*(tmp_path / name / "checkpoints" / f"checkpoint_{epoch}" for name in names))


def assert_same_files(folder: Path, expected: Path) -> None:
    from safetensors.torch import load_file

    for number in ("", "_1"):
        assert_same_dict(*(load_file(each / f"model{number}.safetensors") for each in (folder, expected)))
        states = (torch.load(each / f"optimizer{number}.bin", weights_only=True) for each in (folder, expected))
        assert_same_states(*states)
