"""Make the program of a step of another system, as its publication or its source describes the schedule.

    FSDP       a unit is a bucket: gathered one ahead in forward and backward, reduced by a ring when its backward ends
    DDP        buckets of 25 MiB cross units: all-reduced as soon as they are ready
    ZeRO-1, 2  buckets cross units: reduced as they are ready or at the end; updated slices are gathered after the step

All use NCCL's ring, or its tree for an all-reduce; replicas of a shard are all-reduced. Collectives of one process
group run one after the other, as PyTorch's NCCL backend has one stream for them.

Sources: Zhao et al., "PyTorch FSDP" (2023), sections 3 and 4; Li et al., "PyTorch Distributed" (2020), section 3.2;
DeepSpeed, docs/config-json ("reduce_bucket_size", "overlap_comm").

Knows: what each system launches when. Does not know: FLOPs, or when anything happens.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.layout import Dtypes
from .compute import Compute
from .program import AFTER_THE_LAST, Reduction, StepProgram, UnitStep, UpdateStep
from .schedule import UnitLoad, after, in_groups, jitter
from .wires import NOTHING, RankGroup, WireCost, Wires

MIB = float(1 << 20)


@dataclass(frozen=True)
class System:
    """The schedule of another system.

    Attributes:
        shards_parameters: units are gathered (stage 3).
        shards_states: an owner updates its shard, and updated slices are gathered where parameters are whole.
        all_reduces: gradients are all-reduced, else reduce-scattered.
        bucket_bytes: of a reduction, counted in the dtype in which it travels; None: a unit is a bucket.
        overlaps: reductions begin in the backward, else when it has ended.
        each_micro_batch: gradients are reduced in each micro-batch, else in the last one.
        last_stays: the last unit stays gathered between its forward and its backward.
    """

    shards_parameters: bool = False
    shards_states: bool = False
    all_reduces: bool = False
    bucket_bytes: float | None = None
    overlaps: bool = True
    each_micro_batch: bool = False
    last_stays: bool = False


_UNITS = {"shards_parameters": True, "shards_states": True, "each_micro_batch": True}
SYSTEMS: Mapping[str, System] = {
    "ddp": System(all_reduces=True, bucket_bytes=25 * MIB),
    "fsdp1": System(**_UNITS),
    "fsdp2": System(**_UNITS, last_stays=True),
    "zero1": System(shards_states=True, bucket_bytes=25 * MIB),
    "zero1-all-reduce": System(shards_states=True, all_reduces=True, bucket_bytes=25 * MIB),
    "zero1-end": System(shards_states=True, bucket_bytes=500 * MIB, overlaps=False),
    "zero2": System(shards_states=True, bucket_bytes=1000 * MIB, each_micro_batch=True),
    "zero3": System(**_UNITS),
}
"""The schedules by name. "zero2" has DeepSpeed's buckets of 5e8 elements in 16 bits."""


def system(name: str) -> System:
    """Return the schedule of this name. Raises `ValueError`, with the nearest name, if there is none."""
    if name in SYSTEMS:
        return SYSTEMS[name]
    close = difflib.get_close_matches(name, SYSTEMS, n=1)
    known = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(SYSTEMS)}"
    raise ValueError(f"no system is called {name!r}: {known}")


def program_of_system(
    units: Sequence[UnitLoad],
    wires: Wires,
    schedule: System,
    compute: Compute,
    dtypes: Dtypes,
    *,
    factor: int | None = None,
    reshard: bool = True,
    micro_batches: int = 1,
    state_tensors: int = 2,
    clip: bool = True,
) -> StepProgram:
    """Return the program of another system.

    Args:
        units: the root's rest first.
        wires: the links of the cluster, all of whose ranks train.
        schedule: one of `SYSTEMS`.
        compute: the equations for the update, and the constants.
        dtypes: in which parameters are gathered, gradients reduced, and masters kept.
        factor: ranks that share a copy of what is sharded; None: all.
        reshard: units are gathered again for the backward.
        micro_batches: of each rank in a step.
        state_tensors: as large as a parameter, that the optimizer keeps.
        clip: whether the norm of the gradients is taken.

    Raises:
        ValueError: a factor that does not divide the ranks.
    """
    ranks = wires.cluster.ranks
    factor = ranks if factor is None or not schedule.shards_states else factor
    if factor < 1 or ranks % factor:
        raise ValueError(f"factor={factor} does not divide the {ranks} ranks: choose a divisor")
    group, owners = RankGroup.neighbours(wires.cluster, factor), RankGroup.replicas(wires.cluster, factor)
    travel, narrow = dtypes.itemsize("reduce_dtype"), dtypes.itemsize("param_dtype")

    def reduced(elements: float) -> WireCost:
        nbytes = elements * travel
        if schedule.all_reduces:
            return wires.all_reduce(nbytes, RankGroup.neighbours(wires.cluster, ranks))
        inside = in_groups(wires.ring(nbytes, group), ranks // factor)
        return after(inside, in_groups(wires.all_reduce(nbytes / factor, owners), factor))

    def gathered(elements: float) -> WireCost:
        return in_groups(wires.ring(elements * narrow, group), ranks // factor)

    pieces = _pieces(units, schedule, travel)
    steps = []
    for number, unit in enumerate(units):
        gather = gathered(unit.elements) if schedule.shards_parameters else NOTHING
        stays = not reshard or number == 0 or (schedule.last_stays and number == len(units) - 1)
        steps.append(UnitStep(unit.passes, gather, None if stays or not gather.seconds else gather))
    after_step = schedule.shards_states and not schedule.shards_parameters
    share = factor if schedule.shards_states else 1
    return StepProgram(
        units=tuple(steps),
        reductions=tuple(Reduction(unit, ready, reduced(elements)) for unit, ready, elements in pieces),
        updates=tuple(
            UpdateStep(
                compute.update(elements / share, dtypes, state_tensors), gathered(elements) if after_step else NOTHING
            )
            for _, _, elements in pieces
        ),
        micro_batches=micro_batches,
        reduced=micro_batches if schedule.each_micro_batch else 1,
        gathers_in_flight=0,
        kept=schedule.shards_parameters and not reshard,
        streams=wires.on_gpu,
        control=wires.all_reduce(4.0, RankGroup.neighbours(wires.cluster, ranks)).seconds if clip else 0.0,
        synchronises=clip,
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
    if not schedule.overlaps:
        return [(AFTER_THE_LAST, 1.0, elements) for _, _, elements in pieces]
    return pieces
