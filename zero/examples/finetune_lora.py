"""A whole script of fine-tuning: a frozen base, and low-rank adapters that alone have gradients and optimizer states.

    python -m zero.examples.finetune_lora
    torchrun --nproc-per-node 2 -m zero.examples.finetune_lora --stage 3 --adapters adapters.pt

At stage 3 the frozen base is sharded, too. A step takes 4 micro-batches over all ranks, so 1, 2 or 4 ranks train the
same bits, whose SHA-256 is the last line. The base has random weights here: put in your model and your data.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.examples.train import choose_device

WORDS, LENGTH, WIDTH = 32, 16, 64
MICRO_BATCHES = 4  # of a step, over all ranks


class LowRank(nn.Module):
    """A frozen linear layer, to which a trained product of two thin matrices is added; zero at the start (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return found


def add_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Freeze a model, and give each of its linear layers an adapter. Return the parameters of these, by name."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, LowRank(child))
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class AttentionBlock(nn.Module):
    """float (batch, LENGTH, WIDTH) -> the same shape: causal attention, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))
        return result


class Base(nn.Module):
    """int64 (batch, LENGTH) of words -> (batch, LENGTH, WORDS) of logits of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def run(args: argparse.Namespace, device: str) -> None:
    """Train the adapters on this rank."""
    torch.set_num_threads(1)  # their number changes bits
    torch.manual_seed(0)
    starts = torch.randint(0, WORDS, (512, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 3 * torch.arange(LENGTH + 1)) % WORDS  # each word is the one before and 3
    data = TensorDataset(rows[:, :-1], rows[:, 1:])

    model = Base().to(device)
    adapters = add_adapters(model)
    optimizer = zero.ZeroOptimizer(
        list(adapters.items()), torch.optim.AdamW, module=model, stage=args.stage, divisor=MICRO_BATCHES, lr=args.lr
    )
    rank, world = optimizer.rank, optimizer.world_size
    if MICRO_BATCHES % world:
        raise SystemExit(f"{MICRO_BATCHES} micro-batches a step need 1, 2 or 4 ranks, not {world}")
    sampler = zero.MicroBatchSampler(data, 16, rank, world, per_step=MICRO_BATCHES, drop_last=True)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (words, following) in enumerate(DataLoader(data, batch_sampler=sampler), 1):
            logits = model(words.to(device))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.to(device).flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            if number % (MICRO_BATCHES // world) == 0:
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = optimizer.sum_over_ranks(torch.stack(losses).mean().item()) / world
        losses.clear()
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.3f} nats per word", flush=True)

    with optimizer.gathered(adapters.values()):
        trained = {name: parameter.detach().cpu().clone() for name, parameter in adapters.items()}
    optimizer.close()  # the model is plain again, and whole on every rank
    if rank == 0:
        counts = [sum(p.numel() for p in model.parameters() if p.requires_grad is wanted) for wanted in (True, False)]
        print("{:,} parameters are trained, {:,} are frozen".format(*counts))
        if args.adapters:
            torch.save(trained, args.adapters)
        weights = b"".join(value.numpy().tobytes() for value in trained.values())
        print(f"SHA-256 {hashlib.sha256(weights).hexdigest()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="when omitted cuda, if each rank gets its own GPU")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--adapters", metavar="FILE", help="save the adapters there")
    args = parser.parse_args()
    if args.epochs < 1:
        raise SystemExit(f"--epochs is {args.epochs}: it must be at least 1")
    if args.adapters is not None and not (args.adapters and Path(args.adapters).parent.is_dir()):
        raise SystemExit(f"--adapters {args.adapters!r}: name a file in a folder that exists")
    device, _ = choose_device(args.device, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count())
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    group = zero.process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    with group if int(os.environ.get("WORLD_SIZE", 1)) > 1 else nullcontext():
        run(args, device)


if __name__ == "__main__":
    main()
