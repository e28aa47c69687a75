"""A whole script of accelerate: epochs, a schedule, evaluation, saving, resuming at another number of ranks.

    torchrun --nproc-per-node 2 -m zero.examples.accelerate_loop --stage 3

It is a script for `accelerate.Accelerator`, but for the accelerator: a `ZeroAccelerator` with a ``stage``. The last
line, the SHA-256 of the trained weights, is the same at any stage and number of ranks, and also for a run that was
stopped and resumed (``--epochs 1 --folder run``, then ``--resume run``).
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import DataLoaderConfiguration  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero.integrations.accelerate import ZeroAccelerator

MICRO_BATCHES = 4  # of a step, over all ranks


def synthetic(samples: int, seed: int) -> TensorDataset:
    """Return points in a plane, with one of three classes by their distance from the origin."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points.norm(dim=1).long().clamp(max=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small classifier with accelerate and ZeroOptimizer.")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--epochs", type=int, default=3, help="train up to this epoch")
    parser.add_argument("--folder", help="save the state there after the last epoch")
    parser.add_argument("--resume", help="a folder that an earlier run has saved")
    given = parser.parse_args()
    if given.epochs < 1:
        raise SystemExit(f"--epochs is {given.epochs}: it must be at least 1")
    if given.folder == "":  # of a variable that is not set, say: nothing would be saved
        raise SystemExit("--folder '': name a folder")
    if given.resume is not None and not (given.resume and Path(given.resume).is_dir()):
        raise SystemExit(f"--resume {given.resume!r}: name a folder that an earlier run has saved by --folder")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    train, test = (DataLoader(synthetic(512, seed), batch_size=8, shuffle=seed == 0) for seed in (0, 1))

    accelerator = ZeroAccelerator(
        stage=given.stage,
        # the order of an epoch depends on its number and this seed alone
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    if MICRO_BATCHES % accelerator.num_processes:
        raise SystemExit(f"{MICRO_BATCHES} micro-batches a step need 1, 2 or 4 ranks, not {accelerator.num_processes}")
    accelerator.gradient_accumulation_steps = MICRO_BATCHES // accelerator.num_processes
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    # A prepared scheduler would step once for each rank: this one steps once for each optimizer step.
    accelerator.register_for_checkpointing(scheduler)
    if given.resume:
        accelerator.load_state(given.resume)

    steps = len(train) // accelerator.gradient_accumulation_steps
    for epoch in range(scheduler.last_epoch // steps, given.epochs):
        train.set_epoch(epoch)
        model.train()
        losses = []
        for points, classes in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())

        model.eval()
        right = seen = 0
        for points, classes in test:  # by all ranks
            with torch.no_grad():
                predicted = model(points).argmax(dim=1)
            predicted, classes = accelerator.gather_for_metrics((predicted, classes))
            right, seen = right + int((predicted == classes).sum()), seen + len(classes)
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch + 1}: loss {mean.item():.4f}, right {right / seen:.1%} of {seen}")

    if given.folder:
        accelerator.save_state(given.folder)
    weights = accelerator.get_state_dict(model)  # by all ranks; rank 0 gets them
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    accelerator.print(f"SHA-256 {digest}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
