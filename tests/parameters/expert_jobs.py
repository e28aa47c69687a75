"""Programs with ignored experts on real processes, which import them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero
from zero import ZeroOptimizer

from .experts import EXPERTS, Pair, Sparse


class OnMesh(Pair):
    """A pair of optimizers on meshes of (ranks with the same expert, experts).

    ``places``: of `places_of`.
    """

    def __init__(self, places: tuple[dict[str, Any], dict[str, Any]], ranks: int, *arguments: Any, **more: Any) -> None:
        self.build(dist.get_rank(), ranks, places, *arguments, **more)


def places_of(count: int, how: str, experts: int = EXPERTS) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the arguments that name the ranks of each optimizer, the first ``count`` processes: 1, or a multiple of
    the ``experts``. All processes.

    None on the others. ``how``: the ranks of the first optimizer as "a mesh" of two dimensions, "a row" of one, or "a
    group".
    """
    ranks, group = torch.arange(count), dist.new_group(range(count))
    of_group, row = {"process_group": group}, DeviceMesh("cpu", ranks)
    if count == 1:
        return None if row.get_coordinate() is None else (of_group, of_group)
    mesh = DeviceMesh("cpu", ranks.view(-1, experts), mesh_dim_names=("same", "experts"))
    if mesh.get_coordinate() is None:
        return None
    return {"a mesh": {"mesh": mesh}, "a row": {"mesh": row}, "a group": of_group}[how], {"mesh": mesh["same"]}


def train(
    group: dist.ProcessGroup,
    rank: int,
    count: int,
    stages: tuple[int, int],
    how: str,
    steps: int,
    more: dict[str, Any],
) -> tuple[Sparse, list[Tensor]] | None:
    """Train on the first ``count`` processes. Return the model and the norms; None on the others."""
    if (places := places_of(count, how, more.get("count", EXPERTS))) is None:
        return None
    pair = OnMesh(places, count, stages, **more)
    norms = pair.train(range(steps))
    return pair.close(), norms


def save(group: dist.ProcessGroup, rank: int, folder: Path, stages: tuple[int, int], steps: int) -> None:
    """Train on all processes, and save both optimizers."""
    count = dist.get_world_size()
    places = places_of(count, "a mesh")
    assert places is not None
    pair = OnMesh(places, count, stages, frozen=True)
    pair.train(range(steps))
    zero.save(folder / "dense", pair.dense)
    zero.save(folder / f"expert-{pair.expert}", pair.own)
    pair.close()


def resume(
    group: dist.ProcessGroup, rank: int, folder: Path, count: int, stages: tuple[int, int], how: str, steps: range
) -> Sparse | None:
    """Load both optimizers on the first ``count`` processes, and train on."""
    if (places := places_of(count, how)) is None:
        return None
    pair = OnMesh(places, count, stages, frozen=True)
    zero.load(folder / "dense", pair.dense, rng=False)
    zero.load(folder / f"expert-{pair.expert}", pair.own, rng=False)
    pair.train(steps)
    return pair.close()


class Gated(nn.Module):
    """A layer behind one that is each rank's own, which no optimizer has."""

    def __init__(self, rank: int, ranks: int = 1) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(ranks)])
        self.layer = nn.Linear(3, 2)
        with torch.no_grad():
            for number, each in enumerate(self.own):
                each.weight.copy_(torch.eye(3) * (1.5 + rank + number))  # type: ignore[operator]
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        found: Tensor = self.layer(self.own[number](x)).float().square().sum()
        return found


def gated_loss(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of a micro-batch, in the plain loop's model of all ranks or in that of one."""
    loss: Tensor = model(torch.full((1, 3), 1.0 + rank + step), rank if len(model.own) > 1 else 0)
    return loss


def joined(group: dist.ProcessGroup, rank: int, stage: int, counts: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """Train inside `join` behind a layer that is ignored. Return the layer, and the ignored weight."""
    model = Gated(rank)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, lr=0.1, ignored=model.own)
    with optimizer.join():
        for step in range(counts[rank]):
            gated_loss(model, rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return model.layer, model.own[0].weight.detach()  # type: ignore[union-attr, operator, return-value]
