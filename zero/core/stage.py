"""The stage table: which of parameters, gradients and optimizer states each stage shards.

A stage is a row of data; nothing outside this table asks for a stage's number. Does not know: autograd, optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .layout import Bucket, Dtypes


class Placement(Enum):
    """Whether every rank holds all of something, or its own slices."""

    WHOLE = "whole"
    SHARD = "shard"


@dataclass(frozen=True)
class Stage:
    """A row of the stage table."""

    number: int
    parameters: Placement
    gradients: Placement
    states: Placement

    @property
    def keeps_full_grads(self) -> bool:
        """A rank keeps whole buffers for gradients, rather than scratch while a bucket travels."""
        return self.gradients is Placement.WHOLE

    def contributes_in_place(self, dtypes: Dtypes) -> bool:
        """The whole buffer that a rank keeps for gradients is also what it contributes from: not where the means lie
        there, in another dtype."""
        return self.keeps_full_grads and not (self.grads_replicated and dtypes.widens)

    def sum_lies_apart(self, dtypes: Dtypes) -> bool:
        """The running sum of a rank's slice has memory of its own, rather than its place in that buffer."""
        return not self.keeps_full_grads or self.grads_replicated or dtypes.widens

    @property
    def grads_replicated(self) -> bool:
        """Every rank steps all parameters, so it needs the whole mean gradient after each reduction."""
        return self.states is Placement.WHOLE

    @property
    def parameters_are_gathered(self) -> bool:
        """Owners step their slices of parameters that everybody holds, so these are gathered after the step."""
        return self.states is Placement.SHARD and self.parameters is Placement.WHOLE

    def update_interval(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The interval of ``bucket`` whose states ``rank`` holds and which it updates."""
        return (0, bucket.numel) if self.states is Placement.WHOLE else bucket.owned(rank)

    def passes(self, synchronised: int, *, means_are_shown: bool = True) -> dict[str, int]:
        """Passes a step over the trainable elements, each of (W - 1) times their number summed over the ranks, by which
        of a bucket's dtypes they are in.

        ``synchronised``: backwards of each rank outside ``no_sync``, at least 1. ``means_are_shown``: after each, where
        every rank needs whole means; otherwise these are gathered once.
        """
        means = synchronised if means_are_shown else 1
        return {
            "reduce_dtype": synchronised,
            "accumulate_dtype": means if self.grads_replicated else 0,
            "param_dtype": int(self.parameters_are_gathered),
        }

    def gathers(self, backwards: int) -> int:
        """Passes a step over all elements in units, each with one forward and one backward."""
        return 2 * backwards if self.parameters is Placement.SHARD else 0


_W, _S = Placement.WHOLE, Placement.SHARD
STAGES: dict[int, Stage] = {
    stage.number: stage
    for stage in (Stage(0, _W, _W, _W), Stage(1, _W, _W, _S), Stage(2, _W, _S, _S), Stage(3, _S, _S, _S))
}


def stage_of(number: int) -> Stage:
    """The row of stage ``number``; `ValueError` where there is none."""
    if isinstance(number, bool) or number not in STAGES:
        raise ValueError(f"stage must be one of {sorted(STAGES)}, not {number!r}")
    return STAGES[number]


def check_sharding_factor(factor: int | None, world_size: int, stage: Stage) -> None:
    """Raise `ValueError` where ``factor`` ranks cannot share one copy of what ``stage`` shards."""
    if factor is None:
        return
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    if isinstance(factor, bool) or not isinstance(factor, int) or factor not in divisors:
        raise ValueError(
            f"sharding_factor must divide the number of ranks, {world_size}, so be one of {divisors}, not {factor!r}"
        )
    if stage.states is Placement.WHOLE:
        raise ValueError(f"sharding_factor={factor} with stage {stage.number}, which shards nothing: leave it away")


def check_reshard(reshard: bool | int, sharding_factor: int, stage: Stage) -> int:
    """How many ranks share what is kept of a unit between its forward and its backward: ``sharding_factor`` where it is
    resharded after the forward, 1 where it is kept whole. Raises `ValueError` for what cannot be."""
    divisors = [number for number in range(1, sharding_factor + 1) if sharding_factor % number == 0]
    if reshard is not True and stage.parameters is Placement.WHOLE:
        raise ValueError(
            f"reshard_after_forward={reshard!r} with stage {stage.number}, where every rank holds whole parameters: it "
            "is for stage 3"
        )
    if isinstance(reshard, bool):
        return sharding_factor if reshard else 1
    if not isinstance(reshard, int) or reshard not in divisors:
        raise ValueError(
            f"reshard_after_forward must be True, False, or a number that divides the {sharding_factor} ranks that "
            f"share a copy, so one of {divisors}, not {reshard!r}"
        )
    return reshard


def check_offloaded_parameters(stage: Stage, device: torch.device) -> None:
    """Raise `ValueError` where a rank has no slices of parameters that it could keep on disk."""
    if stage.parameters is Placement.WHOLE:
        raise ValueError(f"offload: parameters=True with stage {stage.number}, where every rank needs all of them")
    if device.type != "cpu":
        raise ValueError(f"offload: parameters=True is for parameters on the CPU, and these are on {device}")
