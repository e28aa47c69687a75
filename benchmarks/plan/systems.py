"""Make the program of a step of another system, as its publication or its source describes the schedule.

    FSDP       a unit is a bucket: gathered one ahead in forward and backward, reduced by a ring when its backward ends
    DDP        buckets of 25 MiB cross units: all-reduced as soon as they are ready
    ZeRO-1, 2  buckets cross units: reduced as they are ready; updated slices are gathered after the step

All use NCCL's ring, or its tree for an all-reduce; replicas of a shard are all-reduced, and so is the norm. Collectives
of one process group run one after the other, as PyTorch's NCCL backend has one stream for them.

Sources: Zhao et al., "PyTorch FSDP" (2023), sections 3 and 4; Li et al., "PyTorch Distributed" (2020), section 3.2;
DeepSpeed, docs/config-json ("reduce_bucket_size", "overlap_comm").

Knows: what each system launches when. Does not know: FLOPs, or when anything happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zero.core.layout import Dtypes
from zero.planning.seconds.compute import NOTHING, Compute, PassSeconds, RankGroup, WireCost, Wires
from zero.planning.seconds.schedule import (
    AFTER_THE_LAST,
    Reduction,
    StepProgram,
    UnitStep,
    UpdateStep,
    after,
    in_groups,
    jitter,
)

MIB = float(1 << 20)
STATES_OF_ADAM = 2  # tensors as large as a parameter
SWITCH_EFFICIENCY = 1.07
"""The share of a link that an all-reduce reaches where the switch inside a host adds, so that a rank sends less:
Ultra-Scale Playbook, all-reduce of 256 MB over 8 H100 at 436 GB/s of busbw."""
SUM_IN_SWITCH = ("hopper", "blackwell")  # with NVIDIA's NVSwitch of the third generation or later (NVLink SHARP)
TREE_STEPS = 16
"""Ring steps that a level of an all-reduce's tree costs, up or down: Ultra-Scale Playbook, mean all-reduce of 256 MB
over 16 to 256 H100."""


@dataclass(frozen=True)
class UnitLoad:
    """A unit as a schedule sees it: its seconds for one micro-batch, and the elements of its parameters."""

    passes: PassSeconds
    elements: int


@dataclass(frozen=True)
class System:
    """The schedule of another system.

    Attributes:
        shards_parameters: units are gathered (stage 3).
        shards_states: an owner updates its shard, and updated slices are gathered where parameters are whole.
        all_reduces: gradients are all-reduced, else reduce-scattered.
        bucket_bytes: of a reduction, counted in the dtype in which it travels; None: a unit is a bucket.
        each_micro_batch: gradients are reduced in each micro-batch, else in the last one.
        last_stays: the last unit stays gathered between its forward and its backward.
        host: seconds of the host's hooks of a unit, in a forward and in a backward.
    """

    shards_parameters: bool = False
    shards_states: bool = False
    all_reduces: bool = False
    bucket_bytes: float | None = None
    each_micro_batch: bool = False
    last_stays: bool = False
    host: tuple[float, float] = (0.12e-3, 0.12e-3)  # an assumption, but for FSDP2


_FSDP2_HOST = (1.7e-3, 1.88e-3)  # ../results/gpu-short-c.json: FSDP2 less the plain loop, a 33rd of each
_UNITS = System(shards_parameters=True, shards_states=True, each_micro_batch=True)
SYSTEMS: Mapping[str, System] = {
    "ddp": System(all_reduces=True, bucket_bytes=25 * MIB),
    "fsdp1": _UNITS,
    "fsdp2": replace(_UNITS, last_stays=True, host=_FSDP2_HOST),
    "zero1": System(shards_states=True, bucket_bytes=25 * MIB),
    "zero2": System(shards_states=True, bucket_bytes=1000 * MIB, each_micro_batch=True),
    "zero3": _UNITS,
}
"""The schedules by name. "zero2" has DeepSpeed's buckets of 5e8 elements in 16 bits."""


def program_of_system(
    units: Sequence[UnitLoad],
    wires: Wires,
    schedule: System,
    compute: Compute,
    dtypes: Dtypes,
    *,
    factor: int,
    reshard: bool = True,
    micro_batches: int = 1,
) -> StepProgram:
    """Return the program of another system.

    Args:
        units: the root's rest first.
        wires: the links of the cluster, all of whose ranks train.
        schedule: one of `SYSTEMS`.
        compute: the equations for the update of Adam, and the constants.
        dtypes: in which parameters are gathered, gradients reduced, and masters kept.
        factor: ranks that share a copy of what is sharded, a divisor of their number.
        reshard: units are gathered again for the backward.
        micro_batches: of each rank in a step.
    """
    ranks = wires.cluster.ranks
    group, owners = RankGroup.neighbours(wires.cluster, factor), RankGroup.replicas(wires.cluster, factor)
    travel, narrow = dtypes.itemsize("reduce_dtype"), dtypes.itemsize("param_dtype")

    def reduced(elements: float) -> WireCost:
        nbytes = elements * travel
        if schedule.all_reduces:
            return all_reduce(wires, nbytes, RankGroup.neighbours(wires.cluster, ranks))
        inside = in_groups(wires.ring(nbytes, group), ranks // factor)
        return after(inside, in_groups(all_reduce(wires, nbytes / factor, owners), factor))

    def gathered(elements: float) -> WireCost:
        return in_groups(wires.ring(elements * narrow, group), ranks // factor)

    pieces = _pieces(units, schedule, travel)
    steps = []
    for number, unit in enumerate(units):
        gather = gathered(unit.elements) if schedule.shards_parameters else NOTHING
        stays = not reshard or number == 0 or (schedule.last_stays and number == len(units) - 1)
        again = None if stays or not gather.seconds else gather
        steps.append(UnitStep(unit.passes.with_hooks(*schedule.host), gather, again))
    after_step = schedule.shards_states and not schedule.shards_parameters
    share = factor if schedule.shards_states else 1
    return StepProgram(
        units=tuple(steps),
        reductions=tuple(Reduction(unit, ready, reduced(elements)) for unit, ready, elements in pieces),
        updates=tuple(
            UpdateStep(
                compute.update(elements / share, dtypes, STATES_OF_ADAM), gathered(elements) if after_step else NOTHING
            )
            for _, _, elements in pieces
        ),
        micro_batches=micro_batches,
        reduced=micro_batches if schedule.each_micro_batch else 1,
        gathers_in_flight=math.inf,
        kept=schedule.shards_parameters and not reshard,
        streams=wires.on_gpu,
        control=all_reduce(wires, 4.0, RankGroup.neighbours(wires.cluster, ranks)).seconds,
        synchronises=True,
        fixed=compute.constants["fixed"],
        overlap=compute.constants["overlap"],
        jitter=jitter(wires, compute),
    )


def _pieces(units: Sequence[UnitLoad], schedule: System, travel: int) -> list[tuple[int, float, float]]:
    """Return (unit, share of its backward, elements) of each reduction, in the order of a backward."""
    pieces: list[tuple[int, float, float]] = []
    order = [*range(len(units) - 1, 0, -1), 0]
    if schedule.bucket_bytes is None:
        pieces = [(unit or AFTER_THE_LAST, 1.0, float(units[unit].elements)) for unit in order if units[unit].elements]
    else:
        cap, filled = schedule.bucket_bytes / travel, 0.0
        for unit in order:
            left = whole = float(units[unit].elements)
            while filled + left >= cap:
                left -= cap - filled
                pieces.append((unit or AFTER_THE_LAST, 1 - left / whole if unit else 1.0, cap))
                filled = 0.0
            filled += left
        if filled:
            pieces.append((AFTER_THE_LAST, 1.0, filled))
    return pieces


def all_reduce(wires: Wires, nbytes: float, group: RankGroup) -> WireCost:
    """Return the cost of an all-reduce by a tree between hosts, and by links or a switch inside them."""
    n, hosts, network = group.ranks, group.hosts, wires.network
    if n == 1:
        return NOTHING
    gpu = wires.cluster.gpu
    link = SWITCH_EFFICIENCY * gpu.link if gpu.family in SUM_IN_SWITCH else wires.link
    inside = max(group.per_host - 1, 0.0)
    latency = network.base + 2 * inside * network.hop_inside
    transfer = 2 * (n - 1) / n * nbytes / link if inside else 0.0
    if hosts > 1:
        latency += 2 * math.log2(hosts) * TREE_STEPS * network.ring_step
        transfer = max(transfer, 2 * (hosts - 1) / hosts * nbytes / (wires.rail * group.per_host))
    seconds = latency + transfer
    return WireCost(seconds, seconds, 0.0, 2 * (n - 1) * nbytes, 2 * (hosts - 1) * nbytes)
