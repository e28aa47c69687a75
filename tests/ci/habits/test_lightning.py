"""Lightning's BackboneFinetuning: checkpoints, early stopping, a second fit of the same trainer, and resumptions.

Budget: 60 processor seconds; 39 were measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero import MicroBatchSampler

from ...support.launched import launch
from ...support.loops import seeded
from ...support.plain import assert_same_states, assert_same_value

pl = pytest.importorskip("pytorch_lightning")
callbacks = pytest.importorskip("pytorch_lightning.callbacks")
CSVLogger = pytest.importorskip("pytorch_lightning.loggers").CSVLogger

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine
STAGES = (2, 3)
EPOCHS, FURTHER, UNFROZEN = 4, 6, 2  # epochs of the first fit, of both, and before the backbone is trained
BEFORE, AFTER = f"every/epoch={UNFROZEN - 1}.ckpt", f"every/epoch={UNFROZEN}.ckpt"
LAST = f"every/epoch={EPOCHS - 1}.ckpt"


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator) + labels[:, None, None, None], labels)


class Classifier(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    """A backbone with a batch norm, which the callback trains from the beginning, and a head."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(4, track_running_stats=False)  # its statistics are each micro-batch's
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(pictures))
        return logits

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("right", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def script(strategy: Any, folder: Path, resume: Path | None = None) -> list[Any]:
    """Fit, from a checkpoint if there is one; without one, go on with the same trainer, and validate the best model.

    Return what the trainer and its callbacks have counted, measured and kept.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dealt = MicroBatchSampler(images(64, 1), 4, rank, world, drop_last=True, per_step=4)
    dealt.sampler = dealt  # type: ignore[attr-defined]  # whose epoch Lightning sets
    loader = DataLoader(images(64, 1), batch_sampler=dealt)
    held_out = DataLoader(images(16, 2), batch_sampler=MicroBatchSampler(images(16, 2), 4, rank, world, shuffle=False))
    best = callbacks.ModelCheckpoint(
        folder / "best", "{epoch}", monitor="right", mode="max", save_top_k=2, save_last=True
    )
    rates = callbacks.LearningRateMonitor("epoch")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=EPOCHS, accumulate_grad_batches=4 // world,
        use_distributed_sampler=False, logger=CSVLogger(folder), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            best, callbacks.ModelCheckpoint(folder / "every", "{epoch}", save_top_k=-1), rates,
            callbacks.EarlyStopping("right", patience=3, mode="max"),
            callbacks.BackboneFinetuning(UNFROZEN, lambda _: 1.5, backbone_initial_ratio_lr=0.1),
        ],
    )  # fmt: skip
    module: Any = seeded(1, Classifier)
    found: list[Any] = []

    def note() -> None:
        found.extend((trainer.current_epoch, trainer.global_step, best.best_model_score.item(), {**rates.lrs}))

    trainer.fit(module, loader, held_out, ckpt_path=resume)
    note()
    if resume is None:
        trainer.fit_loop.max_epochs = FURTHER
        trainer.fit(module, loader, held_out)
        note()
        for path in (None, "best"):
            found += trainer.validate(module, held_out, ckpt_path=path, verbose=False)
    return [found, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))]


def on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Run the script at each stage, go on from the one process before its unfreezing, and try to go on after it."""
    from zero.integrations.lightning import ZeroStrategy

    results = []
    for stage in STAGES:
        results.append(script(ZeroStrategy(stage=stage), folder / f"{stage}"))
        script(ZeroStrategy(stage=stage), folder / f"resumed-{stage}", folder / "plain" / BEFORE)
        with pytest.raises(ValueError, match="has param groups that BackboneFinetuning has added: resume from one"):
            script(ZeroStrategy(stage=stage), folder / "late", folder / "plain" / AFTER)
    return results


def test_a_backbone_is_unfrozen_fitted_twice_and_resumed_with_the_bits_and_files_of_lightning(tmp_path: Path) -> None:
    """A resumption after the unfreezing is refused: Lightning itself trains on with a frozen backbone then."""
    expected = script("auto", tmp_path / "plain")
    results = launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for stage, found in zip(STAGES, results, strict=True):
        assert found == expected
        for name in expected[-1]:
            assert_same_checkpoint(tmp_path / f"{stage}" / name, tmp_path / "plain" / name)
        for name in (AFTER, LAST):
            assert_same_checkpoint(tmp_path / f"resumed-{stage}" / name, tmp_path / "plain" / name)
    script("auto", tmp_path / "resumed", tmp_path / f"{STAGES[-1]}" / BEFORE)
    assert_same_checkpoint(tmp_path / "resumed" / LAST, tmp_path / "plain" / LAST)


def assert_same_checkpoint(mine: Path, other: Path) -> None:
    found, plain = (torch.load(path, weights_only=False) for path in (mine, other))
    assert_same_value(found["state_dict"], plain["state_dict"], str(mine))
    assert found["state_dict"]._metadata == plain["state_dict"]._metadata
    assert_same_states(*(each["optimizer_states"][0] for each in (found, plain)))
    for key in ("epoch", "global_step", "lr_schedulers"):
        assert found[key] == plain[key]
    for name, state in plain["callbacks"].items():
        assert name.startswith("ModelCheckpoint") or found["callbacks"][name] == state
