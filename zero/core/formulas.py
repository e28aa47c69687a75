"""Formulas for the bytes that a rank holds and the traffic of a step.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5
and 7. Here padding is counted, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from .buckets import loads
from .grain import WHOLE
from .layout import BucketSpec, Cuts, Layout, ParameterSpec
from .runs import CUT, adjoins, in_blocks, part_begins, runs
from .stage import FOLDS_IN_FLIGHT, Placement, Stage, keeps_masters_alone, step_device
from .units import ONE_AHEAD, UnitSchedule


@dataclass(frozen=True)
class KeptStates:
    """The states of one bucket that a rank keeps.

    Attributes:
        element_bytes: of an element of the interval that the rank updates, in all tensors as large as a parameter.
        has_masters: whether there are master weights.
        scalar_bytes: of a run, in all tensors of one element.
        stepped: of each slot of the bucket, whether the last step updated its parameter.
        cut: the numbers of the param groups whose runs are cut on the CPU, since their class is not fused.
    """

    element_bytes: int = 0
    has_masters: bool = False
    scalar_bytes: int = 0
    stepped: Sequence[int] = ()
    cut: Collection[int] = ()


@dataclass(frozen=True)
class BucketBytes:
    """The bytes of one bucket on a rank.

    Attributes:
        parameters: the weights with which the model computes.
        gradients: the buffers of gradients, which stay between steps on the CPU.
        states: the optimizer's tensors that are as large as parameters.
        scalars: the optimizer's tensors of one element.
        masters: master weights.
    """

    parameters: int
    gradients: int
    states: int
    scalars: int
    masters: int


def bucket_bytes(
    bucket: BucketSpec,
    specs: Sequence[ParameterSpec],
    stage: Stage,
    rank: int,
    states: KeptStates,
) -> BucketBytes:
    """Return the bytes of a bucket on one rank after a step, exactly, padding included.

    Runs are counted as if the states of all parameters were equal, as they are if each step updated the same ones.

    Args:
        bucket: the bucket.
        specs: the parameter of each slot.
        stage: the row of the stage table.
        rank: its number among the ranks that share a copy.
        states: what the rank keeps for the bucket.
    """
    dtypes, trainable = bucket.dtypes, specs[0].trainable

    def nbytes(placement: Placement, dtype: torch.dtype) -> int:
        begin, end = placement.interval(bucket, rank)
        return (end - begin) * dtype.itemsize

    low, high = stage.update_interval(bucket, rank)
    alone = stage.parameters is Placement.SHARD and keeps_masters_alone(bucket, trainable=trainable)
    is_mean = bucket.world_size == 1 and bucket.device != "cpu"
    gradients = stage.gradient_buffers(dtypes, is_mean=is_mean) if trainable else []
    return BucketBytes(
        parameters=0 if alone else nbytes(stage.parameters, dtypes.param_dtype),
        gradients=sum(nbytes(*buffer) for buffer in gradients),
        states=(high - low) * states.element_bytes,
        scalars=states.scalar_bytes and states.scalar_bytes * _count_runs(bucket, specs, low, high, states),
        masters=nbytes(stage.states, dtypes.master_dtype) if states.has_masters else 0,
    )


def _count_runs(bucket: BucketSpec, specs: Sequence[ParameterSpec], low: int, high: int, states: KeptStates) -> int:
    """Return how many parts of runs the class steps as one parameter each in ``[low, high)``."""
    pieces = in_blocks(bucket.pieces(low, high), bucket.slots, [spec.grain for spec in specs])
    alone = specs[0].grain.alone
    groups, scalars = [specs[piece.slot].group for piece in pieces], [spec.shape == () for spec in specs]
    found = runs(
        pieces,
        [states.stepped[piece.slot] for piece in pieces],
        lambda index: not alone and adjoins(pieces, groups, scalars, index),
    )
    is_cut = not alone and step_device(bucket) == "cpu"
    return sum(
        len(
            part_begins(
                pieces[first].begin, pieces[last - 1].end, CUT if is_cut and groups[first] in states.cut else None
            )
        )
        for first, last in found
    )


def formula_bytes(
    layout: Layout,
    stage: Stage,
    rank: int,
    states: Callable[[BucketSpec], KeptStates],
    unlisted: Layout | None = None,
) -> dict[str, int]:
    """Return the bytes that one rank holds after a step, by kind: `bucket_bytes` of all buckets.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        rank: its number among the ranks that share a copy.
        states: returns what the rank keeps for a bucket of ``layout``.
        unlisted: the parameters that are stored beside those of ``layout`` and not updated.
    """
    found = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for which in (layout,) if unlisted is None else (layout, unlisted):
        for bucket in which.buckets:
            here = bucket_bytes(
                bucket,
                [which.parameters[slot.parameter] for slot in bucket.slots],
                stage,
                rank,
                states(bucket) if which is layout else KeptStates(),
            )
            found["parameters"] += here.parameters
            if which is layout:
                found["gradients"] += here.gradients
                found["optimizer"] += here.states + here.scalars + here.masters
    return found


def peak_bounds(
    layout: Layout,
    stage: Stage,
    unlisted: Layout | None = None,
    reshard_group_size: int | None = None,
    *,
    schedule: UnitSchedule = ONE_AHEAD,
    shards_are_exposed: bool = False,
    host_ranks: int = 0,
) -> dict[str, int]:
    """Return upper bounds of the bytes of gathered units, "gathered_peak", and of buckets in flight, "scratch_peak".

    The first is that of `UnitSchedule.at_once` (the root's rest and the two largest units, if no unit lies inside
    another), and the shards that are kept for the backward; where shards are rounded master weights
    (`keeps_masters_alone`) or offloaded, also their copies of the units that are gathered, and one copy in the dtype of
    the master weights, which is rounded on the device. The second is three of the largest bucket, plus with
    ``shards_are_exposed`` a copy of this rank's shards of those units. A bucket whose shards may be unequal (of whole
    parameters, of parameters that are cut between blocks, or on the CPU) counts as W of the largest shard that a rank
    owns of it: the owner may receive so many, one of each rank.

    If sums are folded over hosts of L ranks, two buckets are in flight. Then it is five of the largest bucket in the
    dtype that travels (for each what a rank has and what arrives, and for one what it sends), and for each 2/L of it in
    the accumulator's dtype: the sums of a rail, and a sum so far. Or it is three as above if that is more.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        unlisted: the parameters that are stored beside those of ``layout`` and not updated.
        reshard_group_size: the result of `check_reshard`; None means all ranks.
        schedule: which units may be whole at once.
        shards_are_exposed: whether peers read this rank's shards in place, in its memory.
        host_ranks: L if sums are folded over hosts; else 0.
    """
    units, rounded = unit_bytes(layout, unlisted), _copied_bytes(layout, unlisted)
    all_units = sum(units.values())
    gathered, copies = schedule.at_once(units), schedule.at_once(rounded)
    under_way = replace(schedule, kept=frozenset()).at_once(units)  # whose gathers may be: peers read no others
    exposed = sharded_bytes(under_way, layout.world_size) if shards_are_exposed else 0
    if reshard_group_size == 1 < layout.world_size:
        gathered, copies = all_units, sum(rounded.values())
    elif reshard_group_size is not None and reshard_group_size < layout.world_size:
        gathered += sharded_bytes(all_units, reshard_group_size)

    longest: dict[Cuts, int] = {}  # shards, in elements: many buckets have equal cuts

    def in_flight(bucket: BucketSpec) -> int:
        if not (host_ranks or _may_be_unequal(bucket, layout)):
            return bucket.numel
        if bucket.cuts not in longest:
            longest[bucket.cuts] = bucket.cuts.largest()
        return max(bucket.numel, layout.world_size * longest[bucket.cuts])

    def folded(bucket: BucketSpec) -> int:
        moved = (2 * FOLDS_IN_FLIGHT + 1) * in_flight(bucket) * bucket.dtypes.reduce_dtype.itemsize
        sums = 2 * -(-in_flight(bucket) // host_ranks)
        return moved + FOLDS_IN_FLIGHT * sums * bucket.dtypes.accumulate_dtype.itemsize

    offloaded = [bucket for bucket in layout.buckets if bucket.offloaded]
    wide = max(
        (_largest(b, layout) * b.dtypes.master_dtype.itemsize for b in offloaded if b.dtypes.has_master), default=0
    )
    largest = max((in_flight(b) * b.dtypes.accumulate_dtype.itemsize for b in layout.buckets), default=0)
    return {
        "gathered_peak": gathered + copies + wide if stage.gathers(1) and (layout.world_size > 1 or offloaded) else 0,
        "scratch_peak": max([3 * largest, *map(folded, layout.buckets if host_ranks else ())]) + exposed,
    }


def busiest_link(layout: Layout, stage: Stage, synchronised: int) -> tuple[int, int]:
    """Return the payload bytes of a step that the busiest rank receives in reductions and sends in gathers after the
    step, and those of a rank if all owned equally much.

    An owner of n elements receives them from each of the W - 1 others in a reduction, and sends them to each in a
    gather: (W - 1) n. ``synchronised``: as in `Stage.passes`.
    """
    loads = [0] * layout.world_size
    passes = stage.passes(synchronised)
    for bucket in layout.buckets:
        if layout.parameters[bucket.slots[0].parameter].trainable:
            nbytes = sum(number * bucket.dtypes.itemsize(which) for which, number in passes.items())
            for rank in range(layout.world_size):
                begin, end = bucket.owned(rank)
                loads[rank] += (layout.world_size - 1) * nbytes * (end - begin)
    return max(loads), sharded_bytes(sum(loads), layout.world_size)


def spread_of_owners(layout: Layout, stage: Stage) -> str:
    """Return, as text, how parameters that have one owner each are spread over the ranks."""
    whole = [(spec.name, spec.master_bytes) for spec in layout.parameters if spec.grain == WHOLE]
    stacks = [spec for spec in layout.parameters if spec.grain.stack]
    if not whole and not stacks:
        return ""
    ranks = layout.world_size
    owned = loads(layout)
    none = [(0, 0)] if len(owned) < ranks else []  # a rank that owns no parameter
    held, work = zip(*owned.values(), *none, strict=True)
    busiest, even = busiest_link(layout, stage, 1)
    apart = [f"{len(whole)} parameters"] if whole else []
    if stacks:
        others = "others" if whole else "parameters"
        apart.append(f"{sum(len(spec.grain.stack) for spec in stacks)} blocks of {len(stacks)} {others}")
    lines = [
        f"by parameter: {' and '.join(apart)}, {min(held):,} to {max(held):,} B a rank; work of a step: the busiest "
        f"rank has {max(work) * ranks / max(sum(work), 1):.2f} times the mean; traffic of its link in a step: "
        f"{busiest:,} B, with equal shards {even:,}"
    ]
    for spec in stacks:
        most = max(map(math.prod, spec.grain.stack))
        whole.append((f"a block of {spec.name}", most * spec.dtypes.master_dtype.itemsize))
    large = [(name, nbytes) for name, nbytes in whole if nbytes * ranks > sum(held)]
    if large:
        largest, most = max(large, key=lambda each: each[1])
        others = f" and {len(large) - 1} further parameters are each" if len(large) > 1 else " is"
        lines.append(
            f"by parameter: {largest} ({most:,} B){others} larger than 1/{ranks} of "
            f"{sum(held):,} B: ranks cannot hold equally much"
        )
    return "\n".join(lines)


def sharded_bytes(nbytes: int, world_size: int) -> int:
    """Return ``nbytes`` / W, rounded: the bytes of a shard."""
    return round(Fraction(nbytes, world_size))


def unit_bytes(layout: Layout, unlisted: Layout | None = None) -> dict[int, int]:
    """Return the bytes of each gathered unit, padding included."""
    found: dict[int, int] = {}
    for which in (layout,) if unlisted is None else (layout, unlisted):
        for bucket in which.buckets:
            for unit, first, last in which.unit_spans(bucket):
                part = bucket.part(first, last)
                found[unit] = found.get(unit, 0) + part.numel * part.dtypes.param_dtype.itemsize
    return found


def _copied_bytes(layout: Layout, unlisted: Layout | None) -> dict[int, int]:
    """Return the most bytes of a rank's copies of its shards, by unit: of those in the host's memory, and of those of
    which master weights alone are kept."""
    found: dict[int, int] = {}
    for which in (layout,) if unlisted is None else (layout, unlisted):
        for bucket in which.buckets:
            spec = which.parameters[bucket.slots[0].parameter]
            if bucket.offloaded or keeps_masters_alone(bucket, trainable=which is layout and spec.trainable):
                nbytes = _largest(bucket, which) * bucket.dtypes.param_dtype.itemsize
                found[spec.unit] = found.get(spec.unit, 0) + nbytes
    return found


def _largest(bucket: BucketSpec, layout: Layout) -> int:
    """Return the most elements of a bucket that a rank owns."""
    return bucket.cuts.largest() if _may_be_unequal(bucket, layout) else bucket.numel // bucket.world_size


def _may_be_unequal(bucket: BucketSpec, layout: Layout) -> bool:
    """Return whether ranks may own unequal shards of a bucket."""
    return layout.parameters[bucket.slots[0].parameter].grain.alone or not bucket.on_accelerator


def formula_traffic(
    layout: Layout,
    stage: Stage,
    backwards: int,
    synchronised: int,
    unlisted: Layout | None = None,
    *,
    units_need_gather: bool = True,
    means_are_shown: bool = True,
    replicas: int = 1,
    reshard_group_size: int | None = None,
    schedule: UnitSchedule = ONE_AHEAD,
    hosts: int = 1,
) -> int:
    """Return the payload bytes that a step sends, summed over the ranks, with one forward for each backward.

    Each of the ``replicas`` (groups of W ranks that hold one copy) sends (W - 1) x (passes x padded trainable elements
    + gathers x padded elements of all units). Between replicas each sum travels twice: once through all of them, and
    once back. If sums are folded over H ``hosts`` of L ranks, each reduction sends contributions H (L - 1) times,
    inside hosts, and the sums H - 1 times between these; then those of all hosts but the last one go home. A reduction
    after the first sends those of all hosts but the first one to it, too. What is whole when a backward begins
    (`UnitSchedule`) is gathered only for the forward. The formula assumes that a forward enters every unit once, in
    order of registration, and that a backward reaches every unit.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        backwards: the backwards in the step of the rank that has most; the others take part without a contribution.
        synchronised: how many of them are outside ``no_sync``.
        unlisted: the parameters that are stored beside those of ``layout`` and not updated.
        units_need_gather: False if all ranks see every shard of a unit in common memory.
        means_are_shown: see `Stage.passes`.
        replicas: the number of groups that each hold one copy.
        reshard_group_size: how many ranks take part in a gather for the backward (the result of `check_reshard`); None
            means all W.
        schedule: which units may be whole at once.
        hosts: over how many sums are folded; 1 if they are not.
    """
    trainable = [bucket for bucket in layout.buckets if layout.parameters[bucket.slots[0].parameter].trainable]
    kinds = stage.passes(synchronised, means_are_shown=means_are_shown)
    folds = 0
    if hosts > 1:
        del kinds["reduce_dtype"]
        folds = sum(_folded(bucket, hosts, synchronised) for bucket in trainable)
    passed = sum(
        passes * bucket.numel * bucket.dtypes.itemsize(which) for which, passes in kinds.items() for bucket in trainable
    )
    units = unit_bytes(layout, unlisted) if units_need_gather else {}
    still_here = sum(units[unit] for unit in schedule.whole_when_a_backward_begins(units))
    ranks, forwards = layout.world_size, stage.gathers(backwards) // 2
    near = ranks if reshard_group_size is None else reshard_group_size
    again = forwards * (sum(units.values()) - still_here) * (near - 1) * (ranks // near)
    sums = synchronised * sum(bucket.numel * bucket.dtypes.accumulate_dtype.itemsize for bucket in trainable)
    inside = (ranks - 1) * (passed + forwards * sum(units.values())) + again
    return replicas * inside + 2 * (replicas - 1) * sums + folds


def _folded(bucket: BucketSpec, hosts: int, times: int) -> int:
    """Return the payload bytes of ``times`` reductions of a bucket whose sums are folded over hosts."""
    width, dtypes = bucket.world_size // hosts, bucket.dtypes
    inside = hosts * (width - 1) * bucket.numel * dtypes.itemsize("reduce_dtype")
    homewards = bucket.owned((hosts - 1) * width)[0]  # what the last host does not own
    outwards = bucket.numel - bucket.owned(width)[0]  # nor the first one
    between = times * ((hosts - 1) * bucket.numel + homewards) + max(times - 1, 0) * outwards
    return times * inside + between * dtypes.itemsize("accumulate_dtype")
