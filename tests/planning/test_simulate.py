"""The simulation of a step: small cases by hand, and laws over random programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.planning.seconds.compute import PassSeconds
from zero.planning.seconds.program import (
    AFTER_THE_LAST,
    Reduction,
    StepProgram,
    StepSeconds,
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


def made_up(found: StepSeconds) -> dict[str, float]:
    return {name: pytest.approx(seconds) for name, seconds in found.parts.items() if seconds}


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_unit_is_gathered_one_ahead_and_the_last_is_still_there() -> None:
    """rest: wire 0-1. Unit 1: wire 1-3, compute 3-7. Unit 2: wire 3-5, compute 7-11; unit 3: wire 7-9 (in the memory
    of unit 1), compute 11-15. Rest: compute 15-16. Backward of the rest 16-18, unit 3 18-26, unit 2 26-34, unit 1
    34-42. The host has launched all of it at 0, so unit 2 is gathered again when its memory is free, at 11, and
    unit 1 in that of unit 3 at 26. Compute waited until 3 for gathers."""
    blocks = [unit(4, 8, 2, 2), unit(4, 8, 2, 2), unit(4, 8, 2, None)]
    found = simulate(StepProgram((unit(1, 2, 1, None), *blocks)), trace=True)
    assert made_up(found) == {"compute": 39, "gather": 3}
    assert found.seconds == pytest.approx(42)
    gathers = [(event.name, event.start) for event in found.events if event.clock == "wire"]
    again = [("gather 2", 11), ("gather 1", 26)]
    assert gathers == [("gather 0", 0), ("gather 1", 1), ("gather 2", 3), ("gather 3", 7), *again]
    assert (found.sent, found.crossed) == (8 * 11, 11)


def test_compute_is_slower_beside_a_collective() -> None:
    """Unit 2 is gathered in 2 s beside the forward of unit 1, in which that does 1.6 s of work."""
    program = StepProgram((unit(0, 0), unit(4, 0, 1, None), unit(4, 0, 2, None)), overlap=0.25, kept=True)
    assert made_up(simulate(program)) == {"compute": 8, "gather": 1, "slowdown": 0.4}


def test_the_second_bucket_waits_for_the_first_where_one_is_in_flight() -> None:
    """Buckets are ready at 4 and 8 of a backward of 8 seconds, and take 6 each.

    One in flight: the first is on the wire at 4-10, the second, for which compute waits, at 10-16. Two in flight: the
    same. One in flight, a third one that is ready at 6 stops compute until the first has ended, at 10: the backward
    ends at 12 instead of 8, and the wire is free again at 10, 16 and 22."""
    two = (Reduction(1, 0.5, wire(6)), Reduction(1, 1.0, wire(6)))
    for in_flight in (1, 2):
        found = simulate(StepProgram((unit(0, 0), unit(0, 8)), two, in_flight=in_flight))
        assert made_up(found) == {"compute": 8, "reduction": 8}
    three = (Reduction(1, 0.5, wire(6)), Reduction(1, 0.75, wire(6)), Reduction(1, 1.0, wire(6)))
    one = simulate(StepProgram((unit(0, 0), unit(0, 8)), three, in_flight=1))
    assert one.seconds == pytest.approx(22)
    assert made_up(one) == {"compute": 8, "reduction": 14}


def test_a_fold_is_compute_of_the_rank_that_waits() -> None:
    found = simulate(StepProgram((unit(0, 0), unit(0, 8)), (Reduction(1, 1.0, wire(6, fold=3)),), in_flight=1))
    assert made_up(found) == {"compute": 8, "reduction": 6, "fold": 3}


def test_a_chain_of_replicas_is_on_the_wire_for_less_than_it_takes() -> None:
    """10 s from end to end, 1 s on the wire: one in flight takes 3 x 10 s, all in flight 10 s + 2 x 1 s."""
    chain = WireCost(10, 1)
    buckets = tuple(Reduction(AFTER_THE_LAST, 1.0, chain) for _ in range(3))
    units = (unit(0, 0), unit(0, 1))
    assert simulate(StepProgram(units, buckets, in_flight=1)).seconds == pytest.approx(31)
    assert simulate(StepProgram(units, buckets, in_flight=0)).seconds == pytest.approx(13)


def test_two_updated_buckets_are_gathered_at_a_time() -> None:
    """Updates of 1 s, gathers of 3 s. Update 0: 0-1, gather 1-4; update 1: 1-2, gather 4-7; update 2: 2-3, but its
    gather waits for that of bucket 0, and runs at 7-10."""
    updates = (UpdateStep(1, wire(3)),) * 3
    assert made_up(simulate(StepProgram((unit(0, 0),), updates=updates))) == {"update": 3, "gather": 7}


def test_states_are_read_and_written_beside_the_update() -> None:
    """Read 2, update 1, write 2, for 4 buckets. With three buckets in memory reads follow each other, 8 s, and then
    come one update and one write."""
    updates = (UpdateStep(1, read=2, write=2),) * 4
    three = simulate(StepProgram((unit(0, 0),), updates=updates))
    assert three.seconds == pytest.approx(8 + 1 + 2)


def test_micro_batches_add_up_and_only_those_that_reduce_reduce() -> None:
    program = StepProgram((unit(1, 2), unit(3, 6)), (Reduction(1, 1.0, wire(5)),), micro_batches=4, reduced=1)
    assert made_up(simulate(program)) == {"compute": 48, "reduction": 5}
    assert made_up(simulate(replace(program, reduced=4))) == {"compute": 48, "reduction": 20}


def test_many_micro_batches_take_as_long_as_if_each_were_simulated() -> None:
    """After the third a micro-batch repeats the one before."""
    blocks = (unit(4, 8, 5, 5), unit(4, 8, 5, 5), unit(4, 8, 5, None))
    program = StepProgram((unit(1, 2, 1, None), *blocks), (Reduction(2, 1.0, wire(9)),), in_flight=1, overlap=0.25)
    seconds = [simulate(replace(program, micro_batches=count, reduced=count)).seconds for count in (2, 3, 4, 100)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert seconds[3] == pytest.approx(seconds[1] + 97 * (seconds[1] - seconds[0]))


def test_compute_waits_for_a_host_that_launches_slowly() -> None:
    """The host launches in 3 s what takes 1 s, in a forward and a backward of two units."""
    slow = UnitStep(PassSeconds(1, 1, host=3, host_backward=3))
    found = simulate(StepProgram((slow, slow)))
    assert made_up(found) == {"compute": 4, "host": 8}
    assert found.seconds == 12
    beside = simulate(StepProgram((slow, slow), streams=False))
    assert made_up(beside) == {"compute": 4, "host": 12}, "without streams the host's work is compute's own time"


def test_agreement_and_jitter_are_parts_of_their_own() -> None:
    program = StepProgram((unit(10, 0),), control=2, synchronises=True, fixed=8, jitter=0.1)
    assert made_up(simulate(program)) == {"compute": 10, "control": 2, "fixed": 8, "jitter": 2}


def test_a_trace_has_each_event_on_its_clock() -> None:
    program = StepProgram((unit(1, 2), unit(3, 6)), (Reduction(1, 1.0, wire(5)),), (UpdateStep(1, read=1, write=1),))
    found = simulate(program, trace=True)
    spans = [event for event in chrome_trace(found.events) if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"compute", "wire", "disk"}
    assert sum(event.seconds for event in found.events if event.clock == "compute") == 13
    assert spans[0] == {"name": "forward 1", "ph": "X", "ts": 0.0, "dur": 3e6, "pid": 0, "tid": 0, "cat": "compute"}


# -- laws --------------------------------------------------------------------------------------------------------------

SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 13.0])


@st.composite
def costs(draw: st.DrawFn) -> WireCost:
    seconds = draw(SECONDS)
    return WireCost(seconds, seconds * draw(st.sampled_from([1, 1, 0.5])), draw(SECONDS) / 8, 1) if seconds else NOTHING


@st.composite
def programs(draw: st.DrawFn) -> StepProgram:
    count, gathers = draw(st.integers(1, 4)), draw(st.booleans())
    kept = gathers and draw(st.booleans())
    units = []
    for number in range(count):
        gather = draw(costs()) if gathers else NOTHING
        stays = kept or number in (0, count - 1) or not gather.seconds
        again = None if stays else draw(st.one_of(st.just(gather), costs()))
        passes = PassSeconds(draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS) / 4, draw(SECONDS) / 4)
        units.append(UnitStep(passes, gather, again))
    reductions = []
    for number in [*range(count - 1, 0, -1), 0]:
        buckets = draw(st.integers(0, 3))
        for bucket in range(buckets):
            place, means = number or AFTER_THE_LAST, draw(costs()) if draw(st.booleans()) else NOTHING
            reductions.append(Reduction(place, (bucket + 1) / buckets, draw(costs()), means))
    moved = st.one_of(st.just(0.0), SECONDS)
    updates = tuple(UpdateStep(draw(SECONDS), draw(costs()), draw(moved), draw(moved)) for _ in reductions)
    micro_batches = draw(st.integers(1, 5))
    return StepProgram(
        units=tuple(units),
        reductions=tuple(reductions),
        updates=updates,
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


def scaled(cost: WireCost, factor: float) -> WireCost:
    return replace(cost, seconds=cost.seconds * factor, period=cost.period * factor)


def with_faster_wires(program: StepProgram, factor: float) -> StepProgram:
    units = tuple(
        replace(u, gather=scaled(u.gather, factor), again=None if u.again is None else scaled(u.again, factor))
        for u in program.units
    )
    reductions = tuple(
        replace(r, cost=scaled(r.cost, factor), means=scaled(r.means, factor)) for r in program.reductions
    )
    updates = tuple(replace(update, gather=scaled(update.gather, factor)) for update in program.updates)
    return replace(program, units=units, reductions=reductions, updates=updates)


def with_faster_compute(program: StepProgram, factor: float) -> StepProgram:
    def faster(passes: PassSeconds) -> PassSeconds:
        return replace(
            passes,
            forward=passes.forward * factor,
            backward=passes.backward * factor,
            recompute=passes.recompute * factor,
        )

    units = tuple(replace(unit, passes=faster(unit.passes)) for unit in program.units)
    return replace(program, units=units)


def with_faster_host(program: StepProgram, factor: float) -> StepProgram:
    def faster(passes: PassSeconds) -> PassSeconds:
        return replace(passes, host=passes.host * factor, host_backward=passes.host_backward * factor)

    return replace(program, units=tuple(replace(unit, passes=faster(unit.passes)) for unit in program.units))


@given(programs(), st.sampled_from([0.1, 0.5, 0.9]))
def test_faster_hardware_is_never_slower(program: StepProgram, factor: float) -> None:
    seconds = simulate(program).seconds
    for change in (with_faster_wires, with_faster_compute, with_faster_host):
        assert simulate(change(program, factor)).seconds <= seconds * (1 + 1e-9), change.__name__


@given(programs())
def test_a_step_takes_at_least_its_largest_part_and_at_most_their_sum(program: StepProgram) -> None:
    """A disk reads and writes at the same time, so half of its work is a part."""
    found = simulate(program)
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


@given(programs())
def test_the_same_program_has_the_same_result(program: StepProgram) -> None:
    assert simulate(program) == simulate(program)
    traced = simulate(program, trace=True)
    assert replace(traced, events=()) == simulate(program)


@given(programs())
def test_buckets_are_reduced_in_the_order_of_the_program(program: StepProgram) -> None:
    names = [event.name for event in simulate(program, trace=True).events if event.name.startswith("reduce bucket")]
    rounds = min(program.reduced, 3)
    sent = [f"reduce bucket {n}" for n, reduction in enumerate(program.reductions) if reduction.cost.seconds]
    assert names == sent * rounds


@given(programs())
def test_what_is_kept_is_gathered_once_for_each_forward(program: StepProgram) -> None:
    kept = replace(program, kept=True, units=tuple(replace(unit, again=None) for unit in program.units))
    names = [event.name for event in simulate(kept, trace=True).events if event.name.startswith("gather ")]
    gathers = [name for name in names if name.split()[1].isdigit()]
    held = program.micro_batches - program.reduced
    forwards = min(held, 3) + min(program.reduced, 3)
    assert gathers == [f"gather {n}" for n, unit in enumerate(kept.units) if unit.gather.seconds] * forwards


def test_one_processor_reads_and_writes_states_itself() -> None:
    """Four buckets of 2 s read, 1 s update and 2 s written: nothing is beside anything else."""
    alone = StepProgram(
        units=(UnitStep(PassSeconds(0, 0)),), updates=(UpdateStep(1, read=2, write=2),) * 4, streams=False
    )
    found = simulate(alone)
    assert (found.seconds, found.parts["disk"], found.parts["update"]) == pytest.approx((20, 16, 4))
    assert simulate(replace(alone, streams=True)).seconds < 20


def test_a_gather_that_only_copies_takes_the_copy() -> None:
    """One rank that reads its shards from a disk sends nothing."""
    cost = WireCost(fold=3.0)
    units = (UnitStep(PassSeconds(0, 0)), UnitStep(PassSeconds(1, 2), cost, cost))
    found = simulate(StepProgram(units=units, streams=False))
    assert (found.parts["fold"], found.sent) == pytest.approx((6, 0))
    assert found.seconds == pytest.approx(9)
