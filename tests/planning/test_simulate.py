"""The simulation of a step: small cases by hand, and laws over random programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.planning.seconds.compute import PassSeconds
from zero.planning.seconds.program import (
    AFTER_THE_LAST,
    Reduction,
    StepProgram,
    UnitStep,
    UpdateStep,
    chrome_trace,
)
from zero.planning.seconds.simulate import simulate
from zero.planning.seconds.wires import NOTHING, WireCost


def wire(seconds: float, fold: float = 0.0) -> WireCost:
    return WireCost(seconds, seconds, fold, sent=8 * seconds, crossed=seconds)


def unit(forward: float, backward: float, gather: float = 0.0, again: float | None = 0.0) -> UnitStep:
    """Return a unit whose host takes no time."""
    cost = wire(gather) if gather else NOTHING
    return UnitStep(PassSeconds(forward, backward), cost, None if again is None else wire(again))


ROOT, SLOW = unit(0, 0), UnitStep(PassSeconds(1, 1, host=3, host_backward=3))
BACKWARD = (ROOT, unit(0, 8))
CHAIN = (Reduction(AFTER_THE_LAST, 1.0, WireCost(10, 1)),) * 3  # 10 s from end to end, 1 s on the wire
BUCKETS = tuple(Reduction(1, ready, wire(6)) for ready in (0.5, 0.75, 1.0))
MICRO_BATCHES = StepProgram((unit(1, 2), unit(3, 6)), (Reduction(1, 1.0, wire(5)),), micro_batches=4)
STATES = StepProgram((ROOT,), updates=(UpdateStep(1, read=2, write=2),) * 4)
BY_HAND: dict[str, tuple[StepProgram, Mapping[str, float]]] = {
    "unit 2 is gathered in 2 s beside the forward of unit 1, in which that does 1.6 s of work": (
        StepProgram((ROOT, unit(4, 0, 1, None), unit(4, 0, 2, None)), overlap=0.25, kept=True),
        {"compute": 8, "gather": 1, "slowdown": 0.4},
    ),
    "two buckets, ready at 4 and 8, are on the wire at 4-10 and 10-16": (
        StepProgram(BACKWARD, BUCKETS[::2], in_flight=1),
        {"compute": 8, "reduction": 8},
    ),
    "a third one, ready at 6, stops compute until the first has ended, at 10": (
        StepProgram(BACKWARD, BUCKETS, in_flight=1),
        {"compute": 8, "reduction": 14},
    ),
    "a fold is compute of the rank that waits": (
        StepProgram(BACKWARD, (Reduction(1, 1.0, wire(6, fold=3)),), in_flight=1),
        {"compute": 8, "reduction": 6, "fold": 3},
    ),
    "chains of replicas, one in flight": (StepProgram(BACKWARD, CHAIN, in_flight=1), {"compute": 8, "reduction": 30}),
    "chains of replicas, all in flight": (StepProgram(BACKWARD, CHAIN), {"compute": 8, "reduction": 12}),
    "updates 0-1, 1-2, 2-3, gathers 1-4, 4-7, and the third, which waits for the first, 7-10": (
        StepProgram((ROOT,), updates=(UpdateStep(1, wire(3)),) * 3),
        {"update": 3, "gather": 7},
    ),
    "three buckets are in memory: reads of 2 s follow each other, then one update and one write": (
        STATES,
        {"update": 4, "disk": 7},
    ),
    "one processor reads and writes states itself": (replace(STATES, streams=False), {"update": 4, "disk": 16}),
    "micro-batches add up, and the last one reduces": (MICRO_BATCHES, {"compute": 48, "reduction": 5}),
    "each micro-batch reduces": (replace(MICRO_BATCHES, reduced=4), {"compute": 48, "reduction": 20}),
    "the host launches in 3 s what takes 1 s": (StepProgram((SLOW, SLOW)), {"compute": 4, "host": 8}),
    "without streams the host's work is compute's own time": (
        StepProgram((SLOW, SLOW), streams=False),
        {"compute": 4, "host": 12},
    ),
    "agreement and jitter are parts of their own": (
        StepProgram((unit(10, 0),), control=2, synchronises=True, fixed=8, jitter=0.1),
        {"compute": 10, "control": 2, "fixed": 8, "jitter": 2},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_small_step_takes_what_it_takes_by_hand(name: str) -> None:
    program, expected = BY_HAND[name]
    found = simulate(program)
    assert {part: seconds for part, seconds in found.parts.items() if seconds} == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(expected.values()))


def test_a_unit_is_gathered_one_ahead_and_the_last_is_still_there() -> None:
    """rest: wire 0-1. Unit 1: wire 1-3, compute 3-7. Unit 2: wire 3-5, compute 7-11; unit 3: wire 7-9 (in the memory
    of unit 1), compute 11-15. Rest: compute 15-16. Backward of the rest 16-18, unit 3 18-26, unit 2 26-34, unit 1
    34-42. The host has launched all of it at 0, so unit 2 is gathered again when its memory is free, at 11, and
    unit 1 in that of unit 3 at 26. Compute waited until 3 for gathers."""
    blocks = [unit(4, 8, 2, 2), unit(4, 8, 2, 2), unit(4, 8, 2, None)]
    found = simulate(StepProgram((unit(1, 2, 1, None), *blocks)), trace=True)
    assert (found.seconds, found.parts["compute"], found.parts["gather"]) == pytest.approx((42, 39, 3))
    gathers = [(event.name, event.start) for event in found.events if event.clock == "wire"]
    again = [("gather 2", 11), ("gather 1", 26)]
    assert gathers == [("gather 0", 0), ("gather 1", 1), ("gather 2", 3), ("gather 3", 7), *again]
    assert (found.sent, found.crossed) == (8 * 11, 11)
    spans = [event for event in chrome_trace(found.events) if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"compute", "wire"}
    assert spans[0] == {"name": "gather 0", "ph": "X", "ts": 0.0, "dur": 1e6, "pid": 0, "tid": 1, "cat": "wire"}


def test_many_micro_batches_take_as_long_as_if_each_were_simulated() -> None:
    """After the third a micro-batch repeats the one before."""
    blocks = (unit(4, 8, 5, 5), unit(4, 8, 5, 5), unit(4, 8, 5, None))
    program = StepProgram((unit(1, 2, 1, None), *blocks), (Reduction(2, 1.0, wire(9)),), in_flight=1, overlap=0.25)
    two, three, four, hundred = (
        simulate(replace(program, micro_batches=count, reduced=count)).seconds for count in (2, 3, 4, 100)
    )
    assert (four - three, hundred) == pytest.approx((three - two, three + 97 * (three - two)))


SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 13.0])


@st.composite
def costs(draw: st.DrawFn) -> WireCost:
    seconds = draw(SECONDS)
    return WireCost(seconds, seconds * draw(st.sampled_from([1, 1, 0.5])), draw(SECONDS) / 8, 1) if seconds else NOTHING


@st.composite
def programs(draw: st.DrawFn) -> StepProgram:
    """Draw a program, as schedules make them: the root and the last unit stay, and so do all if they are kept."""
    count, gathers, kept = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans())
    units, reductions = [], []
    for number in range(count):
        gather = draw(costs()) if gathers else NOTHING
        stays = kept or number in (0, count - 1) or not gather.seconds
        passes = PassSeconds(draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS) / 4, draw(SECONDS) / 4)
        units.append(UnitStep(passes, gather, None if stays else draw(costs())))
    for number in reversed(range(count)):
        for ready in [0.5, 1.0][: draw(st.integers(0, 2))]:
            means = draw(costs()) if draw(st.booleans()) else NOTHING
            reductions.append(Reduction(number or AFTER_THE_LAST, ready, draw(costs()), means))
    micro_batches = draw(st.integers(1, 5))
    return StepProgram(
        units=tuple(units),
        reductions=tuple(reductions),
        updates=tuple(UpdateStep(draw(SECONDS), draw(costs()), draw(SECONDS), draw(SECONDS)) for _ in reductions),
        micro_batches=micro_batches,
        reduced=draw(st.sampled_from([1, micro_batches])),
        in_flight=draw(st.integers(0, 2)),
        gathers_in_flight=draw(st.sampled_from([0, 2])),
        means_each_time=draw(st.booleans()),
        kept=kept,
        streams=draw(st.booleans()),
        control=draw(SECONDS),
        synchronises=draw(st.booleans()),
        fixed=draw(SECONDS),
        overlap=draw(st.sampled_from([0.0, 0.25, 0.5])),
    )


def faster(part: Any, names: tuple[str, ...], factor: float) -> Any:
    """Return a program, or a part of it, whose ``names`` take ``factor`` of their seconds."""
    if isinstance(part, tuple):
        return tuple(faster(each, names, factor) for each in part)
    if not isinstance(part, (StepProgram, UnitStep, Reduction, UpdateStep, PassSeconds, WireCost)):
        return part
    inner = {name: faster(value, names, factor) for name, value in vars(part).items()}
    return replace(part, **{name: value * factor if name in names else value for name, value in inner.items()})


@given(programs(), st.sampled_from([0.1, 0.5, 0.9]))
def test_faster_hardware_is_never_slower(program: StepProgram, factor: float) -> None:
    seconds = simulate(program).seconds
    for names in (("seconds", "period"), ("forward", "backward", "recompute"), ("host", "host_backward")):
        assert simulate(faster(program, names, factor)).seconds <= seconds * (1 + 1e-9), names


@given(programs())
def test_a_step_takes_at_least_its_largest_part_and_at_most_their_sum(program: StepProgram) -> None:
    """A disk reads and writes at the same time, so half of its work is a part."""
    found = simulate(program, trace=True)
    assert replace(found, events=()) == simulate(program)
    compute = sum(found.parts[name] for name in ("compute", "recompute", "fold", "update"))
    host = program.micro_batches * sum(unit.passes.host + unit.passes.host_backward for unit in program.units)
    host += program.control
    disk = sum(update.read + update.write for update in program.updates)
    sends = [cost for unit in program.units for cost in (unit.gather, unit.again or NOTHING)] * program.micro_batches
    sends += [reduction.cost for reduction in program.reductions] * program.reduced
    sends += [each.means for each in program.reductions] * (program.reduced if program.means_each_time else 1)
    sends += [update.gather for update in program.updates]
    largest = max(compute, sum(cost.period for cost in sends), host, disk / 2)
    whole = compute + sum(cost.seconds for cost in sends) + host + disk
    assert largest * (1 - 1e-9) <= found.seconds <= (whole + found.parts["slowdown"] + program.fixed) * (1 + 1e-9)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0
