"""Bytes of a rank and traffic of a step, as formulas.

They are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
sections 5 and 7, with the optimizer's state counted by its tensors.
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
    slices_are_shown: bool = False,
) -> dict[str, int]:
    """Bytes of one rank by kind, from the elements alone (no padding).

    ``state_tensors``: tensors as large as the parameter that the optimizer keeps for it (Adam: 2); a master weight that
    is kept beside the parameter is one more. ``rest``: of parameters that are stored beside those of ``layout`` and not
    updated. ``reshard_group_size``: of `check_reshard`; None: all. ``gathered_peak`` and ``scratch_peak`` are bounds:
    the root's rest and the two largest units, and what is kept for the backward; three of the largest bucket, and where
    ``slices_are_shown`` to peers who read them where they lie, a copy of this rank's slices of those units.
    """

    def total(which: str, among: Sequence[ParameterSpec]) -> int:
        return sum(spec.numel * spec.dtypes.itemsize(which) for spec in among)

    trainable = [spec for spec in layout.parameters if spec.trainable]
    stored = total("param_dtype", layout.parameters)
    if rest is not None:
        stored += total("param_dtype", rest.parameters)
    units = _unit_bytes(layout, rest)
    all_units = sum(units.values())
    gathered = units.pop(0, 0) + sum(sorted(units.values())[-2:])
    shown = sharded_bytes(gathered, layout.world_size) if slices_are_shown else 0
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
        + shown,
    }


def _unit_bytes(layout: Layout, rest: Layout | None) -> dict[int, int]:
    """Bytes of each unit when it is whole, padding included."""
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
    """Payload bytes that a step sends, summed over the ranks, with one forward to each backward.

    In each of ``replicas`` of W ranks, (W - 1) x (passes x padded trainable elements + gathers x padded elements of all
    units), and between them each sum twice, on the way through all and on the way home. A backward finds the
    root's rest and the last unit still here: they are gathered once, for the forward. The other gathers for a backward
    are among ``reshard_group_size`` ranks (of `check_reshard`; None: all W). This supposes that forwards enter
    every unit once, in order of registration, and that backwards reach every unit. ``units_need_gather``: False where
    every rank sees every slice of a unit in memory that all share.
    """
    trainable = [bucket for bucket in layout.buckets if layout.parameters[bucket.slots[0].parameter].trainable]
    passed = sum(
        passes * bucket.numel * bucket.dtypes.itemsize(which)
        for which, passes in stage.passes(synchronised, means_are_shown=means_are_shown).items()
        for bucket in trainable
    )
    units = _unit_bytes(layout, rest) if units_need_gather else {}
    still_here = sum(units[unit] for unit in {0, max(units, default=0)} & set(units))
    ranks, forwards = layout.world_size, stage.gathers(backwards) // 2
    near = ranks if reshard_group_size is None else reshard_group_size
    again = forwards * (sum(units.values()) - still_here) * (near - 1) * (ranks // near)
    sums = synchronised * sum(bucket.numel * bucket.dtypes.accumulate_dtype.itemsize for bucket in trainable)
    inside = (ranks - 1) * (passed + forwards * sum(units.values())) + again
    return replicas * inside + 2 * (replicas - 1) * sums
