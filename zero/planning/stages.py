"""The bytes that one rank holds at each stage, next to those of the plain loop, for any class of optimizers.

Knows: how to find the states that a class keeps. Does not know: the formulas (`memory`), ranks other than the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.stage import STAGES
from .memory import MemoryPlan, RankBytes
from .model import Model
from .setting import OptimizerStates, PlanSetting

PLAIN = "plain loop"


@dataclass(frozen=True, kw_only=True)
class _Setting(PlanSetting):
    """A setting with other classes than those that have a name."""

    kept: tuple[OptimizerStates, ...]

    @property
    def classes(self) -> tuple[OptimizerStates, ...]:
        return self.kept


def bytes_by_stage(
    model: Model,
    classes: Sequence[type[Optimizer]],
    arguments: Mapping[str, Any],
    ranks: int,
    sharding_factor: int | None = None,
    **options: Any,
) -> dict[str, RankBytes]:
    """Return the bytes of `PLAIN` on one process, and of rank 0 at "stage 0" to "stage 3".

    Args:
        model: what is trained.
        classes: the optimizer's class, and perhaps a second one for the matrices of units.
        arguments: of both classes.
        ranks: their number, on one host.
        sharding_factor: as in `PlanSetting`, where a stage shards.
        options: further fields of `PlanSetting`.
    """
    options["kept"] = tuple(states_of(kind, arguments) for kind in classes)
    settings = {PLAIN: _Setting(stage=2, **options)}  # alone, a rank keeps one copy of each: at stage 0 sums lie apart
    for stage in STAGES:
        factor = sharding_factor if stage else None
        settings[f"stage {stage}"] = _Setting(stage=stage, world_size=ranks, sharding_factor=factor, **options)
    plan = MemoryPlan(model)
    return {name: plan.of_rank(setting, 0) for name, setting in settings.items()}


def states_of(kind: type[Optimizer], arguments: Mapping[str, Any]) -> OptimizerStates:
    """Return the states that a class keeps, found by a step of one small matrix."""
    matrix = nn.Parameter(torch.ones(2, 3))
    matrix.grad = torch.ones_like(matrix)
    optimizer: Any = kind([matrix], **arguments)
    at_construction = bool(optimizer.state)
    optimizer.step()
    kept = [value for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    large = sum(value.shape == matrix.shape for value in kept)
    return OptimizerStates(large, sum(value.numel() == 1 for value in kept), at_construction)
