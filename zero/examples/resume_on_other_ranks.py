"""Train on some ranks, stop, and go on with another number of ranks. The parameters have the bits of one whole run.

    torchrun --nproc-per-node 2 -m zero.examples.resume_on_other_ranks stopped --stop-after 10
    torchrun --nproc-per-node 3 -m zero.examples.resume_on_other_ranks stopped --stage 3
    python -m zero.examples.resume_on_other_ranks whole

The first word is a folder of checkpoints. The last two commands print the same SHA-256. Three things make that so: a
step always has the same micro-batches (`PER_STEP`), the sampler counts those that are trained, and a checkpoint can be
restored at any number of ranks and any stage.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero import CheckpointManager, MicroBatchSampler, ZeroOptimizer, process_group

PER_STEP = 6  # micro-batches over all ranks: 1, 2, 3 or 6 ranks have equally many of them
EPOCHS = 3


def train(folder: str, stage: int, stop_after: int | None) -> None:
    """Go on from the newest checkpoint in the folder, to the end of the last epoch or to a step. All ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    dataset = TensorDataset(torch.randn(200, 16), torch.randn(200, 4))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2, divisor=PER_STEP)
    rank, world = optimizer.rank, optimizer.world_size
    if PER_STEP % world:
        raise SystemExit(f"{world} ranks cannot share {PER_STEP} micro-batches evenly: start 1, 2, 3 or 6 ranks")
    sampler = MicroBatchSampler(dataset, 4, rank, world, drop_last=True, per_step=PER_STEP)
    loader = DataLoader(dataset, batch_sampler=sampler)
    total = EPOCHS * sampler.steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=total)
    state = {"sampler": sampler, "scheduler": scheduler}

    with CheckpointManager(folder, optimizer, max_to_keep=2) as checkpoints:
        restored = checkpoints.restore(state=state, rng=False)  # no step draws from a random generator
        step = 0 if restored is None else restored.step
        if stop_after is not None and not step < stop_after <= total:
            raise SystemExit(f"--stop-after {stop_after}: {folder} has step {step} of {total}, so give one after it")
        report(rank, f"begins after step {step} of {total}, ranks: {world}, stage: {stage}")
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(loader, start=1):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                if number % (PER_STEP // world):
                    continue  # further micro-batches of this step
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                sampler.step()
                step += 1
                if step in (stop_after, total):
                    checkpoints.save(step, state=state)
                if step == stop_after:
                    report(rank, f"stopped after step {step}: start it again, with other ranks or at another stage")
                    return
    report(rank, f"trained: SHA-256 of the parameters {optimizer.check_replicas()}")
    optimizer.close()


def report(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the folder of the checkpoints")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save after this step, and end")
    arguments = parser.parse_args()
    if not arguments.folder:
        raise SystemExit("the folder has an empty name: name one (the current folder is .)")
    torch.set_num_threads(1)  # another number of threads adds in another order
    with process_group("gloo") if int(os.environ.get("WORLD_SIZE", 1)) > 1 else nullcontext():
        train(arguments.folder, arguments.stage, arguments.stop_after)


if __name__ == "__main__":
    main()
