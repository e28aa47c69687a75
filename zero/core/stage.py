"""The stage table: which of parameters, gradients and optimizer states each stage shards.

A stage is a row of data, and no code outside this table branches on a stage's number. Does not know: autograd,
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from .layout import BucketSpec, Dtypes, ParameterSpec


class Placement(Enum):
    """Which elements of a bucket a rank holds: all (WHOLE), its own shard (SHARD), or all, but of a sum only this
    rank's contribution (PARTIAL)."""

    WHOLE = "whole"
    SHARD = "shard"
    PARTIAL = "partial"

    def interval(self, bucket: BucketSpec, rank: int) -> tuple[int, int]:
        """Return the begin and the end of the elements of ``bucket`` that ``rank`` holds."""
        return bucket.owned(rank) if self is Placement.SHARD else (0, bucket.numel)


@dataclass(frozen=True)
class Stage:
    """A row of the stage table."""

    number: int
    parameters: Placement
    gradients: Placement
    states: Placement

    @property
    def keeps_full_grads(self) -> bool:
        """Whether a rank keeps whole gradient buffers. Otherwise a bucket has scratch memory while it is reduced."""
        return self.gradients is Placement.WHOLE

    @property
    def reductions_in_flight(self) -> int:
        """The number of buckets that are reduced at a time, besides those between replicas: with a direct exchange at
        most three buckets of scratch memory."""
        return 2 if self.keeps_full_grads else 1

    def reduced_backwards(self, backwards: int) -> int:
        """Return how many backwards of a step are best outside ``no_sync``: a rank that keeps whole gradients adds them
        up by itself, and one that does not would keep whole ones under ``no_sync``."""
        return 1 if self.keeps_full_grads else backwards

    def contributes_in_place(self, dtypes: Dtypes) -> bool:
        """Return whether a rank's contribution lies in the whole gradient buffer that it keeps.

        It does not if that buffer holds the means, which have another dtype.
        """
        return self.keeps_full_grads and not (self.grads_replicated and dtypes.widens)

    def sum_lies_apart(self, dtypes: Dtypes, *, is_mean: bool = False) -> bool:
        """Return whether the running sum of a rank's shard has memory of its own, outside the whole gradient buffer.

        ``is_mean``: one rank divides by 1, so its sum is the mean, and only one of them is kept.
        """
        return not self.keeps_full_grads or (self.grads_replicated and not is_mean) or dtypes.widens

    def gradient_buffers(self, dtypes: Dtypes, *, is_mean: bool) -> list[tuple[Placement, torch.dtype]]:
        """Return placement and dtype of each buffer of a bucket's gradients that a rank keeps. ``is_mean``: as of
        `sum_lies_apart`."""
        whole = dtypes.reduce_dtype if self.contributes_in_place(dtypes) else dtypes.accumulate_dtype
        found = [(Placement.WHOLE, whole)] if self.keeps_full_grads else []
        return found + [(Placement.SHARD, dtypes.accumulate_dtype)] * self.sum_lies_apart(dtypes, is_mean=is_mean)

    @cached_property  # asked for each bucket of a step
    def grads_replicated(self) -> bool:
        """Whether every rank updates all parameters, and so needs the whole mean gradient after each reduction."""
        return self.states is Placement.WHOLE

    @cached_property  # asked for each bucket of a step
    def parameters_are_gathered(self) -> bool:
        """Whether parameters are gathered after a step.

        That is so if every rank holds them whole, but owners update only their shards.
        """
        return self.states is Placement.SHARD and self.parameters is Placement.WHOLE

    def update_interval(self, bucket: BucketSpec, rank: int) -> tuple[int, int]:
        """Return the interval of ``bucket`` that ``rank`` updates and whose states it holds."""
        return self.states.interval(bucket, rank)

    def passes(self, synchronised: int, *, means_are_shown: bool = True) -> dict[str, int]:
        """Return the passes of a step over the trainable elements, by the name of the dtype in which they travel.

        One pass sends (W - 1) times the number of elements, summed over the ranks.

        Args:
            synchronised: how many backwards of each rank are outside ``no_sync``, at least 1.
            means_are_shown: whether means are gathered after each backward, on stages where every rank needs them
                whole. Otherwise they are gathered once a step.
        """
        means = synchronised if means_are_shown else 1
        return {
            "reduce_dtype": synchronised,
            "accumulate_dtype": means if self.grads_replicated else 0,
            "param_dtype": int(self.parameters_are_gathered),
        }

    def gathers(self, backwards: int) -> int:
        """Return the passes of a step over all elements in units. Each backward has one forward."""
        return 2 * backwards if self.parameters is Placement.SHARD else 0


FOLDS_IN_FLIGHT = 2  # buckets at least, of which each waits for all hosts, while the next one's gradients come
GATHERS_IN_FLIGHT = 2  # of weights, or of means; for each, a copy of the rank's shard may be kept for its peers to read
STATES_AHEAD = 1  # buckets whose offloaded states are read while a bucket is stepped
STATES_BEHIND = 1  # buckets whose states may be copied back to the host meanwhile

_W, _S = Placement.WHOLE, Placement.SHARD
STAGES: dict[int, Stage] = {
    stage.number: stage
    for stage in (Stage(0, _W, _W, _W), Stage(1, _W, _W, _S), Stage(2, _W, _S, _S), Stage(3, _S, _S, _S))
}


def stage_of(number: int) -> Stage:
    """Return the row of stage ``number``. Raises `ValueError` if there is none."""
    if isinstance(number, bool) or number not in STAGES:
        raise ValueError(f"stage must be one of {sorted(STAGES)}, not {number!r}")
    return STAGES[number]


def keeps_masters_alone(bucket: BucketSpec, *, trainable: bool) -> bool:
    """Return whether a rank keeps the master weights of its shard alone, at a stage that shards parameters.

    That is so where units are gathered on an accelerator: a gather rounds the master weights. Parameters that were not
    ``trainable`` at construction may have none.
    """
    gathered_there = bucket.offloaded or (bucket.world_size > 1 and bucket.on_accelerator)
    return trainable and gathered_there and bucket.dtypes.has_master


def step_device(spec: ParameterSpec | BucketSpec) -> str:
    """Return the device, as text, on which the class steps a parameter, or those of a bucket."""
    return "cpu" if spec.stepped_on_host else spec.device


def buckets_in_flight(stage: Stage, *, folds: bool) -> int:
    """Return how many buckets are reduced at a time, besides `sums_under_way`. Each holds its contributions. ``folds``:
    as in `collectives.folds`."""
    return max(stage.reductions_in_flight, FOLDS_IN_FLIGHT if folds else 0)


def sums_under_way(replicas: int) -> int:
    """Return how many buckets may be on their way through the replicas and back, each of which waits for the one before
    and then for the one behind it: one bucket on every hop. They hold no memory but the sum, which a rank keeps.
    """
    return 2 * (replicas - 1)


def why_one_device(stage: Stage, offloads: bool) -> str:
    """Return the reason why trained parameters must share a device, or "". ``offloads``: whether states are elsewhere
    between steps."""
    if stage.parameters is Placement.SHARD:
        return (
            f"at stage {stage.number}: autograd has a thread for each device, and two of them would gather units in an "
            "order that differs between ranks"
        )
    return "with offload=" if offloads else ""


def units_share_buckets(ranks: int, *, in_common: bool) -> bool:
    """Return whether buckets hold parameters of any unit, since no unit is gathered. Shards of a unit then differ in
    length.

    ``ranks``: how many share a copy; ``in_common``: whether these have common memory for the parameters.
    """
    return ranks == 1 or in_common


def check_sharding_factor(factor: int | None, world_size: int) -> None:
    """Raise `ValueError` if ``factor`` ranks cannot share one copy of the tensors that are sharded."""
    if factor is None:
        return
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    if isinstance(factor, bool) or not isinstance(factor, int) or factor not in divisors:
        raise ValueError(
            f"sharding_factor must divide the number of ranks, {world_size}, so be one of {divisors}, not {factor!r}"
        )


def check_reshard(reshard: bool | int | Callable[..., bool], sharding_factor: int) -> int:
    """Return how many ranks share the copy of a unit that is kept between its forward and its backward.

    That is ``sharding_factor`` if the unit is resharded after the forward (a function says for which units that is so),
    and 1 if it is kept whole. Raises `ValueError` for an invalid ``reshard``.
    """
    divisors = [number for number in range(1, sharding_factor + 1) if sharding_factor % number == 0]
    if isinstance(reshard, bool) or callable(reshard):
        return sharding_factor if reshard else 1
    if not isinstance(reshard, int) or reshard not in divisors:
        raise ValueError(
            "reshard_after_forward must be True, False, a function of a unit's module, or a number that divides the "
            f"{sharding_factor} ranks that share a copy, so one of {divisors}, not {reshard!r}"
        )
    return reshard


def check_prefetch_depth(depth: int) -> None:
    """Raise `ValueError` unless ``depth`` units can be gathered ahead of their use."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"prefetch_depth must be a number of units, at least 0, not {depth!r}")
