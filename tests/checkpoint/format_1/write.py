"""The program that wrote the checkpoints of this folder: ``python -m tests.checkpoint.format_1.write FOLDER``.

Knows: what was saved, and by which call. Does not know: what is tested with it. The files of this folder are never
written again: every release that reads format 1 reads these.

    sharded         by a `ZeroOptimizer`: bf16 with master weights, a tied and a frozen parameter, a buffer, rank_state
    other_shapes    of a class whose states have another shape, dtype and number than their parameter

The folder `other_shapes` was imported by an earlier release from dicts of torch. It also has averages, which today's
releases read, and no random generators.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from collectives import Transport, solo
from zero import MixedPrecision, ZeroOptimizer, save

from ..saved import save_small
from .toys import HalfMomentum, OtherShapes, Small, groups, train

STEPS = 2


def zero_optimizer(model: nn.Module, transport: Transport | None = None, stage: int = 0) -> ZeroOptimizer:
    precision = MixedPrecision(torch.bfloat16)
    return ZeroOptimizer(
        groups(model), HalfMomentum, module=model, stage=stage, process_group=transport, mixed_precision=precision
    )


def other_optimizer(model: nn.Module, transport: Transport | None = None, stage: int = 0) -> ZeroOptimizer:
    given = {"stage": stage, "process_group": solo() if transport is None else transport}
    return ZeroOptimizer(groups(model), OtherShapes, module=model, partition="parameter", **given)


def write_sharded(path: Path, transport: Transport | None = None, stage: int = 0) -> None:
    model = Small()
    optimizer = zero_optimizer(model, solo() if transport is None else transport, stage)
    train(model, optimizer, range(STEPS))
    state = {"epoch": 1, "position": (2, b"\x00\xff"), "losses": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    save_small(path, optimizer, step=STEPS, state=state, rank_state={"rank": optimizer.rank})
    optimizer.close()


def write_other_shapes(path: Path, transport: Transport | None = None, stage: int = 0) -> None:
    """Train and save by a `ZeroOptimizer` that gives each parameter to one rank. All ranks."""
    model = Small()
    optimizer = other_optimizer(model, transport, stage)
    train(model, optimizer, range(STEPS))
    save(path, optimizer, {"epoch": 1}, step=STEPS)
    optimizer.close()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    write_sharded(folder / "sharded")
    write_other_shapes(folder / "other_shapes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
