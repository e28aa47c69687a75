"""A model whose parts are on several ranks, the same model in one process, and programs of real processes.

A stage of a pipeline has `shared`, which each of its parts has with the same gradient, and part k has its own `tower`.
The loss of the whole model is the sum of the losses of its modules, so that no part needs another one's outputs.
Processes import the programs by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero
from collectives import Kind, Tag, Transport, on_threads
from collectives.backends.device_mesh import connect_mesh
from collectives.backends.gloo import connect
from zero import CheckpointManager, MixedPrecision, ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.machine.program import Config
from ..support.machine.run import play
from ..support.models import seeded
from ..support.plain import assert_same_bits, assert_same_value
from ..support.sides import AsPlain, Loop, OnRank


class Part(nn.Module):
    """Some parts of a stage. Stages have the same names, and other values; towers differ in size."""

    def __init__(self, *numbers: int, stage: int = 0) -> None:
        super().__init__()
        self.shared = seeded(40 + stage, lambda: nn.Linear(3, 61))
        self.towers = nn.ModuleDict()
        for number in numbers:
            wide = 5 + 8 * number
            made = seeded(10 + number, lambda: nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, 2)))  # noqa: B023
            self.towers[f"tower {number}"] = made

    def forward(self, batch: Tensor) -> Tensor:
        outputs = [module(batch) for module in (self.shared, *self.towers.values())]
        return torch.stack([output.float().square().sum() for output in outputs]).sum()


class Whole(nn.Module):
    """The whole of a model that is cut in two ways: stages of a pipeline, each with as many towers as ``parts``."""

    def __init__(self, parts: int, stages: int = 1) -> None:
        super().__init__()
        numbers = [range(stage * parts, (stage + 1) * parts) for stage in range(stages)]
        self.stages = nn.ModuleList(Part(*towers, stage=stage) for stage, towers in enumerate(numbers))

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([stage(batch) for stage in self.stages]).sum()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(2 + (step + rank) % 3, 3, generator=generator)
    loss: Tensor = model(batch.to(next(model.parameters()).dtype))
    return loss


def is_shared(name: str, parameter: Tensor) -> bool:
    return name.startswith("shared.")


def groups_of(transport: Transport, parts: int, stages: int = 1) -> tuple[Transport, list[Transport]]:
    """Return the ranks that hold this rank's part; the parts of its stage and, if there are several, the stages."""
    size = stages * parts
    number, begin = transport.rank % size, transport.rank - transport.rank % size
    data = transport.split(range(number, transport.world_size, size))
    stage = begin + number - number % parts
    tensor = transport.split(range(stage, stage + parts), 1)
    pipeline = transport.split(range(begin + number % parts, begin + size, parts), 2)
    return data, [tensor, pipeline][: 1 + (stages > 1)]


class OnPart(OnRank):
    """A rank of a part, whose clip is by the norm of the whole model."""

    def __init__(self, model: Any, optimizer: ZeroOptimizer, over: Any, replicated: Any = is_shared) -> None:
        super().__init__(model, optimizer)
        self.clip = lambda max_norm, norm_type=2.0: optimizer.clip_grad_norm_(
            max_norm, norm_type, over=over, replicated=replicated
        )


def part_of(rank: int, parts: int, stages: int = 1) -> Part:
    number = rank % (parts * stages)
    return Part(number, stage=number // parts)


def assert_same_parts(
    loop: Loop, parts: int, copies: int, stages: int = 1, precision: MixedPrecision | None = None, **settings: Any
) -> None:
    """Assert that a loop has the bits of the whole model's loop, on threads: ``copies`` ranks of each part."""

    def program(transport: Transport) -> tuple[nn.Module, Any]:
        data, over = groups_of(transport, parts, stages)
        model, more = part_of(transport.rank, parts, stages), {"mixed_precision": precision, **settings}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, process_group=data, **more)
        found = loop(OnPart(model, optimizer, over if stages > 1 else over[0]))
        optimizer.close()
        return model, found

    results = on_threads(parts * stages * copies, program, timeout=BOUND)
    compare_parts(loop, parts, copies, stages, results, precision)


def compare_parts(
    loop: Loop, parts: int, copies: int, stages: int, results: Sequence[tuple[nn.Module, Any]], precision: Any = None
) -> None:
    """Compare the part of each rank, and what its loop returned, with the whole model's plain loop."""
    whole = Whole(parts, stages)
    expected = loop(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), copies, precision))
    for rank, (model, found) in enumerate(results):
        stage = whole.stages[rank % (stages * parts) // parts]
        for name, parameter in model.named_parameters():
            assert_same_bits(parameter, stage.get_parameter(name), f"rank {rank}, {name}")
        assert_same_value(found, expected, f"rank {rank}, what the loop returns")


def clipped(side: Any) -> list[Tensor]:
    """Clip by another norm in each step, and return the norms."""
    norms = []
    for step, norm_type in enumerate((2.0, float("inf"), 3.0)):
        side.train(lambda model, rank, step=step: loss_of(model, step, rank))
        norms.append(side.clip(0.5, norm_type))
        side.step()
        side.clear()
    return norms


def take_step(side: Any, step: int) -> None:
    """Take a step of two micro-batches, which the ranks of a part share."""
    for number in range(2):
        count = side.world_size if isinstance(side, AsPlain) else side.optimizer.world_size
        if number % count in side.ranks:
            side.train(lambda model, _, number=number: loss_of(model, step, number), ranks=[number % count])
    side.clip(0.5)
    side.step()
    side.clear()


# -- programs of processes ---------------------------------------------------------------------------------------------


def on_mesh(group: dist.ProcessGroup, rank: int, config: Config, commands: Any, ranks: Any) -> Any:
    """Run a program on a mesh of some processes. None on the others, which take part in making the mesh alone."""
    mesh = DeviceMesh("cpu", ranks)
    return None if mesh.get_coordinate() is None else play(config, commands, mesh)


def on_group(group: dist.ProcessGroup, rank: int, config: Config, commands: Any) -> Any:
    return play(config, commands, group)


def parts_of(group: dist.ProcessGroup, rank: int, ranks: Any) -> Any:
    """Let parts of a mesh, or else of the group, exchange their ranks. None on processes outside of the mesh."""
    mesh = None if ranks is None else DeviceMesh("cpu", ranks)
    if mesh is not None and mesh.get_coordinate() is None:
        return None
    backend = (connect(group) if mesh is None else connect_mesh(mesh)).backend
    part = Transport(backend.part([[0, 2, 4], [1, 3, 5]] if ranks is None else ranks))
    return [int(each) for each in part.exchange(str(rank).encode(), Tag(Kind.EXCHANGE, "a test"))]


def by_groups_of_the_mesh(group: dist.ProcessGroup, rank: int, config: Config, commands: Any, ranks: Any) -> Any:
    """Run a program on a mesh as with NCCL, in whose place are gloo's own collectives. No group of a part is made."""
    with (
        mock.patch("collectives.topology._all_have_nccl", return_value=True),
        mock.patch("collectives.backends.gloo._Parts.of", side_effect=AssertionError("the mesh has these groups")),
    ):
        return on_mesh(group, rank, config, commands, ranks)


def errors_of_meshes(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Return the errors of a model that has a DTensor, of one on another device, and of meshes that differ."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    square, transposed = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), square, [Replicate(), Shard(0)]))
    with torch.device("meta"):
        on_meta = error_of(ZeroOptimizer, nn.Linear(3, 3), mesh=square)
    differ = error_of(ZeroOptimizer, nn.Linear(3, 3), mesh=square if rank else transposed)
    return [error_of(ZeroOptimizer, parallel, mesh=square), on_meta, differ]


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


def train_parts(
    group: dist.ProcessGroup, rank: int, parts: int, stages: int, stage: int, as_group: bool = False
) -> tuple[nn.Module, Any]:
    """Train a part of a stage of a model, on a mesh of (data, 1, pipeline, tensor). ``stage``: of the optimizer."""
    copies = dist.get_world_size() // (stages * parts)
    mesh = init_device_mesh("cpu", (copies, 1, stages, parts), mesh_dim_names=("replicate", "shard", "pp", "tp"))
    model, data = part_of(rank, parts, stages), mesh["replicate", "shard"]
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=data, lr=0.1)
    shared = "sharding factor 1 (" if copies > 1 else ""
    assert f"mesh (replicate {copies}, shard 1), {shared}" in str(optimizer.describe()) or not stage
    over: Any = [mesh["tp"], mesh["pp"]] if stages > 1 else mesh.get_group("tp") if as_group else mesh["tp"]
    found = clipped(OnPart(model, optimizer, over))
    optimizer.close()
    return model, found


def _part_on(ranks: Any, stage: int) -> tuple[OnPart, ZeroOptimizer] | None:
    """Return a part of the model on a mesh of (dp, tp), with its optimizer; None on other processes."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    model = Part(mesh.get_local_rank("tp"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=mesh["dp"], lr=0.1, divisor=2)
    return OnPart(model, optimizer, mesh["tp"]), optimizer


def save_parts(group: dist.ProcessGroup, rank: int, folder: Path, steps: int) -> list[int]:
    """Train and save each step, on two ranks of each of two parts. Return the steps that this part has at the end."""
    side, optimizer = _part_on([[0, 1], [2, 3]], 3)  # type: ignore[misc]
    with CheckpointManager(folder, optimizer, max_to_keep=1) as manager:
        for step in range(steps):
            take_step(side, step)
            manager.save(step + 1)
    zero.save(folder / "one", optimizer, step=steps)
    return manager.all_steps()


def resume_parts(group: dist.ProcessGroup, rank: int, folder: Path, step: int | None) -> Any:
    """Restore on one rank of each part, and take one more step. Return the step and the model, or the error."""
    if (built := _part_on([[0, 1]], 1)) is None:
        return None
    side, optimizer = built
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with CheckpointManager(folder, optimizer) as manager:
                restored = manager.restore(step)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    assert restored is not None
    take_step(side, restored.step)
    optimizer.close()
    return restored.step, side.model, [str(each.message) for each in seen if "every part" in str(each.message)]


def load_part(group: dist.ProcessGroup, rank: int, path: Path) -> str:
    """Return the error of `zero.load` on one rank of each part."""
    built = _part_on([[0, 1]], 2)
    return "" if built is None else error_of(zero.load, path, built[1])
