"""A training step as data, and the program of a step of this library.

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
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from collectives import folds

from ...core.buckets import loads
from ...core.conflicts import OF_SECONDS, check
from ...core.grain import WHOLE
from ...core.layout import Dtypes, EvenCuts, Layout
from ...core.stage import GATHERS_IN_FLIGHT, buckets_in_flight, sums_under_way
from ..setting import OPTIMIZERS, OptimizerStates, PlanSetting
from .compute import NOTHING, Compute, PassSeconds, RankGroup, WireCost, Wires

AFTER_THE_LAST = -1  # the place of a bucket that is ready when a backward ends

PARTS = (
    *("compute", "recompute", "slowdown", "gather", "reduction", "fold"),
    *("update", "disk", "host", "control", "fixed", "jitter"),
)
"""What a step's seconds are made of. For "gather", "reduction" and "host" compute waited; "slowdown" is the time that
it lost beside collectives, "fold" what it spent on adding up contributions."""


@dataclass(frozen=True)
class UnitStep:
    """One unit in a step.

    Attributes:
        passes: seconds of its compute and of its host for one micro-batch.
        gather: before its forward; `NOTHING` if its parameters are whole.
        again: before its backward; None if it is still gathered then.
        copy: in which this rank's shard is copied from the host before each gather.
    """

    passes: PassSeconds
    gather: WireCost = NOTHING
    again: WireCost | None = None
    copy: float = 0.0


@dataclass(frozen=True)
class Reduction:
    """The reduction of one bucket.

    Attributes:
        unit: the unit whose backward makes its last gradient, or `AFTER_THE_LAST`.
        ready: the share of that unit's backward after which it is ready.
        cost: of its reduce-scatter or all-reduce.
        again: of a later one of the step, which goes on from the sum so far; None: the same.
        means: of the all-gather of its means (stage 0).
        copy: seconds of compute in which this rank's sum is copied to the host; in a later one of the step as many
            more, in which the sum so far is copied from there.
    """

    unit: int
    ready: float
    cost: WireCost
    again: WireCost | None = None
    means: WireCost = NOTHING
    copy: float = 0.0


@dataclass(frozen=True)
class UpdateStep:
    """The end of the step for one bucket: read, update, write back, gather the updated slices. ``read``: also of the
    write; ``host``: in which the host issues all but the gather."""

    update: float
    gather: WireCost = NOTHING
    read: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class StepProgram:
    """A step as data. All ranks run it.

    Attributes:
        units: in order of a forward; the first is the root's rest, which computes after the others.
        reductions: in the order in which they are launched.
        updates: in the order in which buckets are updated.
        micro_batches: forwards and backwards of a step.
        reduced: how many of them, the last ones, reduce gradients.
        in_flight: reductions under way before the oldest is waited for, or passed on.
        passed_on: those that are passed on to the next replica and not complete; 0: there are no replicas.
        gathers_in_flight: of updated parameters, and of means beside a backward.
        means_each_time: means are gathered in each backward that reduces (without streams at its end), not once a step.
        kept: units stay whole between forward and backward, each in memory of its own.
        ahead: units that are gathered ahead of their use.
        streams: compute runs beside the host.
        control: seconds of the messages on which ranks agree, which the host waits for.
        synchronises: the host waits for the device before the update, as for the norm of a clip.
        host_reads: the host waits for the device after each backward that reduces, since it has the sums.
        host_updates: the host updates the buckets itself, one after the other.
        host: seconds of the host for a clip and a step, without what each bucket adds.
        fixed: seconds that no unit explains.
        overlap: see the module.
        jitter: share of the step that is lost because the slowest rank counts.
    """

    units: tuple[UnitStep, ...]
    reductions: tuple[Reduction, ...] = ()
    updates: tuple[UpdateStep, ...] = ()
    micro_batches: int = 1
    reduced: int = 1
    in_flight: float = math.inf
    passed_on: int = 0
    gathers_in_flight: float = GATHERS_IN_FLIGHT
    means_each_time: bool = True
    kept: bool = False
    ahead: int = 1
    streams: bool = True
    control: float = 0.0
    synchronises: bool = False
    host_reads: bool = False
    host_updates: bool = False
    host: float = 0.0
    fixed: float = 0.0
    overlap: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class TraceEvent:
    """Work of one clock: its name, the clock, its start and its seconds."""

    name: str
    clock: str
    start: float
    seconds: float


def chrome_trace(events: Sequence[TraceEvent]) -> list[dict[str, object]]:
    """Return events in the format of chrome://tracing and Perfetto."""
    clocks = sorted({event.clock for event in events})
    return [
        {
            "name": event.name,
            "ph": "X",
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "pid": 0,
            "tid": clocks.index(event.clock),
            "cat": event.clock,
        }
        for event in events
    ] + [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": clock}}
        for number, clock in enumerate(clocks)
    ]


@dataclass(frozen=True)
class BucketLoad:
    """A bucket as a schedule sees it.

    Attributes:
        elements: with padding.
        dtypes: its own.
        unit, ready: those of `Reduction`.
        home: the unit that is gathered with it.
        trainable: whether it is reduced and updated.
        longest: the most elements that one rank owns.
        even: elements of an even bucket whose slices are as long as its longest.
        owned: elements that a rank updates where states are sharded.
        multiplications: the `step_work` of what the class steps by its shape: of the bucket, and that of such a rank.
        state_tensors: as large as a parameter, that have as many bytes as those that the class keeps.
    """

    elements: int
    dtypes: Dtypes
    unit: int
    ready: float
    home: int
    trainable: bool
    longest: int
    even: int
    owned: float
    multiplications: tuple[float, float]
    state_tensors: float


def bucket_loads(
    layout: Layout, units: Sequence[int], classes: Sequence[OptimizerStates] = OPTIMIZERS["adamw"]
) -> list[BucketLoad]:
    """Return the buckets of a layout, in its order.

    ``units``: the unit of each parameter, in order of registration. ``classes``: the states that each class keeps.

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
    found = []
    works = [work for _, work in loads(layout).values()]
    busiest = max(works, default=0) / max(sum(works), 1)
    for bucket in layout.buckets:
        first = min(slot.parameter for slot in bucket.slots)
        unit, early = units[first], first < first_unit and not units[first]
        of_unit = total[unit, first < first_unit]
        ready = 1.0 if early or not of_unit else 1 - before[first] / of_unit
        spec, kept = layout.parameters[first], classes[layout.parameters[first].optimizer_class]
        longest = EvenCuts(bucket.numel, layout.world_size, bucket.dtypes.alignment).largest()
        even, owned, work = bucket.numel, float(longest), 0
        if spec.grain == WHOLE:  # a rank has the work of the one that has most in the whole step
            longest = bucket.cuts.largest()
            even, owned = max(even, layout.world_size * longest), bucket.numel * busiest
            if kept.orthogonalizes:
                work = sum(layout.parameters[slot.parameter].step_work for slot in bucket.slots)
        found.append(
            BucketLoad(
                bucket.numel,
                bucket.dtypes,
                AFTER_THE_LAST if early else unit,
                ready,
                unit,
                spec.trainable,
                longest,
                even,
                owned,
                (work, work * busiest),
                kept.moved,
            )
        )
    return found


def program_of(
    units: Sequence[PassSeconds],
    tensors: Sequence[int],
    buckets: Sequence[BucketLoad],
    setting: PlanSetting,
    compute: Compute,
    micro_batches: int = 1,
) -> StepProgram:
    """Return the program of this library.

    Args:
        units: the seconds of each, the root's rest first, whose compute follows all others.
        tensors: parameters with hooks, of each unit.
        buckets: of `bucket_loads`.
        setting: what the user chooses, for all ranks of the cluster.
        compute: the equations for the update, the constants, and the cluster.
        micro_batches: of each rank in a step.
    """
    check(OF_SECONDS, setting)
    wires = Wires(compute.cluster)
    costs = _Costs(wires, setting, compute)
    found = [(bucket, costs.of_bucket(bucket)) for bucket in buckets if bucket.trainable]
    return StepProgram(
        units=costs.of_units(units, tensors, buckets if setting.gathers_units else ()),
        reductions=tuple(replace(reduction, unit=bucket.unit, ready=bucket.ready) for bucket, (reduction, _) in found),
        updates=tuple(update for _, (_, update) in found),
        micro_batches=micro_batches,
        reduced=setting.row.reduced_backwards(micro_batches),
        in_flight=buckets_in_flight(setting.row, folds=folds(wires.algorithm(costs.group))),
        passed_on=sums_under_way(setting.replicas),
        means_each_time=setting.shows_means,
        kept=setting.keeps_units,
        ahead=setting.prefetch_depth,
        streams=wires.on_gpu,
        control=wires.latency(),
        host_reads=setting.offloads_parameters,
        host_updates=setting.steps_on_host,
        host=wires.cluster.calls.step,
        fixed=compute.constants["fixed"] if wires.on_gpu else 0.0,
        overlap=compute.constants["overlap"] if wires.on_gpu else 0.0,
        jitter=jitter(wires, compute),
    )


def jitter(wires: Wires, compute: Compute) -> float:
    """Return the share of a step that is lost to the slowest of many hosts."""
    return compute.constants["jitter"] * math.log2(wires.cluster.hosts)


class _Costs:
    """What units and buckets cost in a setting. What equal ones cost is computed once."""

    def __init__(self, wires: Wires, setting: PlanSetting, compute: Compute) -> None:
        self.wires, self.setting, self.compute = wires, setting, compute
        self.group = RankGroup.neighbours(wires.cluster, setting.factor)
        self._buckets: dict[BucketLoad, tuple[Reduction, UpdateStep]] = {}

    def of_bucket(self, bucket: BucketLoad) -> tuple[Reduction, UpdateStep]:
        """Return the reduction and the update of a bucket, or of one that costs the same."""
        key = replace(bucket, unit=0, ready=0.0, home=0)
        if key not in self._buckets:
            self._buckets[key] = self._reduction(bucket), self._update(bucket)
        return self._buckets[key]

    def of_units(
        self, units: Sequence[PassSeconds], tensors: Sequence[int], gathered: Sequence[BucketLoad]
    ) -> tuple[UnitStep, ...]:
        """Return the units. ``gathered``: the buckets of the units, unless these are whole."""
        cluster, near, calls = self.wires.cluster, self.setting.near, self.wires.cluster.calls
        crowd = 1.0 if self.wires.on_gpu else max(cluster.per_host / cluster.gpu.per_host, 1.0)
        in_unit = calls.unit if gathered else 0.0
        hooks = (in_unit + calls.parameter * count for count in tensors)
        slowed = [_slowed(each.with_hooks(in_unit, more), crowd) for each, more in zip(units, hooks, strict=True)]
        gather, again = [NOTHING] * len(units), [NOTHING] * len(units)
        around, copies = RankGroup.neighbours(cluster, near), [0.0] * len(units)
        for bucket in gathered:
            width, home = bucket.dtypes.itemsize("param_dtype"), bucket.home
            from_masters = bucket.trainable and bucket.dtypes.has_master
            copied = "master_dtype" if from_masters else "param_dtype"
            copies[home] += self._on_host_link(bucket.longest, bucket, copied)
            for costs, group in ((gather, self.group), (again, around)):
                cost = self._in_all_groups(bucket, width, group)
                costs[home] = after(costs[home], replace(cost, host=cost.host + calls.release))
        every = range(len(units))
        stay = self.setting.unit_schedule(len(units)).whole_when_a_backward_begins(every) if gathered else every
        return tuple(
            UnitStep(passes, gather[unit], None if unit in stay else again[unit], copies[unit])
            for unit, passes in enumerate(slowed)
        )

    def _on_host_link(self, elements: float, bucket: BucketLoad, dtype: str) -> float:
        """Return the seconds of a copy; 0 unless parameters are in the host's memory."""
        nbytes = elements * bucket.dtypes.itemsize(dtype) if self.setting.offloads_parameters else 0.0
        return nbytes / self.wires.cluster.gpu.host_link

    def _reduction(self, bucket: BucketLoad) -> Reduction:
        kept = self._on_host_link(bucket.longest, bucket, "accumulate_dtype")
        means = NOTHING
        if self.setting.row.grads_replicated:
            means = self._gather(bucket, bucket.dtypes.itemsize("accumulate_dtype"), self.group)
        first, again = (self._sums(bucket, started=started) for started in (False, True))
        return Reduction(bucket.unit, bucket.ready, first, again, means, kept)

    def _sums(self, bucket: BucketLoad, *, started: bool) -> WireCost:
        """Return the cost of a bucket's sums. ``started``: they are added to those of earlier backwards."""
        dtypes, elements, wires = bucket.dtypes, bucket.elements, self.wires
        travel, accumulate = dtypes.itemsize("reduce_dtype"), dtypes.itemsize("accumulate_dtype")
        cost, longer = (
            wires.reduce_scatter(count, travel, accumulate, self.group, started=started)
            for count in (elements, bucket.even)
        )
        calls, ranks = wires.cluster.calls, wires.cluster.ranks
        host = calls.bucket + (calls.exchange if ranks > 1 else 0.0)
        cost = replace(longer, sent=cost.sent, crossed=cost.crossed, host=host)
        if self.setting.replicas == 1:
            return cost
        return wires.chain(cost, elements * accumulate, self.group.ranks)

    def _update(self, bucket: BucketLoad) -> UpdateStep:
        dtypes, setting, state_tensors = bucket.dtypes, self.setting, bucket.state_tensors
        owned, work = float(bucket.elements), bucket.multiplications[0]
        if not setting.row.grads_replicated:
            owned, work = bucket.owned, bucket.multiplications[1]
        gather, moved, host = NOTHING, 0.0, self.wires.cluster.calls.update
        if setting.row.parameters_are_gathered:
            gather = self._in_all_groups(bucket, dtypes.itemsize("param_dtype"), self.group)
        if setting.steps_on_host:
            return UpdateStep(self.compute.update_on_host(owned, dtypes, state_tensors), gather, host=host)
        if setting.offload:
            kept = state_tensors + (dtypes.has_master and not self.wires.on_gpu) + setting.offloads_parameters
            moved = owned * kept * dtypes.itemsize("master_dtype") / self.wires.cluster.gpu.host_link
        seconds = self.compute.update(owned, dtypes, state_tensors) + self.compute.orthogonalization(work)
        seconds += self._on_host_link(owned, bucket, "master_dtype")  # the gradient
        return UpdateStep(seconds, gather, moved, host)

    def _in_all_groups(self, bucket: BucketLoad, width: int, group: RankGroup) -> WireCost:
        return in_groups(self._gather(bucket, width, group), self.wires.cluster.ranks // group.ranks)

    def _gather(self, bucket: BucketLoad, width: int, group: RankGroup) -> WireCost:
        """Return the cost of an all-gather in one group. ``width``: bytes of an element."""
        cost, longer = (self.wires.all_gather(n * width, group) for n in (bucket.elements, bucket.even))
        host = self.wires.cluster.calls.gather if group.ranks > 1 or self.setting.offloads_parameters else 0.0
        return replace(longer, sent=cost.sent, crossed=cost.crossed, host=host)


def _slowed(passes: PassSeconds, crowd: float) -> PassSeconds:
    return PassSeconds(*(getattr(passes, each.name) * crowd for each in fields(passes)))


def in_groups(cost: WireCost, groups: int) -> WireCost:
    """Return the cost of a collective that ``groups`` groups run at the same time."""
    return replace(cost, sent=cost.sent * groups, crossed=cost.crossed * groups)


def after(first: WireCost, then: WireCost) -> WireCost:
    """Return the cost of one collective after another on the same wire."""
    return WireCost(*(getattr(first, each.name) + getattr(then, each.name) for each in fields(WireCost)))
