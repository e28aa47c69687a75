"""Loads a checkpoint into FSDP2 and trains on, with nothing but torch, safetensors and JSON.

Run as a program on two ranks: FOLDER STEPS FIRST. ``zero`` and ``collectives`` cannot be imported there. Rank 0 prints
the SHA-256 of the trained parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 5


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    """Take steps of two micro-batches, of which each rank has one: a sum of two terms has one order."""
    for step in steps:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def options_of(folder: Path) -> dict[str, Any]:
    """Return the options of the one param group."""
    from safetensors import safe_open

    with safe_open(next(iter(folder.glob("*.safetensors"))), framework="pt") as opened:
        (group,) = json.loads(opened.metadata()["param_groups"])
    return {"lr": group["lr"], "betas": tuple(group["betas"]["$tuple"]), "weight_decay": group["weight_decay"]}


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as read
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    weights = get_model_state_dict(model)
    read(weights, storage_reader=HuggingFaceStorageReader(str(folder / "model")))
    set_model_state_dict(model, weights)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    everything = get_optimizer_state_dict(model, optimizer, options=flat)
    states = {key: value for key, value in everything.items() if key.startswith("state.")}
    read(states, storage_reader=HuggingFaceStorageReader(str(folder / "optimizer")))
    set_optimizer_state_dict(model, optimizer, {**everything, **states}, options=flat)


def main() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, steps, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = network(1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **options_of(folder / "optimizer"))
    load(folder, model, optimizer)
    train(model, optimizer, dist.get_rank(), range(first, first + steps))
    whole: list[Tensor] = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    digests = [hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).digest() for tensor in whole]
    if dist.get_rank() == 0:
        print(hashlib.sha256(b"".join(digests)).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["zero"] = sys.modules["collectives"] = None  # type: ignore[assignment]
    main()
