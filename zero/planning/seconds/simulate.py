"""The seconds of a training step, by recurrences over the clocks of one rank.

    host      h   launches kernels and collectives; it may be ahead of the device
    compute   c   runs forwards, backwards, folds and updates, and waits
    wire      x   runs collectives one at a time, in the order of their launch
    copies    p   copies shards from the host before gathers, one at a time
    disk      d   reads and writes states, beside the update

    compute begins no earlier than the host has begun to issue it, and ends no earlier than that has ended
    a collective starts at max(x, h, when its memory is ready); what waits for it continues at its end
    a copy starts at max(p, h, c, when its memory is ready), and its collective no earlier than at its end
    while the wire is busy, compute runs at 1/(1 + overlap) of its speed

A `StepProgram` is the schedule as data. Buckets pass the pipeline of the library itself (`collectives/pipeline.py`),
with works that advance these clocks. A rank without streams (a CPU) has one clock for host and compute. All ranks
run the same program. Where their ends differ, as in a chain of replicas, the program has the costs of the last one.

Knows: seconds, and their order. Does not know: FLOPs, bytes of dtypes, links, stages.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from collectives import Pipeline, PipelineStage, pass_on

from ...core.stage import STATES_AHEAD, STATES_BEHIND
from .compute import WireCost
from .schedule import PARTS, StepProgram, TraceEvent

_STATE_BUFFERS = STATES_AHEAD + 1 + STATES_BEHIND  # buckets whose states are in memory, if they are offloaded
_RUN = 3  # micro-batches of a kind that are simulated; further ones take as long as the third


def simulate(program: StepProgram, *, trace: bool = False) -> StepSeconds:
    """Return the seconds of a step. ``trace``: also what each clock does when."""
    rank = _Rank(program, trace)
    rank.micro_batches(program.micro_batches - program.reduced, False)
    rank.micro_batches(program.reduced, True)
    rank.step()
    rank.finish()
    return rank.state


@dataclass
class StepSeconds:
    """A step, as far as it is simulated.

    Attributes:
        host, compute, wire, copies: the clocks.
        issued: seconds in which the host has worked.
        sent: payload bytes of all collectives of this rank's groups.
        crossed: those that cross between hosts.
        parts: what its seconds are made of, by the names in `PARTS`.
        events: for a trace; empty unless asked for.
    """

    host: float = 0.0
    issued: float = 0.0
    compute: float = 0.0
    wire: float = 0.0
    copies: float = 0.0
    sent: float = 0.0
    crossed: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    events: list[TraceEvent] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return math.fsum(self.parts.values())


class _Rank:
    """A rank that runs a program."""

    def __init__(self, program: StepProgram, trace: bool) -> None:
        self._program, self.state, self._traces = program, StepSeconds(), trace
        self._sending: deque[tuple[float, float]] = deque()  # when the wire is busy, from `compute` on
        self._used = deque([0.0] * (program.ahead + 1), maxlen=program.ahead + 1)  # when the last units were last used
        self._last_use = [0.0] * len(program.units)
        self._arriving: dict[int, _Launched] = {}  # unit -> its gather under way
        self._reductions = Pipeline(*self._reducing())
        self._started = False  # an earlier backward of the step has reduced
        self._by_unit: dict[int, list[tuple[float, int]]] = {}
        for number, reduction in sorted(enumerate(program.reductions), key=lambda each: each[1].ready):
            self._by_unit.setdefault(reduction.unit, []).append((reduction.ready, number))

    # -- clocks -------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the time at which the host launches."""
        return self.state.host if self._program.streams else self.state.compute

    def wait(self, until: float, part: str) -> None:
        """Let compute wait."""
        state = self.state
        if until > state.compute:
            state.parts[part] += until - state.compute
            state.compute = until

    def work(self, seconds: float, part: str, name: str) -> None:
        """Let compute work. It is slower while the wire is busy."""
        if seconds <= 0.0:
            return
        state, slow = self.state, 1 + self._program.overlap
        sending, time, left, lost = self._sending, state.compute, seconds, 0.0
        while sending and sending[0][1] <= time:
            sending.popleft()
        for start, end in sending:
            if start >= time + left:
                break
            if start > time:
                left -= start - time
                time = start
            beside = min(end - time, left * slow)
            left -= beside / slow
            lost += beside - beside / slow
            time += beside
        self.note(name, "compute", state.compute, seconds + lost)
        state.parts[part] += seconds
        state.parts["slowdown"] += lost
        state.compute += seconds + lost

    def _launching(self, seconds: float, part: str = "host") -> None:
        """Let the host work. Without streams, compute stands still meanwhile."""
        if part == "host":
            self.state.issued += seconds
        if self._program.streams:
            self.state.host += seconds
        else:
            self.wait(self.state.compute + seconds, part)

    def _send(self, cost: WireCost, ready: float, name: str) -> float:
        """Launch a collective. Return when its result is there."""
        state = self.state
        self._launching(cost.host)
        state.sent, state.crossed = state.sent + cost.sent, state.crossed + cost.crossed
        if cost.seconds <= 0.0:
            return 0.0
        start = max(state.wire, self._now(), ready)
        state.wire = start + cost.period
        if self._sending and self._sending[-1][1] == start:
            self._sending[-1] = (self._sending[-1][0], state.wire)
        else:
            self._sending.append((start, state.wire))
        self.note(name, "wire", start, cost.period)
        return start + cost.seconds

    def note(self, name: str, clock: str, start: float, seconds: float) -> None:
        if self._traces and seconds > 0.0:
            self.state.events.append(TraceEvent(name, clock, start, seconds))

    # -- forward and backward -----------------------------------------------------------------------------------------

    def micro_batches(self, count: int, reduces: bool) -> None:
        """Run micro-batches of one kind."""
        for number in range(min(count, _RUN)):
            before = replace(self.state, parts=dict(self.state.parts))
            self._forward()
            self._backward(reduces)
            if number == _RUN - 1 and count > _RUN:
                self._repeat(before, count - _RUN)

    def _repeat(self, before: StepSeconds, times: int) -> None:
        """Add ``times`` what has happened since ``before``."""
        state, shift = self.state, times * (self.state.compute - before.compute)
        for name in ("host", "issued", "compute", "wire", "copies", "sent", "crossed"):
            setattr(state, name, getattr(state, name) + times * (getattr(state, name) - getattr(before, name)))
        for name in PARTS:
            state.parts[name] += times * (state.parts[name] - before.parts[name])
        self._sending = deque((start + shift, end + shift) for start, end in self._sending)
        self._used = deque((time + shift for time in self._used), maxlen=self._used.maxlen)
        self._last_use = [time + shift for time in self._last_use]

    def _forward(self) -> None:
        units = self._program.units
        self._gather(0, units[0].gather)
        self._await_unit(0)
        for unit in range(1, len(units)):
            for ahead, other in enumerate(range(unit, min(unit + 1 + self._program.ahead, len(units)))):
                self._gather(other, units[other].gather, ahead)
            self._await_unit(unit)
            self._compute(unit)
        self._compute(0)

    def _compute(self, unit: int) -> None:
        passes = self._program.units[unit].passes
        self._run(passes.host, passes.forward, f"forward {unit}")
        self._release(unit, stays=self._program.units[unit].again is None)

    def _run(self, host: float, seconds: float, name: str) -> None:
        """Compute what the host issues in ``host`` seconds. It begins no earlier than these, and ends no earlier."""
        self.wait(self._now(), "host")
        self._launching(host)
        self.work(seconds, "compute", name)
        self.wait(self._now(), "host")

    def _release(self, unit: int, *, stays: bool) -> None:
        """Note the end of a unit's use. ``stays``: its memory is in use until its backward."""
        self._last_use[unit] = self.state.compute
        step = self._program.units[unit]
        if unit and not stays and (step.gather.seconds > 0.0 or step.copy > 0.0):
            self._used.append(self.state.compute)

    def _gather(self, unit: int, cost: WireCost | None, ahead: int = 0) -> None:
        """Launch the gather of a unit, unless it is under way. Besides the rest, one unit and those ahead of it have
        memory: with one ahead, that of the unit two before it in the order of use. ``ahead``: how many units are used
        before it, the one in use included."""
        copy = self._program.units[unit].copy
        if cost is None or max(cost.seconds, cost.fold, copy) <= 0.0 or unit in self._arriving:
            return
        own = self._program.kept or unit == 0
        free = self._last_use[unit] if own else self._used[ahead]
        copied = self._copy(copy, free, f"copy shard {unit}")
        end = max(copied, self._send(cost, max(free, copied), f"gather {unit}"))
        self._arriving[unit] = _Launched(self, "gather", end, cost.fold, f"copy {unit}")

    def _copy(self, seconds: float, ready: float, name: str) -> float:
        """Launch a copy from the host, behind the work that compute has so far. Return its end; 0 without a copy."""
        if seconds <= 0.0:
            return 0.0
        start = max(self.state.copies, self._now(), self.state.compute, ready)
        self.state.copies = start + seconds
        self.note(name, "copies", start, seconds)
        return self.state.copies

    def _await_unit(self, unit: int) -> None:
        if unit in self._arriving:
            self.wait(self._now(), "host")
            self._arriving.pop(unit).wait()

    def _backward(self, reduces: bool) -> None:
        units = self._program.units
        if reduces:
            self._reductions.begin_round(range(len(self._program.reductions)))
        self._differentiate(0, reduces)
        for unit in range(len(units) - 1, 0, -1):
            for ahead, other in enumerate(range(unit, max(unit - 1 - self._program.ahead, 0), -1)):
                self._gather(other, units[other].again, ahead)
            self._await_unit(unit)
            self._differentiate(unit, reduces)
        if not reduces:
            return
        self._reductions.finish()
        if self._program.host_reads:
            self.state.host = max(self.state.host, self.state.compute)
        if self._program.means_each_time and not self._gathers_beside:
            self._gather_means()
        self._started = True

    def _differentiate(self, unit: int, reduces: bool) -> None:
        passes = self._program.units[unit].passes
        self.wait(self._now(), "host")
        self.work(passes.recompute, "recompute", f"recompute {unit}")
        done = 0.0
        for ready, number in self._by_unit.get(unit, ()) if reduces else ():
            self._run((ready - done) * passes.host_backward, (ready - done) * passes.backward, f"backward {unit}")
            done = ready
            self._reductions.ready(number)
        self._run((1 - done) * passes.host_backward, (1 - done) * passes.backward, f"backward {unit}")
        self._release(unit, stays=False)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reducing(self) -> list[PipelineStage]:
        """Return the stages of a bucket in a backward."""
        program = self._program
        stages = [PipelineStage(program.in_flight, self._reduce)]
        if program.passed_on:
            stages = [PipelineStage(program.in_flight, self._reduce, pass_on), PipelineStage(program.passed_on)]
        if self._gathers_beside:
            stages.append(PipelineStage(program.gathers_in_flight, self._gather_mean))
        return stages

    @property
    def _gathers_beside(self) -> bool:
        """True if means are gathered beside a backward."""
        return self._program.means_each_time and self._program.streams

    def _reduce(self, number: int) -> _Launched:
        reduction = self._program.reductions[number]
        cost, copy = reduction.cost, reduction.copy
        if self._started:
            cost, copy = reduction.again or cost, 2 * copy
        end = self._send(cost, self.state.compute, f"reduce bucket {number}")
        return _Launched(self, "reduction", end, cost.fold, "fold", copy, cost.returning)

    def _gather_mean(self, number: int) -> _Launched | None:
        return self._gathered(self._program.reductions[number].means, f"means {number}")

    def _gathered(self, cost: WireCost, name: str) -> _Launched | None:
        if cost.seconds <= 0.0:
            return None
        return _Launched(
            self, "gather", self._send(cost, self.state.compute, f"gather {name}"), cost.fold, f"copy {name}"
        )

    def _gather_means(self) -> None:
        gathers = Pipeline(PipelineStage(math.inf, self._gather_mean))
        gathers.begin_round(range(len(self._program.reductions)))
        gathers.finish()

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Agree, update bucket by bucket, and gather what was updated."""
        program, state = self._program, self.state
        if program.synchronises:
            state.host = max(state.host, state.compute)
        self._launching(program.host)
        self.wait(self._now(), "host")
        self._launching(program.control, "control")
        if program.streams:
            self.wait(state.host, "control")
        if not program.means_each_time:
            self._gather_means()
        gathers = Pipeline(PipelineStage(program.gathers_in_flight, self._gather_updated))
        gathers.begin_round(range(len(program.updates)))
        disk = _Disk(self, program)
        for number, bucket in enumerate(program.updates):
            disk.await_states(number)
            self._launching(bucket.host)
            self.wait(self._now(), "host")
            self.work(bucket.update, "update", f"update {number}")
            if program.host_updates:
                state.host = max(state.host, state.compute)
            disk.write_states(number)
            gathers.ready(number)
        gathers.finish()
        self.wait(disk.writing, "disk")

    def _gather_updated(self, number: int) -> _Launched | None:
        return self._gathered(self._program.updates[number].gather, f"updated {number}")

    def finish(self) -> None:
        """Wait until every clock has ended."""
        program, state = self._program, self.state
        self.wait(self._now(), "host")
        self.wait(state.wire, "reduction")
        self.wait(state.compute + program.fixed, "fixed")
        self.wait(state.compute * (1 + program.jitter), "jitter")


class _Launched:
    """A collective under way, as a work of the library. Compute waits for its end, and then adds up or copies."""

    def __init__(
        self, rank: _Rank, part: str, end: float, fold: float, name: str, copy: float = 0.0, returning: float = 0.0
    ) -> None:
        self._rank, self._part, self._end, self._returning = rank, part, end, returning
        self._fold, self._name, self._copy = fold, name, copy

    def pass_on(self) -> None:
        """Add this rank's part to the sum, and send it on."""
        if not self._returning:
            return
        self._rank.wait(self._end - self._returning - self._fold, self._part)
        self._rank.work(self._fold, "fold", self._name)
        self._end, self._fold, self._returning = self._rank.state.compute + self._returning, 0.0, 0.0

    def wait(self) -> None:
        self._rank.wait(self._end, self._part)
        self._rank.work(self._fold, "fold", self._name)
        self._rank.work(self._copy, "disk", "copy sum")


class _Disk:
    """The states of buckets on their way to the update and back: beside it, or on the rank's one clock."""

    def __init__(self, rank: _Rank, program: StepProgram) -> None:
        self._rank, self._program = rank, program
        self._reading = rank.state.compute + (program.updates[0].read if program.updates else 0.0)
        self.writing, self._written = 0.0, list[float]()

    def await_states(self, number: int) -> None:
        """Wait for the states of a bucket, and begin to read the next ones."""
        if not self._program.streams:  # the processor that updates also maps the pages
            self._read(number)
        self._rank.wait(self._reading, "disk")
        if self._program.streams and number + 1 < len(self._program.updates):
            self._read(number + 1)

    def _read(self, number: int) -> None:
        room, seconds = number - _STATE_BUFFERS, self._program.updates[number].read
        begin = max(self._rank.state.compute, self._written[room] if room >= 0 else 0.0)
        self._rank.note(f"read {number}", "disk", begin, seconds)
        self._reading = begin + seconds

    def write_states(self, number: int) -> None:
        """Begin to write the states of a bucket."""
        begin, seconds = max(self.writing, self._rank.state.compute), self._program.updates[number].read
        self._rank.note(f"write {number}", "disk", begin, seconds)
        self.writing = begin + seconds
        self._written.append(self.writing)
        if not self._program.streams:
            self._rank.wait(self.writing, "disk")
