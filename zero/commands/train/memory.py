"""The bytes that rank 0 of a run would hold at each stage, and one process in the plain loop: by formulas.

Knows: `zero.planning`, which has the formulas, and how to count the states that a class keeps. Does not know: what was
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.stage import STAGES
from ...planning.memory import MemoryPlan
from ...planning.models.shapes import model_of
from ...planning.setting import OptimizerStates, PlanSetting
from .optimizers import arguments_of, classes_of
from .settings import TrainConfig

PLAIN = "plain loop"
KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class _Setting(PlanSetting):
    """A setting whose classes are those of the run, whatever their names are."""

    kept: tuple[OptimizerStates, ...] = ()

    @property
    def classes(self) -> tuple[OptimizerStates, ...]:
        return self.kept


def bytes_by_stage(config: TrainConfig, model: nn.Module, ranks: int) -> dict[str, dict[str, int]]:
    """Return the bytes of parameters, gradients and optimizer states in the plain loop, and on rank 0 at each stage.

    The plain loop holds each of them once, as one rank does at stage 2. ``model``: without an optimizer.
    """
    plan = MemoryPlan(model_of(model, config.preset))
    kept = tuple(_states_of(kind, arguments_of(config)) for kind in classes_of(config))
    common: Mapping[str, Any] = {
        "kept": kept,
        "fused": config.fused,
        "device": config.device or "cpu",
        "mixed_precision": config.mixed_precision,
        "offload": config.offload,
        "bucket_cap_mb": None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
    }
    settings = {PLAIN: _Setting(stage=2, **common)}
    for stage, row in STAGES.items():
        factor = None if row.number == 0 else config.sharding_factor
        settings[f"stage {stage}"] = _Setting(stage=stage, world_size=ranks, sharding_factor=factor, **common)
    found = {name: plan.of_rank(setting, 0) for name, setting in settings.items()}
    return {name: {kind: getattr(held, kind) for kind in KINDS} for name, held in found.items()}


def _states_of(kind: type[Optimizer], arguments: Mapping[str, Any]) -> OptimizerStates:
    """Return what a class keeps: it steps one matrix."""
    matrix = nn.Parameter(torch.ones(2, 3))
    matrix.grad = torch.ones_like(matrix)
    optimizer: Any = kind([matrix], **arguments)
    at_construction = bool(optimizer.state)
    optimizer.step()
    kept = [value for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    large = sum(value.shape == matrix.shape for value in kept)
    return OptimizerStates(large, sum(value.numel() == 1 for value in kept), at_construction)
