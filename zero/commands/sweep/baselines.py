"""The baselines of `zero sweep`: PyTorch's own systems around any model and an AdamW.

Knows: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard (FSDP2). Does not know: ZeroOptimizer, models.
All of them are imported at once, so that their modules do not count in the measured memory of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

__all__ = ["Baseline", "baselines", "fully_sharded"]


@dataclass(frozen=True)
class Baseline:
    """``build``: (model, its units, arguments of AdamW) -> module to call, optimizer to step. All ranks call it."""

    name: str
    build: Callable[[nn.Module, Iterable[nn.Module], dict[str, Any]], tuple[nn.Module, Optimizer]]


def baselines(world_size: int) -> list[Baseline]:
    """Return the baselines for a number of ranks, with FSDP2 for every number of ranks that can share one copy."""
    found = [Baseline("DDP", _ddp), Baseline("ZeroRedundancyOptimizer", _redundancy)]
    for shards in (number for number in range(2, world_size + 1) if world_size % number == 0):
        name = "FSDP2" if shards == world_size else f"FSDP2, hybrid {shards}"
        found += [_fsdp2(name, shards, True), _fsdp2(f"{name}, kept", shards, False)]
    return found


def _ddp(model: nn.Module, units: Iterable[nn.Module], arguments: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    return nn.parallel.DistributedDataParallel(model), AdamW(model.parameters(), **arguments)


def _redundancy(model: nn.Module, units: Iterable[nn.Module], arguments: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), AdamW, **arguments)


def fully_sharded(model: nn.Module, units: Iterable[nn.Module], shards: int, **named: Any) -> nn.Module:
    """Apply FSDP2 to the units and the model: ``shards`` neighbouring ranks share one copy. ``named``: arguments of
    `fully_shard`."""
    device, world_size = next(model.parameters()).device.type, dist.get_world_size()
    sizes = (shards,) if shards == world_size else (world_size // shards, shards)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for unit in units:
        fully_shard(unit, mesh=mesh, **named)
    fully_shard(model, mesh=mesh, **named)
    return model


def _fsdp2(name: str, shards: int, reshard: bool) -> Baseline:
    def build(model: nn.Module, units: Iterable[nn.Module], arguments: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
        sharded = fully_sharded(model, units, shards, reshard_after_forward=reshard)
        return sharded, AdamW(sharded.parameters(), **arguments)

    return Baseline(name, build)
