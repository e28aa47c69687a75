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

from .layout import Bucket, Dtypes, Layout, ParameterSpec, sharded_bytes


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

    def contributes_in_place(self, dtypes: Dtypes) -> bool:
        """The whole buffer that a rank keeps for gradients is also what it contributes from: not where the means lie
        there, in another dtype."""
        return self.contributions_stay and not (self.means_are_gathered and dtypes.widens)

    def sum_lies_apart(self, dtypes: Dtypes) -> bool:
        """The running sum of a rank's slice has memory of its own, rather than its place in that buffer."""
        return not self.contributions_stay or self.means_are_gathered or dtypes.widens

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

    def passes(self, synchronised: int, *, means_are_shown: bool = True) -> dict[str, int]:
        """Passes a step over the trainable elements, each of (W - 1) times their number summed over the ranks, by which
        of a bucket's dtypes they are in.

        ``synchronised``: backwards of each rank outside ``no_sync``, at least 1. ``means_are_shown``: after each, where
        every rank needs whole means; otherwise these are gathered once.
        """
        means = synchronised if means_are_shown else 1
        return {
            "travel": synchronised,
            "accumulate": means if self.means_are_gathered else 0,
            "compute": int(self.parameters_are_gathered),
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


def formula_bytes(
    layout: Layout,
    stage: Stage,
    state_tensors: int,
    rest: Layout | None = None,
    kept_by: int | None = None,
    *,
    slices_are_shown: bool = False,
) -> dict[str, int]:
    """Bytes of one rank by kind, from the elements alone (no padding).

    ``state_tensors``: tensors as large as the parameter that the optimizer keeps for it (Adam: 2); a master weight that
    is kept beside the parameter is one more. ``rest``: of parameters that are stored beside those of ``layout`` and not
    updated. ``kept_by``: of `check_reshard`; None: all. ``gathered_peak`` and ``scratch_peak`` are bounds: the root's
    rest and the two largest units, and what is kept for the backward; three of the largest bucket, and where
    ``slices_are_shown`` to peers who read them where they lie, a copy of this rank's slices of those units.
    """

    def total(which: str, among: Sequence[ParameterSpec]) -> int:
        return sum(spec.numel * spec.dtypes.itemsize(which) for spec in among)

    trainable = [spec for spec in layout.parameters if spec.trainable]
    stored = total("compute", layout.parameters)
    if rest is not None:
        stored += total("compute", rest.parameters)
    units = _unit_bytes(layout, rest)
    all_units = sum(units.values())
    gathered = units.pop(0, 0) + sum(sorted(units.values())[-2:])
    shown = sharded_bytes(gathered, layout.world_size) if slices_are_shown else 0
    if kept_by is not None and kept_by < layout.world_size:
        gathered = all_units if kept_by == 1 else gathered + sharded_bytes(all_units, kept_by)

    def placed(nbytes: int, placement: Placement) -> int:
        return nbytes if placement is Placement.WHOLE else sharded_bytes(nbytes, layout.world_size)

    contributed = [spec for spec in trainable if stage.contributes_in_place(spec.dtypes)]
    means = [spec for spec in trainable if stage.means_are_gathered and not stage.contributes_in_place(spec.dtypes)]
    summed = [spec for spec in trainable if stage.sum_lies_apart(spec.dtypes)]
    kept = [spec for spec in trainable if spec.dtypes.has_master]
    states = state_tensors * total("master", trainable) + total("master", kept)
    return {
        "parameters": placed(stored, stage.parameters),
        "gradients": total("travel", contributed)
        + total("accumulate", means)
        + sharded_bytes(total("accumulate", summed), layout.world_size),
        "optimizer": placed(states, stage.states),
        "gathered_peak": gathered if stage.gathers(1) and layout.world_size > 1 else 0,
        "scratch_peak": 3 * max((b.numel * b.dtypes.accumulate.itemsize for b in layout.buckets), default=0) + shown,
    }


def _unit_bytes(layout: Layout, rest: Layout | None) -> dict[int, int]:
    """Bytes of each unit when it is whole, padding included."""
    found: dict[int, int] = {}
    for which in (layout,) if rest is None else (layout, rest):
        for bucket in which.buckets:
            for unit, first, last in which.runs(bucket):
                part = bucket.part(first, last)
                found[unit] = found.get(unit, 0) + part.numel * part.dtypes.compute.itemsize
    return found


def formula_traffic(
    layout: Layout,
    stage: Stage,
    backwards: int,
    synchronised: int,
    rest: Layout | None = None,
    *,
    units_travel: bool = True,
    means_are_shown: bool = True,
    replicas: int = 1,
    kept_by: int | None = None,
) -> int:
    """Payload bytes that a step sends, summed over the ranks, with one forward to each backward.

    In each of ``replicas`` of W ranks, (W - 1) x (passes x padded trainable elements + gathers x padded elements of all
    units), and between them each sum twice, on the way through all and on the way home. A backward finds the
    root's rest and the last unit still here: they are gathered once, for the forward. The other gathers for a backward
    are among ``kept_by`` ranks (of `check_reshard`; None: all W). This supposes that forwards enter
    every unit once, in order of registration, and that backwards reach every unit. ``units_travel``: False where every
    rank sees every slice of a unit in memory that all share.
    """
    trainable = [bucket for bucket in layout.buckets if layout.parameters[bucket.slots[0].parameter].trainable]
    passed = sum(
        passes * bucket.numel * bucket.dtypes.itemsize(which)
        for which, passes in stage.passes(synchronised, means_are_shown=means_are_shown).items()
        for bucket in trainable
    )
    units = _unit_bytes(layout, rest) if units_travel else {}
    still_here = sum(units[unit] for unit in {0, max(units, default=0)} & set(units))
    ranks, forwards = layout.world_size, stage.gathers(backwards) // 2
    near = ranks if kept_by is None else kept_by
    again = forwards * (sum(units.values()) - still_here) * (near - 1) * (ranks // near)
    sums = synchronised * sum(bucket.numel * bucket.dtypes.accumulate.itemsize for bucket in trainable)
    inside = (ranks - 1) * (passed + forwards * sum(units.values())) + again
    return replicas * inside + 2 * (replicas - 1) * sums


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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True where two tensors of one dtype are equal as bits: -0.0 and NaN count."""
    wide = torch.int64 if a.numel() * a.itemsize % 8 == 0 == (a.data_ptr() | b.data_ptr()) % 8 else torch.uint8
    return torch.equal(a.view(wide), b.view(wide))


# -- looking at values, which on an accelerator holds up the host until the device has done what it was told -----------


def seen_at_once(device: torch.device) -> bool:
    """True where the host reads a value without waiting for anything."""
    return device.type == "cpu"


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(a: Tensor, b: Tensor) -> Tensor:
    """The first element in which two 1-D tensors of one floating dtype, not empty, differ as bits, or -1: 0-dim, where
    they are. Nobody waits for it here."""
    integers = INTEGERS[a.itemsize]
    different = a.view(integers) != b.view(integers)
    return torch.where(different.any(), different.view(torch.uint8).argmax(), -1)


def read_scalars(scalars: Sequence[Tensor]) -> list[int]:
    """What 0-dim tensors say, all with one look."""
    if not scalars:
        return []
    row = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
    found: list[int] = row.tolist()  # host synchronisation: whoever calls says why
    return found


def all_zero(tensors: Sequence[Tensor]) -> list[bool]:
    """Of each tensor, all on one kind of device, whether it has no element but zeros."""
    if not tensors or seen_at_once(tensors[0].device):
        return [not torch.count_nonzero(tensor) for tensor in tensors]
    return [not found for found in read_scalars([tensor.any() for tensor in tensors])]
