"""Make the program of a step of this library.

    reduce    the buckets of `zero.core.layout`, in layout order, as many in flight as the stage has
    gather    a unit one ahead of its use, in two buffers; the root's rest and the last unit stay for the backward
    step      bucket by bucket; stages 1 and 2 gather the updated slices; stage 0 gathers means
    copies    the sum of a bucket goes through all replicas, and comes back: one more in flight for each hop

A collective of a bucket whose parameters have one owner each takes as long as one of an even bucket whose slices are as
long as its longest. In the update of such buckets a rank has the work of the one that has most in the whole step.

Knows: stages, buckets, groups, which collective moves what. Does not know: FLOPs, or when anything happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.cuts import EvenCuts
from ...core.formulas import units_kept_for_backward
from ...core.layout import Dtypes, Layout
from ...core.stage import (
    Placement,
    check_reshard,
    check_sharding_factor,
    stage_of,
    sums_under_way,
    units_share_buckets,
)
from .compute import Compute, PassSeconds
from .program import AFTER_THE_LAST, Reduction, StepProgram, UnitStep, UpdateStep
from .wires import NOTHING, RankGroup, WireCost, Wires


@dataclass(frozen=True)
class UnitLoad:
    """A unit as a schedule sees it. Unit 0 is the root's rest, whose compute follows all others.

    Attributes:
        passes: seconds for one micro-batch.
        elements: of its parameters.
        tensors: parameters with hooks.
    """

    passes: PassSeconds
    elements: int
    tensors: int = 0


@dataclass(frozen=True)
class WholeParameters:
    """What is different where the parameters of a bucket have one owner each, who steps them by their shapes.

    Attributes:
        longest: the most elements of the bucket that one rank owns.
        multiplications: of its parameters' `step_work`, added up.
        share: of this work of all such buckets, the part of the rank that has most.
        state_tensors: as large as a parameter, that the class keeps.
    """

    longest: int
    multiplications: int
    share: float
    state_tensors: int


@dataclass(frozen=True)
class BucketLoad:
    """A bucket as a schedule sees it. ``elements`` has padding; ``unit`` and ``ready`` are those of `Reduction`.

    ``home`` is the unit that is gathered with it. ``whole`` is None where all ranks own equally much.
    """

    elements: int
    dtypes: Dtypes
    unit: int
    ready: float
    home: int = 0
    trainable: bool = True
    whole: WholeParameters | None = None


@dataclass(frozen=True)
class StepSetting:
    """What a user chooses.

    Attributes:
        stage: 0 to 3.
        factor: ranks that share a copy; None: all.
        reshard: `reshard_after_forward`.
        micro_batches: of each rank in a step.
        reduced: backwards outside ``no_sync``; None: `Stage.reduced_backwards`.
        state_tensors: as large as a parameter, that the optimizer keeps (Adam: 2).
        clip: whether the norm of the gradients is taken.
        offload: bytes a second at which states are read, and written, during the update; None: they stay in memory.
        means_are_shown: whether means are gathered after each backward at stage 0; so without mixed precision.
    """

    stage: int
    factor: int | None = None
    reshard: bool | int = True
    micro_batches: int = 1
    reduced: int | None = None
    state_tensors: int = 2
    clip: bool = False
    offload: float | None = None
    means_are_shown: bool = True


def bucket_loads(layout: Layout, units: Sequence[int], state_tensors: Sequence[int] = (2,)) -> list[BucketLoad]:
    """Return the buckets of a layout, in its order.

    ``units``: the unit of each parameter, in order of registration. ``state_tensors``: as large as a parameter, that
    each class keeps.

    A bucket is ready with the gradient of its first parameter in order of registration. Within a unit, gradients are
    taken to be ready after the share of the backward that is the share of elements. What the root registers before the
    first unit, as an embedding, is ready when the backward ends.
    """
    first_unit = next((position for position, unit in enumerate(units) if unit), 0)
    before, total = list[int](), dict[tuple[int, bool], int]()
    for position, (spec, unit) in enumerate(zip(layout.parameters, units, strict=True)):
        part = (unit, position < first_unit)
        before.append(total.get(part, 0))
        total[part] = total.get(part, 0) + spec.numel
    loads = []
    work = [work for _, work in layout.loads().values()]
    busiest = max(work, default=0) / max(sum(work), 1)
    for bucket in layout.buckets:
        first = min(slot.parameter for slot in bucket.slots)
        unit, early = units[first], first < first_unit and not units[first]
        of_unit = total[unit, first < first_unit]
        ready = 1.0 if early or not of_unit else 1 - before[first] / of_unit
        spec = layout.parameters[first]
        where = AFTER_THE_LAST if early else unit
        whole = None
        if spec.one_owner:
            of_bucket = sum(layout.parameters[slot.parameter].step_work for slot in bucket.slots)
            tensors = state_tensors[spec.optimizer_class]
            whole = WholeParameters(bucket.cuts.largest(), of_bucket, busiest, tensors)
        loads.append(BucketLoad(bucket.numel, bucket.dtypes, where, ready, unit, spec.trainable, whole))
    return loads


def program_of(
    units: Sequence[UnitLoad], buckets: Sequence[BucketLoad], wires: Wires, setting: StepSetting, compute: Compute
) -> StepProgram:
    """Return the program of this library.

    Args:
        units: the root's rest first.
        buckets: of `bucket_loads`.
        wires: the links of the cluster, all of whose ranks train.
        setting: what the user chooses.
        compute: the equations for the update, and the constants.

    Raises:
        ValueError: a setting that the library refuses.
    """
    cluster, stage = wires.cluster, stage_of(setting.stage)
    check_sharding_factor(setting.factor, cluster.ranks, stage)
    factor = setting.factor or cluster.ranks
    near = check_reshard(setting.reshard, factor, stage)
    group, replicas = RankGroup.neighbours(cluster, factor), cluster.ranks // factor
    algorithm = wires.algorithm(group)
    reduced = stage.reduced_backwards(setting.micro_batches) if setting.reduced is None else setting.reduced
    resident = units_share_buckets(factor, in_common=algorithm == "shared")
    gathers = stage.parameters is Placement.SHARD and not resident
    trainable = [bucket for bucket in buckets if bucket.trainable]
    costs: dict[tuple[int, Dtypes, WholeParameters | None], tuple[WireCost, WireCost, UpdateStep]] = {}
    reductions, updates = list[Reduction](), list[UpdateStep]()
    for bucket in trainable:
        key = (bucket.elements, bucket.dtypes, bucket.whole)
        if key not in costs:
            costs[key] = _bucket_costs(bucket, wires, setting, compute, algorithm, group, reduced > 1)
        cost, means, update = costs[key]
        reductions.append(Reduction(bucket.unit, bucket.ready, cost, means))
        updates.append(update)
    return StepProgram(
        units=_gathered_units(
            units,
            buckets,
            wires,
            compute,
            algorithm,
            group,
            near if gathers else 0,
        ),
        reductions=tuple(reductions),
        updates=tuple(updates),
        micro_batches=setting.micro_batches,
        reduced=reduced,
        in_flight=stage.reductions_in_flight + sums_under_way(replicas),
        means_each_time=setting.means_are_shown,
        kept=gathers and near == 1,
        streams=wires.on_gpu,
        control=(3 if setting.clip else 1) * wires.latency(RankGroup.neighbours(cluster, cluster.ranks)),
        synchronises=setting.clip,
        fixed=compute.constants["fixed"] if wires.on_gpu else 0.0,
        overlap=compute.constants["overlap"] if wires.on_gpu else 0.0,
        jitter=jitter(wires, compute),
    )


def jitter(wires: Wires, compute: Compute) -> float:
    """Return the share of a step that is lost to the slowest of many hosts."""
    return compute.constants["jitter"] * math.log2(wires.cluster.hosts)


def _gathered_units(
    units: Sequence[UnitLoad],
    buckets: Sequence[BucketLoad],
    wires: Wires,
    compute: Compute,
    algorithm: str,
    group: RankGroup,
    near: int,
) -> tuple[UnitStep, ...]:
    """Return the units of this library.

    ``near``: ranks that gather for a backward; 1: none; 0: nothing is gathered.
    """
    crowd = 1.0 if wires.on_gpu else max(wires.cluster.per_host / wires.cluster.gpu.per_host, 1.0)
    slowed = [_with_hooks(unit, compute.constants["hook"], crowd) for unit in units]
    if not near:
        return tuple(UnitStep(passes) for passes in slowed)
    ranks = wires.cluster.ranks
    around = RankGroup.neighbours(wires.cluster, near)
    nearby = algorithm if near == group.ranks else wires.algorithm(around)
    gather, again = [NOTHING] * len(units), [NOTHING] * len(units)
    costs: dict[tuple[int, int], tuple[WireCost, WireCost]] = {}
    for bucket in buckets:
        width = bucket.dtypes.itemsize("param_dtype")
        nbytes, even = bucket.elements * width, _even(bucket, group) * width
        if (nbytes, even) not in costs:
            part = whole = in_groups(_as_long(wires.all_gather, algorithm, nbytes, even, group), ranks // group.ranks)
            if near < group.ranks:
                part = in_groups(_as_long(wires.all_gather, nearby, nbytes, even, around), ranks // near)
            costs[nbytes, even] = whole, part
        whole, part = costs[nbytes, even]
        gather[bucket.home], again[bucket.home] = after(gather[bucket.home], whole), after(again[bucket.home], part)
    stay = units_kept_for_backward(range(len(units)))
    return tuple(
        UnitStep(passes, gather[unit], None if near == 1 or unit in stay else again[unit])
        for unit, passes in enumerate(slowed)
    )


def _with_hooks(unit: UnitLoad, hook: float, crowd: float) -> PassSeconds:
    passes = unit.passes
    return PassSeconds(
        passes.forward * crowd,
        passes.backward * crowd,
        passes.recompute * crowd,
        passes.host * crowd,
        (passes.host_backward + hook * unit.tensors) * crowd,
    )


def _bucket_costs(
    bucket: BucketLoad,
    wires: Wires,
    setting: StepSetting,
    compute: Compute,
    algorithm: str,
    group: RankGroup,
    started: bool,
) -> tuple[WireCost, WireCost, UpdateStep]:
    stage, dtypes, elements = stage_of(setting.stage), bucket.dtypes, bucket.elements
    travel, accumulate = dtypes.itemsize("reduce_dtype"), dtypes.itemsize("accumulate_dtype")
    whole, even = bucket.whole, _even(bucket, group)
    cost, longer = (
        wires.reduce_scatter(algorithm, count, travel, accumulate, group, started=started) for count in (elements, even)
    )
    cost = replace(longer, sent=cost.sent, crossed=cost.crossed)
    replicas = wires.cluster.ranks // group.ranks
    if replicas > 1:
        owners = RankGroup.replicas(wires.cluster, group.ranks)
        cost = wires.chain(cost, elements * accumulate, cost.fold, group.ranks, owners)
    means = gather = NOTHING
    if stage.grads_replicated:
        means = _as_long(wires.all_gather, algorithm, elements * accumulate, even * accumulate, group)
    owned: float = elements
    work = 0.0 if whole is None else float(whole.multiplications)
    state_tensors = setting.state_tensors if whole is None else whole.state_tensors
    if not stage.grads_replicated and whole is None:  # the last rank has the largest shard
        low, high = EvenCuts(elements, group.ranks, dtypes.alignment).owned(group.ranks - 1)
        owned = high - low
    elif not stage.grads_replicated and whole is not None:
        owned, work = elements * whole.share, work * whole.share
    if stage.parameters_are_gathered:
        width = dtypes.itemsize("param_dtype")
        gather = in_groups(_as_long(wires.all_gather, algorithm, elements * width, even * width, group), replicas)
    moved = 0.0
    if setting.offload:
        kept = state_tensors + (dtypes.has_master and not wires.on_gpu)
        moved = owned * kept * dtypes.itemsize("master_dtype") / setting.offload
    seconds = compute.update(owned, dtypes, state_tensors) + compute.orthogonalization(work)
    return cost, means, UpdateStep(seconds, gather, moved, moved)


def _even(bucket: BucketLoad, group: RankGroup) -> int:
    """Return the elements of an even bucket whose slices are as long as the longest of ``bucket``."""
    return bucket.elements if bucket.whole is None else max(bucket.elements, group.ranks * bucket.whole.longest)


def _as_long(
    gather: Callable[[str, float, RankGroup], WireCost], algorithm: str, nbytes: int, even: int, group: RankGroup
) -> WireCost:
    """Return the cost of an all-gather of ``nbytes`` that takes as long as one of ``even`` bytes."""
    cost = gather(algorithm, nbytes, group)
    return replace(gather(algorithm, even, group), sent=cost.sent, crossed=cost.crossed)


def in_groups(cost: WireCost, groups: int) -> WireCost:
    """Return the cost of a collective that ``groups`` groups run at the same time."""
    return replace(cost, sent=cost.sent * groups, crossed=cost.crossed * groups)


def after(first: WireCost, then: WireCost) -> WireCost:
    """Return the cost of one collective after another on the same wire."""
    return WireCost(
        first.seconds + then.seconds,
        first.period + then.period,
        first.fold + then.fold,
        first.sent + then.sent,
        first.crossed + then.crossed,
    )
