"""Programs of these tests on real processes, which import them by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero
from collectives import Kind, Tag, Transport
from collectives.backends.device_mesh import connect_mesh
from collectives.backends.gloo import connect
from zero import CheckpointManager, ZeroOptimizer

from ..support.errors import error_of
from ..support.programs import Program, run_rank
from .spread import OnPart, Part, clipped, is_shared, stage_part, take_step


def on_mesh(group: dist.ProcessGroup, rank: int, program: Program, ranks: Any) -> Any:
    """Run a program on a mesh of some processes. None on the others, which take part in making the mesh alone."""
    mesh = DeviceMesh("cpu", ranks)
    return None if mesh.get_coordinate() is None else run_rank(program, mesh)


def on_group(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    return run_rank(program, group)


def parts_of(group: dist.ProcessGroup, rank: int, ranks: Any) -> Any:
    """Let parts of a mesh, or else of the group, exchange their ranks. None on processes outside of the mesh."""
    mesh = None if ranks is None else DeviceMesh("cpu", ranks)
    if mesh is not None and mesh.get_coordinate() is None:
        return None
    backend = (connect(group) if mesh is None else connect_mesh(mesh)).backend
    part = Transport(backend.part([[0, 2, 4], [1, 3, 5]] if ranks is None else ranks))
    return [int(each) for each in part.exchange(str(rank).encode(), Tag(Kind.EXCHANGE, "a test"))]


def by_groups_of_the_mesh(group: dist.ProcessGroup, rank: int, program: Program, ranks: Any) -> Any:
    """Run a program on a mesh as with NCCL, in whose place are gloo's own collectives. No group of a part is made."""
    with (
        mock.patch("collectives.topology._all_have_nccl", return_value=True),
        mock.patch("collectives.backends.gloo._Parts.of", side_effect=AssertionError("the mesh has these groups")),
    ):
        return on_mesh(group, rank, program, ranks)


def described(group: dist.ProcessGroup, rank: int) -> list[tuple[str, int, int]]:
    """Return the first line of `describe()`, the rank and the ranks per copy for several parts of one mesh."""
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "pp", "dp_shard"))
    found = []
    for mesh, stage in (
        (whole["dp_replicate", "dp_shard"], 3),
        (whole["dp_replicate", "dp_shard"], 0),
        (whole["dp_shard"], 2),
        (whole["pp"], 1),
    ):
        optimizer = ZeroOptimizer(nn.Linear(4, 4), stage=stage, mesh=mesh)
        facts = optimizer.describe()
        found.append((str(facts).splitlines()[0], facts.rank, facts.sharding_factor))
        optimizer.close()
    return found


def errors_of_meshes(group: dist.ProcessGroup, rank: int) -> dict[str, str]:
    """Return the errors of meshes that cannot be used, and of a good one given with what excludes it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    named = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    square, transposed = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    part, descending = DeviceMesh("cpu", [1, 3]), DeviceMesh("cpu", [[0, 1], [3, 2]])
    model = nn.Linear(3, 3)
    meta = nn.Linear(3, 3, device="meta")
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), square, [Replicate(), Shard(0)]))
    found = {
        "no mesh": error_of(ZeroOptimizer, model, mesh=[[0, 1], [2, 3]]),
        "three dimensions": error_of(ZeroOptimizer, model, mesh=named),
        "a group, too": error_of(ZeroOptimizer, model, mesh=square, process_group=group),
        "a factor, too": error_of(ZeroOptimizer, model, mesh=square, sharding_factor=2),
        "descending": error_of(ZeroOptimizer, model, mesh=descending),
        "a DTensor": error_of(ZeroOptimizer, parallel, mesh=square),
        "differ": error_of(ZeroOptimizer, model, mesh=square if rank else transposed),
    }
    if part.get_coordinate() is None:
        found["not a rank"] = error_of(ZeroOptimizer, model, mesh=part)
    with torch.device("meta"):
        found["another device"] = error_of(_on_meta, meta, square)
    return found


def _on_meta(model: nn.Module, mesh: DeviceMesh) -> None:
    ZeroOptimizer(model, mesh=mesh)


def warnings_of_clips(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Return the warnings of two clips in a part of the job, of one with `over`, and of one in the whole job."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for where, more in (
        ({"mesh": mesh["dp"]}, {}),
        ({"process_group": mesh.get_group("dp")}, {"over": None}),  # mesh["tp"], which torch makes anew each time
        ({}, {}),
    ):
        model = nn.Linear(3, 3)
        optimizer = ZeroOptimizer(model, **where)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.clip_grad_norm_(1.0, **dict.fromkeys(more, mesh["tp"]))
                optimizer.step()
                optimizer.zero_grad()
        assert len(optimizer._engine.model_part._known) == len(more), "one connection for all clips"
        found.append("; ".join(str(each.message) for each in seen))
        optimizer.close()
    return found


def train_parts(group: dist.ProcessGroup, rank: int, parts: int, stage: int, how: str) -> tuple[nn.Module, Any]:
    """Train a part of a model, on a mesh of (replicate, shard, part)."""
    copies = dist.get_world_size() // parts
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (copies, 1, parts), mesh_dim_names=names)
    model = Part(mesh.get_local_rank("tp"))
    data = mesh["replicate", "shard"]
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=data, lr=0.1)
    over: Any = mesh["tp"] if how == "a mesh" else mesh.get_group("tp")
    found = clipped()(OnPart(model, optimizer, over, [model.shared.weight, model.shared.bias]))
    optimizer.close()
    return model, found


def train_stages(group: dist.ProcessGroup, rank: int, stage: int, parts: int) -> tuple[nn.Module, Any]:
    """Train a part of a stage, on a mesh of (data, pipeline 2, tensor)."""
    copies = dist.get_world_size() // (2 * parts)
    mesh = init_device_mesh("cpu", (copies, 2, parts), mesh_dim_names=("dp", "pp", "tp"))
    place = mesh.get_local_rank("pp")
    model = stage_part(place, place * parts + mesh.get_local_rank("tp"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=mesh["dp"], lr=0.1)
    found = clipped()(OnPart(model, optimizer, [mesh["tp"], mesh["pp"]], is_shared))
    optimizer.close()
    return model, found


def _part_on(ranks: Any, stage: int) -> tuple[Part, ZeroOptimizer, DeviceMesh] | None:
    """Return a part of the model on a mesh of (dp, tp), with its optimizer; None on other processes."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    model = Part(mesh.get_local_rank("tp"))
    return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=mesh["dp"], lr=0.1, divisor=2), mesh


def save_parts(group: dist.ProcessGroup, rank: int, folder: Path, steps: int) -> list[int]:
    """Train and save each step, on two ranks of each of two parts. Return the steps that this part has at the end."""
    built = _part_on([[0, 1], [2, 3]], 3)
    assert built is not None
    model, optimizer, mesh = built
    with CheckpointManager(folder, optimizer, max_to_keep=1) as manager:
        for step in range(steps):
            take_step(OnPart(model, optimizer, mesh["tp"], is_shared), step)
            manager.save(step + 1)
    zero.save(folder / "one", optimizer, step=steps)
    found = manager.all_steps()
    optimizer.close()
    return found


def resume_parts(group: dist.ProcessGroup, rank: int, folder: Path, step: int | None) -> Any:
    """Restore on one rank of each part, and take one more step. Return the step and the model, or the error."""
    built = _part_on([[0, 1]], 1)
    if built is None:
        return None
    model, optimizer, mesh = built
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with CheckpointManager(folder, optimizer) as manager:
                restored = manager.restore(step)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if restored is None:
        return None
    take_step(OnPart(model, optimizer, mesh["tp"], is_shared), restored.step)
    optimizer.close()
    return restored.step, model, [str(each.message) for each in seen if "every part" in str(each.message)]


def load_part(group: dist.ProcessGroup, rank: int, path: Path) -> str:
    """Return the error of `zero.load` on one rank of each part."""
    built = _part_on([[0, 1]], 2)
    return "" if built is None else error_of(zero.load, path, built[1])


def _of_integers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False))
    for layer in model:
        with torch.no_grad():
            layer.weight.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight) % 5 - 2)
    return model


def _integer_losses(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Take steps over small integers. Return this rank's losses."""
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randint(-2, 3, (3, 6), generator=generator).float()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside_fsdp2(group: dist.ProcessGroup, rank: int) -> tuple[Any, Any, list[float], list[float]]:
    """Train on a mesh of (replicate 2, shard 2), and by FSDP2. Return the parameters and the losses of both."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    ours, theirs = _of_integers(), _of_integers()
    optimizer = ZeroOptimizer(ours, torch.optim.SGD, stage=3, mesh=mesh, lr=0.5)
    losses = _integer_losses(ours, optimizer, rank)
    optimizer.close()
    fully_shard(theirs, mesh=mesh)
    their_losses = _integer_losses(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), rank)
    whole = {name: value.full_tensor().detach() for name, value in theirs.named_parameters()}  # type: ignore[operator]
    return {name: value.detach().clone() for name, value in ours.named_parameters()}, whole, losses, their_losses
