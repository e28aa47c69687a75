"""Formulas for the bytes that a rank holds and the traffic of a step.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5
and 7. The optimizer's state is counted by its number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from .layout import BucketSpec, Layout, ParameterSpec, sharded_bytes
from .stage import Placement, Stage


def formula_bytes(
    layout: Layout,
    stage: Stage,
    state_tensors: Mapping[int, int],
    rest: Layout | None = None,
    reshard_group_size: int | None = None,
    *,
    slices_are_exposed: bool = False,
    rank: int = 0,
) -> dict[str, int]:
    """Return the bytes that one rank holds, by kind. They are computed from elements, without padding.

    Of parameters in pieces every rank holds 1/W, rounded; of whole ones ``rank`` holds those that it owns.

    "gathered_peak" and "scratch_peak" are upper bounds. The first is the root's rest, the two largest units, and the
    shards that are kept for the backward. The second is three of the largest bucket, plus with ``slices_are_exposed`` a
    copy of this rank's shards of those units. A bucket of whole parameters counts as W of the largest slice that a rank
    owns of it: the owner may receive so many, one of each rank.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        state_tensors: how many tensors, each as large as a parameter, the optimizer keeps for it (Adam: 2), by the
            number of its class. Master weights are counted in addition.
        rest: the parameters that are stored beside those of ``layout`` and not updated.
        reshard_group_size: the result of `check_reshard`; None means all ranks.
        slices_are_exposed: whether peers read this rank's shards in place, in its memory.
        rank: its number among the ranks that share a copy.
    """
    owners = {slot.parameter: bucket.owner(number) for bucket, number, slot in layout.slots()}
    owned = {id(spec) for place, spec in enumerate(layout.parameters) if spec.whole and owners[place] == rank}

    def total(which: str, among: Iterable[ParameterSpec]) -> int:
        return sum(spec.numel * spec.dtypes.itemsize(which) for spec in among)

    def shard(nbytes: Callable[[Iterable[ParameterSpec]], int], among: Sequence[ParameterSpec]) -> int:
        mine = [spec for spec in among if id(spec) in owned]
        return sharded_bytes(nbytes(spec for spec in among if not spec.whole), layout.world_size) + nbytes(mine)

    trainable = [spec for spec in layout.parameters if spec.trainable]
    stored = (*layout.parameters, *(() if rest is None else rest.parameters))
    units = unit_bytes(layout, rest)
    all_units = sum(units.values())
    gathered = units.pop(0, 0) + sum(sorted(units.values())[-2:])
    exposed = sharded_bytes(gathered, layout.world_size) if slices_are_exposed else 0
    if reshard_group_size is not None and reshard_group_size < layout.world_size:
        gathered = all_units if reshard_group_size == 1 else gathered + sharded_bytes(all_units, reshard_group_size)

    def placed(
        nbytes: Callable[[Iterable[ParameterSpec]], int], among: Sequence[ParameterSpec], placement: Placement
    ) -> int:
        return nbytes(among) if placement is Placement.WHOLE else shard(nbytes, among)

    def states(among: Iterable[ParameterSpec]) -> int:
        return sum((state_tensors[spec.optimizer_class] + spec.dtypes.has_master) * spec.master_bytes for spec in among)

    def in_flight(bucket: BucketSpec) -> int:
        is_whole = layout.parameters[bucket.slots[0].parameter].whole
        return max(bucket.numel, layout.world_size * bucket.cuts.largest()) if is_whole else bucket.numel

    contributed = [spec for spec in trainable if stage.contributes_in_place(spec.dtypes)]
    means = [spec for spec in trainable if stage.grads_replicated and not stage.contributes_in_place(spec.dtypes)]
    alone = layout.world_size == 1
    summed = [spec for spec in trainable if stage.sum_lies_apart(spec.dtypes, is_mean=alone and spec.device != "cpu")]
    return {
        "parameters": placed(partial(total, "param_dtype"), stored, stage.parameters),
        "gradients": total("reduce_dtype", contributed)
        + total("accumulate_dtype", means)
        + shard(partial(total, "accumulate_dtype"), summed),
        "optimizer": placed(states, trainable, stage.states),
        "gathered_peak": gathered if stage.gathers(1) and layout.world_size > 1 else 0,
        "scratch_peak": 3 * max((in_flight(b) * b.dtypes.accumulate_dtype.itemsize for b in layout.buckets), default=0)
        + exposed,
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
    whole = [spec for spec in layout.parameters if spec.whole]
    if not whole:
        return ""
    ranks = layout.world_size
    loads = layout.loads()
    none = [(0, 0)] if len(loads) < ranks else []  # a rank that owns no parameter
    held, work = zip(*loads.values(), *none, strict=True)
    busiest, even = busiest_link(layout, stage, 1)
    lines = [
        f"by parameter: {len(whole)} parameters, {min(held):,} to {max(held):,} B a rank; work of a step: the busiest "
        f"rank has {max(work) * ranks / max(sum(work), 1):.2f} times the mean; traffic of its link in a step: "
        f"{busiest:,} B, with equal shards {even:,}"
    ]
    large = [spec for spec in whole if spec.master_bytes * ranks > sum(held)]
    if large:
        largest = max(large, key=lambda spec: spec.master_bytes)
        others = f" and {len(large) - 1} further parameters are each" if len(large) > 1 else " is"
        lines.append(
            f"by parameter: {largest.name} ({largest.master_bytes:,} B){others} larger than 1/{ranks} of "
            f"{sum(held):,} B: ranks cannot hold equally much"
        )
    return "\n".join(lines)


def unit_bytes(layout: Layout, rest: Layout | None = None) -> dict[int, int]:
    """Return the bytes of each gathered unit, padding included."""
    found: dict[int, int] = {}
    for which in (layout,) if rest is None else (layout, rest):
        for bucket in which.buckets:
            for unit, first, last in which.runs(bucket):
                part = bucket.part(first, last)
                found[unit] = found.get(unit, 0) + part.numel * part.dtypes.param_dtype.itemsize
    return found


def units_kept_for_backward(units: Iterable[int]) -> set[int]:
    """Return which of these units, by number, are still gathered when a backward begins: the root's rest, and the last
    one."""
    found = set(units)
    return found & {0, max(found, default=0)}


def formula_traffic(
    layout: Layout,
    stage: Stage,
    backwards: int,
    synchronised: int,
    rest: Layout | None = None,
    *,
    units_need_gather: bool = True,
    means_are_shown: bool = True,
    replicas: int = 1,
    reshard_group_size: int | None = None,
) -> int:
    """Return the payload bytes that a step sends, summed over the ranks, with one forward for each backward.

    Each of the ``replicas`` (groups of W ranks that hold one copy) sends (W - 1) x (passes x padded trainable elements
    + gathers x padded elements of all units). Between replicas each sum travels twice: once through all of them, and
    once back. What stays gathered (`units_kept_for_backward`) is gathered only for the forward. The formula assumes
    that a forward enters every unit once, in order of registration, and that a backward reaches every unit.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        backwards: the backwards in the step of the rank that has most; the others take part without a contribution.
        synchronised: how many of them are outside ``no_sync``.
        rest: the parameters that are stored beside those of ``layout`` and not updated.
        units_need_gather: False if all ranks see every shard of a unit in common memory.
        means_are_shown: see `Stage.passes`.
        replicas: the number of groups that each hold one copy.
        reshard_group_size: how many ranks take part in a gather for the backward (the result of `check_reshard`); None
            means all W.
    """
    trainable = [bucket for bucket in layout.buckets if layout.parameters[bucket.slots[0].parameter].trainable]
    passed = sum(
        passes * bucket.numel * bucket.dtypes.itemsize(which)
        for which, passes in stage.passes(synchronised, means_are_shown=means_are_shown).items()
        for bucket in trainable
    )
    units = unit_bytes(layout, rest) if units_need_gather else {}
    still_here = sum(units[unit] for unit in units_kept_for_backward(units))
    ranks, forwards = layout.world_size, stage.gathers(backwards) // 2
    near = ranks if reshard_group_size is None else reshard_group_size
    again = forwards * (sum(units.values()) - still_here) * (near - 1) * (ranks // near)
    sums = synchronised * sum(bucket.numel * bucket.dtypes.accumulate_dtype.itemsize for bucket in trainable)
    inside = (ranks - 1) * (passed + forwards * sum(units.values())) + again
    return replicas * inside + 2 * (replicas - 1) * sums
