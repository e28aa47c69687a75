"""Trainings of a small model that save and restore, on ranks that are threads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, Offload, ShardedAverage, ZeroOptimizer, open_checkpoint

from ..support.models import Odd, odd_batches, odd_loss
from ..support.programs import locked_build

MICRO_BATCHES = 12
SMALL = 0.0005  # MiB of a bucket
BF16 = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
FP16 = MixedPrecision(torch.float16, buffer_dtype=torch.float16)


def used_by_every_batch(module: nn.Module) -> bool:
    """Choose a layer of `Odd` that every batch uses, and the two layers inside it."""
    inside = isinstance(module, nn.Linear) and 3 in (module.in_features, module.out_features)
    return inside or isinstance(module, nn.Sequential)


def contains_another(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


UNITS: dict[str, dict[str, Any]] = {
    "inside units": {"units": used_by_every_batch, "prefetch_depth": 2},
    "kept inside units": {
        "units": used_by_every_batch,
        "prefetch_depth": 0,
        "reshard_after_forward": contains_another,
    },
}


@dataclass(frozen=True)
class Topology:
    """How a training is laid out. Nothing here may change a bit, but ``precision``.

    ``offload``: the name of a folder, see `below`. ``units``: at stage 3, a key of `UNITS`.
    """

    world_size: int = 1
    stage: int = 0
    cap: float = 25.0
    factor: int | None = None
    asynchronous: bool = True
    offload: Path | None = None
    precision: Any = None
    collective: str = "auto"
    units: str = ""

    def __str__(self) -> str:
        factor = "" if self.factor is None else f"of{self.factor}"
        extras = ("" if self.asynchronous else "-blocking") + ("" if self.offload is None else "-offload")
        extras += "" if self.collective == "auto" else f"-{self.collective}"
        extras += f"-{self.units.replace(' ', '-')}" if self.units else ""
        return f"{self.world_size}{factor}-stage{self.stage}-{self.cap:g}MiB{extras}"

    def below(self, folder: Path) -> Topology:
        """Return this topology with what it keeps on a disk in a new folder below ``folder``."""
        if self.offload is None:
            return self
        (folder / self.offload).mkdir(parents=True)
        return replace(self, offload=folder / self.offload)


@dataclass(frozen=True)
class Class:
    """An optimizer class and its arguments."""

    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-2})


def optimizer_of(model: Odd, transport: Transport, topology: Topology, of: Class) -> ZeroOptimizer:
    offload = None if topology.offload is None else Offload(topology.offload)
    return ZeroOptimizer(
        model,
        of.optimizer_class,
        stage=topology.stage,
        process_group=transport,
        bucket_cap_mb=topology.cap,
        sharding_factor=topology.factor,
        collective=topology.collective,
        offload=offload,
        mixed_precision=topology.precision,
        divisor=MICRO_BATCHES,
        **(UNITS[topology.units] if topology.units else {}),
        **of.arguments,
    )


def take_steps(model: Odd, optimizer: ZeroOptimizer, first: int, steps: int) -> None:
    """Take whole steps, of which micro-batch j is that of rank j mod W."""
    for step in range(first, first + steps):
        batches = odd_batches(MICRO_BATCHES, seed=step)
        for index in range(optimizer.rank, MICRO_BATCHES, optimizer.world_size):
            odd_loss(model, batches[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def run(folder: Path, topology: Topology, steps: int, of: Class | None = None) -> str:
    """Restore the newest checkpoint if there is one, train ``steps`` more, and save. Return the parameters' SHA-256."""

    def program(transport: Transport) -> str:
        torch.set_num_threads(1)
        model = locked_build(0)
        optimizer = optimizer_of(model, transport, topology, Class() if of is None else of)
        with CheckpointManager(folder, optimizer, asynchronous=topology.asynchronous) as checkpoints:
            restored = checkpoints.restore()
            first = 0 if restored is None else restored.step
            take_steps(model, optimizer, first, steps)
            digest = optimizer.check_replicas()
            checkpoints.save(first + steps).result(30)
        optimizer.close()
        return digest

    digests = on_threads(topology.world_size, program)
    assert len(set(digests)) == 1
    return digests[0]


def go_back_twice(folder: Path, topology: Topology) -> None:
    """Save steps 2, 4 and 6, with an average. Then go back to 2, take the same steps again, and save 4 and 6; and then
    once more, but no further than 4, which must be the newest for the next run."""

    def program(transport: Transport, at: Topology, rounds: tuple[int, ...]) -> str:
        torch.set_num_threads(1)
        model = locked_build(0)
        optimizer = optimizer_of(model, transport, at, Class())
        average = ShardedAverage(optimizer)
        with CheckpointManager(folder, optimizer) as checkpoints:
            for last in rounds:
                first = 0 if checkpoints.latest_step() is None else 2
                if first:
                    checkpoints.restore(first)
                for step in range(first, last):
                    take_steps(model, optimizer, step, 1)
                    average.update_parameters()
                    if step % 2:
                        checkpoints.save(step + 1)
                checkpoints.wait_until_finished()
        with CheckpointManager(folder, optimizer) as checkpoints:
            restored = checkpoints.restore()
            assert restored is not None
            assert restored.step == rounds[-1]
        return optimizer.check_replicas()

    on_threads(1, lambda transport: program(transport, Topology(), (6,)))
    on_threads(topology.world_size, lambda transport: program(transport, topology, (6, 4)))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def content(folder: Path, step: int) -> str:
    """Return the content of a step, which is verified."""
    checkpoint = open_checkpoint(step_folder(folder, step))
    checkpoint.verify()
    return checkpoint.content


def digests_of(folder: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 of each file that all ranks wrote together."""
    base = step_folder(folder, step)
    files = [path for path in sorted(base.rglob("*")) if path.is_file() and path.name != "checkpoint.json"]
    shared = [path for path in files if path.parent.name != "ranks"]
    return {path.relative_to(base).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in shared}
