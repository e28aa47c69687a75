"""FSDP2 and this library with the same option, for each option that both have.

Units of one host's ranks share memory under this library, so that a gather moves no bytes. Options of gathers are
therefore run with ``collective="pairwise"``, whose ranks send each other all shards, as ranks on several hosts do.

Knows: how both libraries say each option. Does not know: models, batches, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .systems import LEARNING_RATE, Build, How, System, Training, fsdp2_training, zero_training

FP32, BF16 = torch.float32, torch.bfloat16
BODY, NORMS = MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(FP32, output_dtype=BF16)
SENT = {"collective": "pairwise"}


def _all(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _pairs(device: str = "cpu") -> DeviceMesh:
    """The ranks 0 and 1 share a copy, and so on."""
    return init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))


def _blocks(model: Any, mesh: DeviceMesh, **named: Any) -> None:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **named)


def _norms_apart(model: Any, mesh: DeviceMesh) -> None:
    for part in [part for part in model.modules() if isinstance(part, nn.LayerNorm)]:
        fully_shard(part, mesh=mesh, mp_policy=NORMS)
    _blocks(model, mesh, mp_policy=BODY)


def _networks_apart(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block.mlp, mesh=mesh)
    _blocks(model, mesh)


def _every_other_kept(model: Any, mesh: DeviceMesh) -> None:
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=number % 2 == 1)
    fully_shard(model, mesh=mesh)


def _two_ahead(model: Any, mesh: DeviceMesh) -> None:
    _blocks(model, mesh)
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(number - 2, 0) : number][::-1])


def _embedding_left(model: Any, mesh: DeviceMesh) -> None:
    model.embedding.weight.requires_grad_(False)
    _blocks(model, mesh, ignored_params={model.embedding.weight})


def _ignoring(model: Any) -> dict[str, Any]:
    model.embedding.weight.requires_grad_(False)
    return {"ignored": [model.embedding]}


def _theirs(shard: Callable[[Any, DeviceMesh], None], mesh: Callable[[], DeviceMesh]) -> Build:
    def build(model: nn.Module, how: How) -> Training:
        shard(model, mesh())
        return fsdp2_training(model, how)

    return build


def _ours(arguments: Callable[[Any], Mapping[str, Any]]) -> Build:
    def build(model: nn.Module, how: How) -> Training:
        from zero import ZeroOptimizer

        given: dict[str, Any] = {"stage": 3, "bucket_cap_mb": how.bucket_cap_mb, "lr": LEARNING_RATE, "fused": True}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, **given | dict(arguments(model)))
        return zero_training(model, optimizer, shared=True)

    return build


def _kept(model: Any) -> dict[str, Any]:
    kept = set(model.blocks[::2])
    return SENT | {"reshard_after_forward": lambda module: module not in kept}


def _nested(model: Any) -> dict[str, Any]:
    chosen = {*model.blocks, *(block.mlp for block in model.blocks)}
    return SENT | {"units": lambda module: module in chosen}


OPTIONS: dict[str, tuple[Build, Build]] = {
    "bf16, norms in fp32": (
        _theirs(_norms_apart, _all),
        _ours(lambda model: {"mixed_precision": {"*": BODY, "*norm": NORMS}}),
    ),
    "mesh (W / 2, 2)": (_theirs(_blocks, _pairs), _ours(lambda model: {"mesh": _pairs()})),
    "units inside units": (_theirs(_networks_apart, _all), _ours(_nested)),
    "every second unit kept": (_theirs(_every_other_kept, _all), _ours(_kept)),
    "two units ahead": (_theirs(_two_ahead, _all), _ours(lambda model: SENT | {"prefetch_depth": 2})),
    "frozen embedding ignored": (_theirs(_embedding_left, _all), _ours(_ignoring)),
}
PAIRS = {option: (f"FSDP2, {option}", f"zero 3, {option}") for option in OPTIONS}  # names of systems
DIALS: dict[str, System] = {
    name: System(name, build, 3)
    for option, builds in OPTIONS.items()
    for name, build in zip(PAIRS[option], builds, strict=True)
}
