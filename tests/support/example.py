"""The training of `zero.examples.train` by a plain loop: torch's AdamW, and the micro-batches of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.examples.train import LENGTH, ByteModel

from .loops import Batch, PlainLoop


def samples_of(text: Path) -> int:
    """Return how many samples of a text are trained on."""
    return text.stat().st_size // (LENGTH + 1) * 9 // 10


def plain_example(
    text: Path,
    steps: int,
    micro_batches: int,
    batch: int,
    *,
    width: int = 64,
    layers: int = 2,
    clip: float = 1.0,
    lr: float = 3e-3,
    precision: torch.dtype | None = None,
) -> nn.Module:
    """Return the trained model. ``precision``: with fp16 the loss is scaled."""
    torch.set_num_threads(1)
    found = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    samples = found[: len(found) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    data = TensorDataset(samples[:, :-1], samples[:, 1:])
    sampler = zero.MicroBatchSampler(samples_of(text), batch, 0, 1, per_step=micro_batches, drop_last=True)
    batches: list[Batch] = []
    for epoch in range(-(-steps // sampler.steps)):
        sampler.set_epoch(epoch)
        batches += [tuple(batch) for batch in DataLoader(data, batch_sampler=sampler)]
    torch.manual_seed(0)
    model = ByteModel(width, layers)

    def optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    PlainLoop(
        loss_of,
        micro_batches,
        precision=None if precision is None else zero.MixedPrecision(precision),
        scale=2.0**16 if precision == torch.float16 else None,
        scheduler=lambda optimizer: OneCycleLR(optimizer, lr, steps),
        optimizer_of=optimizer_of,
        max_norm=clip,
    ).run(model, batches[: steps * micro_batches])
    return model
