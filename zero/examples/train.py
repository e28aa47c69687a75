"""A whole training script to copy: a small transformer learns the text of a Python file. Put in your model and data.

    python -m zero.examples.train
    torchrun --nproc-per-node 2 -m zero.examples.train --stage 3 --checkpoint saved

A step takes `--micro-batches` micro-batches over all ranks, however many ranks there are. So the trained parameters
have the bits of one process that accumulates as many. If a run with `--checkpoint` was killed, start it again, at any
stage and on any number of ranks: it goes on with the same bits. It trains on the GPUs of a host if each rank gets its
own, and `--device` chooses. At its end rank 0 saves the weights to model.pt, which `torch.load` reads without this
library. `zero train` calls `read`, `build` and `train`, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, Subset, TensorDataset

import zero

LENGTH = 64  # bytes in a sample
DECIDE = ("clip", "lr", "threads", "bf16", "mixed_precision")  # the bits, with the text, the sampler and the steps
Batch = tuple[Tensor, Tensor]  # inputs and targets
Args = argparse.Namespace
LossOf = Callable[[Batch], Tensor]


def train_steps(
    optimizer: zero.ZeroOptimizer,
    loss_of: LossOf,
    steps: Iterable[Iterable[Batch]],
    clip: float | None = None,
    scaler: GradScaler | None = None,
    backwards: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[list[Tensor]]:
    """Take a step for each item of ``steps``, which is this rank's micro-batches, and yield their losses. All ranks.

    ``scaler``: for fp16. ``backwards``: ``optimizer.join`` if ranks may have different numbers of micro-batches.
    """
    scaler = scaler or GradScaler(enabled=False)
    for micro_batches in steps:
        losses = []
        with backwards():
            for batch in micro_batches:
                loss = loss_of(batch)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        scaler.unscale_(optimizer)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield losses


@torch.no_grad()
def evaluate(model: nn.Module, optimizer: zero.ZeroOptimizer, loss_of: LossOf, micro_batches: Iterable[Batch]) -> float:
    """Return the mean loss over the micro-batches of all ranks, of which some may have fewer. All ranks."""
    model.train(mode=False)
    with optimizer.join():  # at stage 3 a forward gathers parameters, which all ranks do together
        losses = [loss_of(batch) for batch in micro_batches]
    model.train()
    return mean_over_ranks(optimizer, losses)


def mean_over_ranks(optimizer: zero.ZeroOptimizer, losses: list[Tensor]) -> float:
    """Return the mean of the losses of all ranks. Its bits do not depend on which rank has which. All ranks."""
    mine = json.dumps([loss.item() for loss in losses]).encode()
    found = [loss for sent in optimizer.exchange(mine) for loss in json.loads(sent)]
    return math.fsum(found) / len(found)


def choose_device(asked: str | None, ranks: int, gpus: int) -> tuple[str, str]:
    """Return the device of the ranks on this host, and why they do not use its GPUs (empty if there is no reason)."""
    there = f"this host has {gpus} GPU(s) for {ranks} rank(s)"
    if asked == "cuda" and gpus < ranks:
        raise SystemExit(
            f"--device cuda needs one GPU per rank that torch finds, and {there}: start fewer ranks, or take --device "
            "cpu"
        )
    if asked is None and 0 < gpus < ranks:
        return "cpu", f"{there}, so they compute on the CPU, over gloo; at most {gpus} would have a GPU each"
    return asked or ("cuda" if gpus else "cpu"), ""


class ByteModel(nn.Module):
    """int64 (batch, LENGTH) of bytes -> (batch, LENGTH, 256) of logits of the next byte."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def read(args: Args) -> list[Subset[tuple[Tensor, ...]]]:
    """Return samples to train on, and others to evaluate on."""
    if not Path(args.data).is_file() or not (content := Path(args.data).read_bytes()):
        raise SystemExit(f"--data {args.data!r} must be a file that is not empty")
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    samples = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    data, cut = TensorDataset(samples[:, :-1], samples[:, 1:]), len(samples) * 9 // 10
    needed = args.batch * args.micro_batches
    if cut < needed:
        raise SystemExit(
            f"--data {args.data} has {len(text)} bytes, so {cut} samples to train on, and a step needs {needed}: give "
            "a longer file, or a smaller --batch or --micro-batches"
        )
    return [Subset(data, range(cut)), Subset(data, range(cut, len(samples)))]


def build(args: Args, model: nn.Module, **options: Any) -> zero.ZeroOptimizer:
    """Return the optimizer of a model. All ranks. ``options``: of `zero.ZeroOptimizer`."""
    named = list(model.named_parameters())
    groups = [  # of (name, parameter) pairs
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return zero.ZeroOptimizer(
        groups,  # or the model, if all parameters have the same arguments
        torch.optim.AdamW,  # the class, not an object of it; its arguments follow the others
        module=model,
        divisor=args.micro_batches,  # the sum of a step's gradients is divided by it, so do not divide the loss
        lr=args.lr,
        **options,
    )


def train(
    args: Args, device: str, model: nn.Module, optimizer: zero.ZeroOptimizer, scaler: GradScaler | None = None
) -> tuple[dict[int, float], float]:
    """Train. Return the losses that were printed, by step, and the loss of the last evaluation. All ranks."""
    torch.backends.mha.set_fastpath_enabled(False)  # evaluations have the same bits at all stages
    training, held_out = read(args)
    rank, world, count = optimizer.rank, optimizer.world_size, args.micro_batches

    def loss_of(batch: Batch) -> Tensor:
        inputs, targets = (tensor.to(device) for tensor in batch)
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())

    sampler = zero.MicroBatchSampler(training, args.batch, rank, world, seed=0, per_step=count, drop_last=True)
    sampler.check_ranks(optimizer.exchange)
    run = {name: str(vars(args)[name]) for name in DECIDE if name in vars(args)}
    run["data"] = f"text of SHA-256 {hashlib.sha256(Path(args.data).read_bytes()).hexdigest()[:12]}"
    for other, theirs in enumerate(optimizer.exchange(run["data"].encode())):
        if theirs.decode() != run["data"]:
            raise SystemExit(f"rank {other} reads another --data than rank {rank}: give every host the same file")
    validation = zero.MicroBatchSampler(held_out, args.batch, rank, world, shuffle=False)
    total = args.steps or args.epochs * sampler.steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total)
    state = {"scheduler": scheduler, "sampler": sampler, **({"scaler": scaler} if scaler else {})}
    join = nullcontext if count % world == 0 else optimizer.join  # if ranks have different numbers of micro-batches
    printed: dict[int, float] = {}
    with (
        zero.StopOnSignal(optimizer) if args.checkpoint else nullcontext() as stop,  # all end after the same step
        zero.CheckpointManager(args.checkpoint, optimizer) if args.checkpoint else nullcontext() as checkpoints,
    ):
        restored = checkpoints.restore(state=state, rng=False) if checkpoints else None  # it draws no random numbers
        step = restored.step if restored else 0
        if scheduler.total_steps != total:  # the checkpoint has another schedule, and steps of other sizes
            raise SystemExit(
                f"{args.checkpoint} has a run of {scheduler.total_steps} steps, not {total}: give the --steps, "
                "--epochs and --micro-batches with which it began, or another --checkpoint"
            )
        before = restored.state.get("run", run) if restored else run
        for name in [name for name in run if run[name] != before.get(name)]:
            raise SystemExit(
                f"--{name.replace('_', '-')} is {run[name]}, but {args.checkpoint} has a run with {before.get(name)}: "
                "give the same, or another --checkpoint"
            )
        if rank == 0:
            print(f"stage {args.stage} on {world} {device} rank(s): step {step} of {total} is taken", flush=True)
        for epoch in range(sampler.epoch, max(sampler.epoch + 1, math.ceil(total / sampler.steps))):
            sampler.set_epoch(epoch)
            # The sampler deals the `count` micro-batches of each step to ranks 0, 1, ..., world - 1, 0, 1, ...
            batches, mine = iter(DataLoader(training, batch_sampler=sampler)), len(range(rank, count, world))
            left = min(sampler.steps - sampler.trained // count, total - step)
            steps = (islice(batches, mine) for _ in range(left))
            for losses in train_steps(optimizer, loss_of, steps, args.clip, scaler, join):
                step += 1
                scheduler.step()
                sampler.step()
                if step % 10 == 0 or step in (1, total):
                    loss = printed[step] = mean_over_ranks(optimizer, losses)
                    if rank == 0:
                        print(f"step {step}/{total}  loss {loss:.3f}  lr {scheduler.get_last_lr()[0]:.1e}", flush=True)
                why = stop.why if stop and step < total else None
                if checkpoints and (why or step % args.save_every == 0 or step == total):
                    checkpoints.save(step, state={**state, "run": run}, blocking=bool(why))
                if why:  # a rank got SIGTERM
                    if rank == 0:
                        print(f"stopped: {why}: all ranks have saved step {step} and end", flush=True)
                    raise SystemExit(143)
            evaluated = evaluate(model, optimizer, loss_of, DataLoader(held_out, batch_sampler=validation))
            if rank == 0:
                print(f"epoch {epoch + 1}: validation loss {evaluated:.3f} nats per byte", flush=True)
    return printed, evaluated


def run(args: Args, device: str) -> None:
    """Train on this rank, and save the weights."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = ByteModel().to(device)
    precision = zero.MixedPrecision(torch.bfloat16) if args.bf16 else None
    optimizer = build(args, model, stage=args.stage, mixed_precision=precision)
    train(args, device, model, optimizer)
    optimizer.close()  # the model is plain again, and whole on every rank
    if optimizer.rank == 0:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, args.out)
        print(f"saved {args.out}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="when omitted cuda, if each rank gets its own GPU")
    parser.add_argument("--data", default=nn.functional.__file__, help="a file; by default torch/nn/functional.py")
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, with fp32 master weights")
    parser.add_argument("--micro-batches", type=int, default=4, help="in a step, over all ranks")
    parser.add_argument("--batch", type=int, default=16, help="samples in a micro-batch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of the whole run; when omitted those of the epochs")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank on the CPU; their number changes bits")
    parser.add_argument("--out", metavar="FILE", default="model.pt", help="the trained weights; default: model.pt")
    parser.add_argument("--checkpoint", metavar="DIR", help="save there, and go on from the newest checkpoint there")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    args = parser.parse_args()
    for flag in ("epochs", "steps", "batch", "micro_batches", "threads", "save_every"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise SystemExit(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: it must be at least 1")
    if args.checkpoint == "":  # of a variable that is not set, say: nothing would be saved
        raise SystemExit("--checkpoint '': name a folder")
    if not args.out or not Path(args.out).parent.is_dir():
        raise SystemExit(f"--out {args.out!r}: name a file in a folder that exists")
    world, ranks = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, remark = choose_device(args.device, ranks, torch.cuda.device_count())
    if remark and os.environ.get("RANK", "0") == "0":
        print(remark)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    with zero.process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo") if world > 1 else nullcontext():
        run(args, device)


if __name__ == "__main__":
    main()
