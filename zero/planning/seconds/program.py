"""A training step as data: which units are gathered when, which buckets are reduced, and how the step ends.

    micro-batch    forward: gather, compute, release each unit     backward: the same in reverse; reduce each bucket
    step           agree; update each bucket; gather what was updated

`zero.planning.seconds.schedule` makes programs, `zero.planning.seconds.simulate` runs them.

Knows: seconds, and what follows what. Does not know: FLOPs, links, stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.stage import GATHERS_IN_FLIGHT
from .compute import PassSeconds
from .wires import NOTHING, WireCost

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
        keep: seconds of compute in which this rank's sum is copied to the host.
        fetch: seconds of compute in which the sum so far is copied from there, in a later one of the step.
    """

    unit: int
    ready: float
    cost: WireCost
    again: WireCost | None = None
    means: WireCost = NOTHING
    keep: float = 0.0
    fetch: float = 0.0


@dataclass(frozen=True)
class UpdateStep:
    """The end of the step for one bucket: read, update, write back, gather the updated slices. ``host``: in which the
    host issues all but the gather."""

    update: float
    gather: WireCost = NOTHING
    read: float = 0.0
    write: float = 0.0
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
        in_flight: reductions under way before the oldest is waited for; 0: no limit.
        gathers_in_flight: of updated parameters; 0: no limit.
        means_each_time: means are gathered at the end of each backward that reduces, not once a step.
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
    in_flight: int = 0
    gathers_in_flight: int = GATHERS_IN_FLIGHT
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


@dataclass(frozen=True)
class StepSeconds:
    """The result of a simulation.

    Attributes:
        seconds: of the step.
        parts: how they are made up, by the names in `PARTS`; their sum is ``seconds``.
        sent: payload bytes of all collectives of this rank's groups.
        crossed: those that cross between hosts.
        host: seconds in which the host issues the step.
        events: for a trace; empty unless asked for.
    """

    seconds: float
    parts: Mapping[str, float]
    sent: float
    crossed: float
    host: float
    events: tuple[TraceEvent, ...] = ()


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
