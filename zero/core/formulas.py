"""Formulas for the bytes that a rank holds and the traffic of a step.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5
and 7. The optimizer's state is counted by its number of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Layout, ParameterSpec, sharded_bytes
from .stage import Placement, Stage


def formula_bytes(
    layout: Layout,
    stage: Stage,
    state_tensors: int,
    rest: Layout | None = None,
    reshard_group_size: int | None = None,
    *,
    slices_are_exposed: bool = False,
) -> dict[str, int]:
    """Return the bytes that one rank holds, by kind. They are computed from elements, without padding.

    "gathered_peak" and "scratch_peak" are upper bounds. The first is the root's rest, the two largest units, and the
    shards that are kept for the backward. The second is three of the largest bucket, plus with ``slices_are_exposed`` a
    copy of this rank's shards of those units.

    Args:
        layout: the parameters that the optimizer updates.
        stage: the row of the stage table.
        state_tensors: how many tensors, each as large as a parameter, the optimizer keeps for it (Adam: 2). Master
            weights are counted in addition.
        rest: the parameters that are stored beside those of ``layout`` and not updated.
        reshard_group_size: the result of `check_reshard`; None means all ranks.
        slices_are_exposed: whether peers read this rank's shards in place, in its memory.
    """

    def total(which: str, among: Sequence[ParameterSpec]) -> int:
        return sum(spec.numel * spec.dtypes.itemsize(which) for spec in among)

    trainable = [spec for spec in layout.parameters if spec.trainable]
    stored = total("param_dtype", layout.parameters)
    if rest is not None:
        stored += total("param_dtype", rest.parameters)
    units = unit_bytes(layout, rest)
    all_units = sum(units.values())
    gathered = units.pop(0, 0) + sum(sorted(units.values())[-2:])
    exposed = sharded_bytes(gathered, layout.world_size) if slices_are_exposed else 0
    if reshard_group_size is not None and reshard_group_size < layout.world_size:
        gathered = all_units if reshard_group_size == 1 else gathered + sharded_bytes(all_units, reshard_group_size)

    def placed(nbytes: int, placement: Placement) -> int:
        return nbytes if placement is Placement.WHOLE else sharded_bytes(nbytes, layout.world_size)

    contributed = [spec for spec in trainable if stage.contributes_in_place(spec.dtypes)]
    means = [spec for spec in trainable if stage.grads_replicated and not stage.contributes_in_place(spec.dtypes)]
    summed = [spec for spec in trainable if stage.sum_lies_apart(spec.dtypes)]
    kept = [spec for spec in trainable if spec.dtypes.has_master]
    states = state_tensors * total("master_dtype", trainable) + total("master_dtype", kept)
    return {
        "parameters": placed(stored, stage.parameters),
        "gradients": total("reduce_dtype", contributed)
        + total("accumulate_dtype", means)
        + sharded_bytes(total("accumulate_dtype", summed), layout.world_size),
        "optimizer": placed(states, stage.states),
        "gathered_peak": gathered if stage.gathers(1) and layout.world_size > 1 else 0,
        "scratch_peak": 3 * max((b.numel * b.dtypes.accumulate_dtype.itemsize for b in layout.buckets), default=0)
        + exposed,
    }


def unit_bytes(layout: Layout, rest: Layout | None = None) -> dict[int, int]:
    """Return the bytes of each gathered unit, padding included."""
    found: dict[int, int] = {}
    for which in (layout,) if rest is None else (layout, rest):
        for bucket in which.buckets:
            for unit, first, last in which.runs(bucket):
                part = bucket.part(first, last)
                found[unit] = found.get(unit, 0) + part.numel * part.dtypes.param_dtype.itemsize
    return found


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
    once back. The root's rest and the last unit are still gathered when a backward begins, so they are gathered only
    for the forward. The formula assumes that a forward enters every unit once, in order of registration, and that a
    backward reaches every unit.

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
    still_here = sum(units[unit] for unit in {0, max(units, default=0)} & set(units))
    ranks, forwards = layout.world_size, stage.gathers(backwards) // 2
    near = ranks if reshard_group_size is None else reshard_group_size
    again = forwards * (sum(units.values()) - still_here) * (near - 1) * (ranks // near)
    sums = synchronised * sum(bucket.numel * bucket.dtypes.accumulate_dtype.itemsize for bucket in trainable)
    inside = (ranks - 1) * (passed + forwards * sum(units.values())) + again
    return replicas * inside + 2 * (replicas - 1) * sums
