"""The stage table, the formulas that follow from it, and flat storage for parameters.

Knows: which of parameters, gradients and optimizer states a stage shards, and what that means in bytes and traffic.
A stage is a row of data; nothing outside this table asks for a stage's number. Does not know: autograd, optimizers.

The formulas are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), sections 5 and 7, with the optimizer's state counted by its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from .layout import Bucket, Layout, sharded_bytes


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
    def contributions_stay(self) -> bool:
        """A rank keeps whole buffers for gradients, rather than scratch while a bucket travels."""
        return self.gradients is Placement.WHOLE

    @property
    def means_are_gathered(self) -> bool:
        """Every rank steps all parameters, so it needs the whole mean gradient after each reduction."""
        return self.states is Placement.WHOLE

    @property
    def parameters_are_gathered(self) -> bool:
        """Owners step their slices of parameters that everybody holds, so these are gathered after the step."""
        return self.states is Placement.SHARD and self.parameters is Placement.WHOLE

    def stepped(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The interval of ``bucket`` whose states ``rank`` holds and which it updates."""
        return (0, bucket.numel) if self.states is Placement.WHOLE else bucket.owned(rank)

    def passes(self, backwards: int, synchronised: int) -> int:
        """Passes a step over the trainable elements, each of (W - 1) times their number summed over the ranks.

        ``backwards``: of each rank; ``synchronised``: those outside ``no_sync``, at least 1.
        """
        reductions = synchronised
        if self.parameters is Placement.SHARD:
            return reductions + 2 * backwards
        return reductions + (synchronised if self.means_are_gathered else 1)


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


def formula_bytes(layout: Layout, stage: Stage, state_tensors: int) -> dict[str, int]:
    """Bytes of one rank by kind, from the elements alone (no padding).

    ``state_tensors``: tensors as large as the parameter that the optimizer keeps for it (Adam: 2). ``scratch_peak`` is
    a bound: three of the largest bucket.
    """

    def total(which: str, trainable_only: bool = False) -> int:
        return sum(
            spec.numel * getattr(spec.dtypes, which).itemsize
            for spec in layout.parameters
            if spec.trainable or not trainable_only
        )

    def placed(nbytes: int, placement: Placement) -> int:
        return nbytes if placement is Placement.WHOLE else sharded_bytes(nbytes, layout.world_size)

    gradients = placed(total("accumulate", True), stage.gradients)
    if stage.means_are_gathered:  # the undivided running sum of its slices
        gradients += sharded_bytes(total("accumulate", True), layout.world_size)
    return {
        "parameters": placed(total("compute"), stage.parameters),
        "gradients": gradients,
        "optimizer": placed(state_tensors * total("master", True), stage.states),
        "scratch_peak": 3 * max((b.numel * b.dtypes.accumulate.itemsize for b in layout.buckets), default=0),
    }


def formula_traffic(layout: Layout, stage: Stage, backwards: int, synchronised: int) -> int:
    """Payload bytes that a step sends, summed over the ranks: passes x (W - 1) x padded trainable elements."""
    trainable = sum(
        bucket.numel * bucket.dtypes.travel.itemsize
        for bucket in layout.buckets
        if layout.parameters[bucket.slots[0].parameter].trainable
    )
    return stage.passes(backwards, synchronised) * (layout.world_size - 1) * trainable


def strided(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The view of a parameter's slot in a flat tensor."""
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset() + offset)


def flattened(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """``tensor`` as 1-D in the order of ``stride`` (dense); a copy only where its own strides are others."""
    if tuple(tensor.stride()) != tuple(stride) and tensor.numel() > 1:
        tensor = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor with this one's shape and order of dimensions."""
    return tuple(torch.empty_like(tensor, device="meta").stride())
