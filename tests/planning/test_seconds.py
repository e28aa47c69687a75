"""A step takes the seconds of cases by hand and sends the bytes of the formula; fast hardware is never slower. What the
host issues takes its time, unless the device takes longer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero import Offload
from zero.planning.hardware import Cluster, HostCalls, presets
from zero.planning.memory import MemoryPlan
from zero.planning.models.shapes import in_units
from zero.planning.seconds.compute import NOTHING, Compute, PassSeconds, WireCost
from zero.planning.seconds.schedule import (
    AFTER_THE_LAST,
    Reduction,
    StepProgram,
    UnitStep,
    UpdateStep,
    bucket_loads,
    program_of,
)
from zero.planning.seconds.simulate import simulate
from zero.planning.setting import PlanSetting
from zero.precision import PRECISIONS

from ..support.pairs import pair_rows


def wire(seconds: float, fold: float = 0.0) -> WireCost:
    return WireCost(seconds, seconds, fold, sent=8 * seconds, crossed=seconds)


def unit(forward: float, backward: float, gather: float = 0.0, again: float | None = 0.0) -> UnitStep:
    """Return a unit whose host takes no time."""
    cost = wire(gather) if gather else NOTHING
    return UnitStep(PassSeconds(forward, backward), cost, None if again is None else wire(again))


ROOT, SLOW = unit(0, 0), UnitStep(PassSeconds(1, 1, host=3, host_backward=3))
BACKWARD = (ROOT, unit(0, 8))
CHAIN = (Reduction(AFTER_THE_LAST, 1.0, WireCost(10, 1)),) * 3  # 10 s from end to end, 1 s on the wire
RETURNING = (Reduction(AFTER_THE_LAST, 1.0, WireCost(10, 1, returning=8)),) * 3
LATE, HALFWAY = UnitStep(PassSeconds(0, 8, host_backward=20)), Reduction(1, 0.5, WireCost(2, 2, host=5))
BUCKETS = tuple(Reduction(1, ready, wire(6)) for ready in (0.5, 0.75, 1.0))
MEANS = tuple(replace(each, means=wire(3)) for each in BUCKETS)
MICRO_BATCHES = StepProgram((unit(1, 2), unit(3, 6)), (Reduction(1, 1.0, wire(5)),), micro_batches=4)
GOES_ON = Reduction(1, 1.0, wire(6), wire(7), copy=2)
COPIED = (ROOT, *(replace(unit(4, 4, again=again), copy=copy) for copy, again in ((2, 0), (3, 0), (5, None))))
STATES = StepProgram((ROOT,), updates=(UpdateStep(1, read=2),) * 4)
AGREEING = StepProgram((unit(10, 0),), control=2, synchronises=True, fixed=8, jitter=0.1)
BESIDE = StepProgram((ROOT, unit(4, 0, 1, None), unit(4, 0, 2, None)), overlap=0.25, kept=True)
BY_HAND: tuple[tuple[StepProgram, Mapping[str, float]], ...] = (
    # unit 2 is gathered in 2 s beside the forward of unit 1, in which that does 1.6 s of work
    (BESIDE, {"compute": 8, "gather": 1, "slowdown": 0.4}),
    # the wire is busy from 4 to 22; one in flight: the second, ready at 6, stops compute until the first has ended
    (StepProgram(BACKWARD, BUCKETS, in_flight=1), {"compute": 8, "reduction": 14}),
    (StepProgram(BACKWARD, (Reduction(1, 1.0, wire(6, fold=3)),)), {"compute": 8, "reduction": 6, "fold": 3}),
    (StepProgram(BACKWARD, CHAIN, in_flight=1), {"compute": 8, "reduction": 30}),
    # launched at 8, 10 and 12; each is passed on 2 s later, and the last one is back 8 s after that
    (StepProgram(BACKWARD, RETURNING, in_flight=1, passed_on=3), {"compute": 8, "reduction": 14}),
    # with two under way the third is passed on when the first is back, at 18
    (StepProgram(BACKWARD, RETURNING, in_flight=1, passed_on=2), {"compute": 8, "reduction": 18}),
    # the first sum is there at 10, and its mean is gathered behind the second sum, which the wire has until 16, by 19;
    # the third sum follows until 25, the other means until 31; without streams all means are gathered at the end
    (StepProgram(BACKWARD, MEANS, in_flight=2), {"compute": 8, "reduction": 17, "gather": 6}),
    (StepProgram(BACKWARD, MEANS, in_flight=2, streams=False), {"compute": 8, "reduction": 14, "gather": 9}),
    # updates 0-1, 1-2, 2-3, gathers 1-4, 4-7, and the third, which waits for the first, 7-10
    (StepProgram((ROOT,), updates=(UpdateStep(1, wire(3)),) * 3), {"update": 3, "gather": 7}),
    # three buckets are in memory: reads of 2 s follow each other, then one update and one write
    (STATES, {"update": 4, "disk": 7}),
    (replace(STATES, streams=False), {"update": 4, "disk": 16}),
    (MICRO_BATCHES, {"compute": 48, "reduction": 5}),
    # copies of 2, 3 and 5 s: the first one is waited for; of the others, each beside 4 s of work, the last 1 s; the
    # backward copies the first two again, and not what is whole
    (StepProgram(COPIED), {"compute": 24, "gather": 3}),
    (replace(StepProgram(COPIED), ahead=0), {"compute": 24, "gather": 2 + 3 + 5 + 3 + 2}),
    # the sums are copied on the device's own clock, and the host waits for the last one before it issues the update
    (StepProgram(BACKWARD, (Reduction(1, 1.0, NOTHING, copy=2),)), {"compute": 8, "disk": 2}),
    (
        StepProgram(BACKWARD, (Reduction(1, 1.0, NOTHING, copy=2),), host_reads=True, host=3),
        {"compute": 8, "disk": 2, "host": 3},
    ),
    (replace(MICRO_BATCHES, reduced=4), {"compute": 48, "reduction": 20}),
    # later reductions of a step go on from the sum so far, which the host has: 6 s, then 7 s twice
    (replace(MICRO_BATCHES, reductions=(GOES_ON,), reduced=3), {"compute": 48, "reduction": 20, "disk": 3 * 2 + 2 * 2}),
    # the host launches in 3 s what takes 1 s; without streams that is compute's own time
    (StepProgram((SLOW, SLOW)), {"compute": 4, "host": 8}),
    (AGREEING, {"compute": 10, "control": 2, "fixed": 8, "jitter": 2}),
    # the host issues the bucket in 12 s, of which 8 are hidden
    (StepProgram(BACKWARD, (Reduction(1, 1.0, WireCost(6, 6, host=12)),)), {"compute": 8, "host": 4, "reduction": 6}),
    # the host issues half of a backward of 8 s in 10 s, then the bucket in 5 s, then the other half in 10 s
    (StepProgram((ROOT, LATE), (HALFWAY,)), {"compute": 8, "host": 17}),
    # the host updates both itself, in 2 s each, and issues each in 1 s
    (StepProgram((ROOT,), updates=(UpdateStep(2, host=1),) * 2, host_updates=True), {"update": 4, "host": 2}),
    # each update of 1 s is issued in 2 s, and what both have in common in 3 s
    (StepProgram((ROOT,), updates=(UpdateStep(1, host=2),) * 2, host=3), {"update": 2, "host": 6}),
    (StepProgram((ROOT,), updates=(UpdateStep(1, host=2),) * 2, host=3, streams=False), {"update": 2, "host": 7}),
)


@pytest.mark.parametrize(("program", "expected"), BY_HAND)
def test_a_small_step_takes_what_it_takes_by_hand(program: StepProgram, expected: Mapping[str, float]) -> None:
    found = simulate(program)
    assert {part: seconds for part, seconds in found.parts.items() if seconds} == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(expected.values()))


def test_many_micro_batches_take_as_long_as_if_each_were_simulated() -> None:
    blocks = (unit(4, 8, 5, 5), unit(4, 8, 5, 5), unit(4, 8, 5, None))
    program = StepProgram((unit(1, 2, 1, None), *blocks), (Reduction(2, 1.0, wire(9)),), in_flight=1, overlap=0.25)
    two, three, four, hundred = (
        simulate(replace(program, micro_batches=count, reduced=count)).seconds for count in (2, 3, 4, 100)
    )
    assert (four - three, hundred) == pytest.approx((three - two, three + 97 * (three - two)))


BLOCKS = [(f"blocks.{n}.{name}", (3000,)) for n in (1, 2, 3) for name in "ab"]
MODEL = in_units("three blocks", [("embedding", (6000,)), *BLOCKS, ("head", (6000,))])
PLAN = MemoryPlan(MODEL)
SETTINGS = {
    "cluster": ("cpu:2x2", "cpu:1x4", "h100:4x2", "h100:4x1", "cpu:1x1"),
    "stage": (0, 1, 2, 3),
    "sharding_factor": (None, 1, 2, 4),
    "reshard_after_forward": (True, False, 2),
    "mixed_precision": (None, PRECISIONS["bf16"]),
    "micro_batches": (1, 3),
    "offload": (None, Offload("cpu", parameters="cpu")),
}


@functools.cache
def cluster_of(text: str) -> Cluster:
    return presets().cluster(text, nic=10 if text.startswith("cpu") else None)


def setting_of(row: dict[str, Any], kib: float = 4) -> PlanSetting:
    """Return the setting of a row for the ranks of its cluster, with buckets of ``kib`` KiB."""
    cluster = cluster_of(row["cluster"])
    device = "cuda" if cluster.gpu.family != "cpu" else "cpu"
    places: dict[str, Any] = {"world_size": cluster.ranks, "ranks_per_host": cluster.per_host, "device": device}
    given = {name: value for name, value in row.items() if name not in ("cluster", "micro_batches")}
    return PlanSetting(**places, **given, bucket_cap_mb=kib / 1024)


def program(row: dict[str, Any], cluster: Cluster | None = None, *, kib: float = 4, tokens: float = 1) -> StepProgram:
    """Return the program of a row. ``cluster``: other hardware of the same shape. ``tokens``: times as many."""
    setting, cluster = setting_of(row, kib), cluster or cluster_of(row["cluster"])
    passes = PassSeconds(1e-3 * tokens, 2e-3 * tokens, 0, 1e-4, 1e-4)
    loads = bucket_loads(PLAN.laid_out(setting).layout, [parameter.unit for parameter in MODEL.parameters])
    compute = Compute(cluster, "float32")
    units = len(MODEL.units)
    return program_of([passes] * units, [2] * units, loads, setting, compute, row["micro_batches"])


def there_is(row: dict[str, Any]) -> bool:
    try:
        return bool(setting_of(row))
    except ValueError:
        return False


STEPPED_THERE = Offload("cpu", parameters="cpu", step="cpu")
ROWS = pair_rows(SETTINGS, there_is)
ROWS += [{**row, "offload": STEPPED_THERE} for row in ROWS if row["offload"]]


def test_a_step_sends_the_bytes_of_the_formula_and_one_rank_none() -> None:
    """In all rows, since what a collective sends may depend on several arguments together."""
    every = SETTINGS | {"offload": (*SETTINGS["offload"], STEPPED_THERE)}
    for values in itertools.product(*every.values()):
        row = dict(zip(every, values, strict=True))
        if not there_is(row):
            continue
        found, setting, count = simulate(program(row)), setting_of(row), row["micro_batches"]
        assert found.sent == pytest.approx(PLAN.sent(setting, count, setting.row.reduced_backwards(count))), row
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= 0
        if setting.world_size == 1:
            assert found.sent == found.parts["reduction"] == found.parts["control"] == 0
            assert (found.parts["gather"] > 0) is bool(row["offload"])
        if setting.per_host == 1:
            assert found.crossed == pytest.approx(found.sent), "between hosts of one rank all that is sent crosses"


def at_stage_3(cluster: str, **changes: Any) -> dict[str, Any]:
    return {**dict.fromkeys(SETTINGS), "cluster": cluster, "stage": 3, "reshard_after_forward": True, **changes}


def test_units_that_are_gathered_further_ahead_are_awaited_no_longer_and_take_more_memory() -> None:
    rows = [at_stage_3("cpu:1x4", micro_batches=2, prefetch_depth=depth) for depth in (0, 1, 2)]
    found = [simulate(program(row)).parts["gather"] for row in rows]
    assert found[0] > found[1] >= found[2]
    peaks = [PLAN.of_largest(setting_of(row)).gathered_peak for row in rows]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize(("precision", "count"), [("bf16", 1), ("fp32", 3)])
@pytest.mark.parametrize("offload", [SETTINGS["offload"][1], STEPPED_THERE])
def test_what_lies_in_the_hosts_memory_takes_its_bytes_over_the_host_link(
    offload: Offload, precision: Any, count: int
) -> None:
    row = at_stage_3("h100:4x1", micro_batches=count, mixed_precision=PRECISIONS[precision], offload=offload)
    here, gpu = PLAN.of_rank(setting_of(row), 0), cluster_of(row["cluster"]).gpu
    found, link = program(row), gpu.host_link
    weights = here.masters or here.parameters
    assert sum(unit.copy for unit in found.units) * link == pytest.approx(weights)
    assert sum(reduction.copy for reduction in found.reductions) * link == pytest.approx(here.gradients)
    moved = 0 if offload.step else weights + here.states
    assert sum(each.read for each in found.updates) * link == pytest.approx(moved)
    if offload.step:  # the class reads the gradient, and reads and writes the rest
        touched = here.gradients + 2 * (weights + here.states)
        assert sum(each.update for each in found.updates) * gpu.host_memory == pytest.approx(touched)


CALLS = [each.name for each in fields(HostCalls)]


def test_more_buckets_never_make_the_host_faster_and_no_step_is_faster_than_its_host() -> None:
    for row in ROWS:
        hosts = [simulate(program(row, kib=kib)).issued for kib in (64, 8, 2)]
        assert hosts == sorted(hosts), row
        assert len({*hosts}) > 1, row
        found, many = simulate(program(row)), simulate(program(row, tokens=1000))
        assert found.seconds >= found.issued * (1 - 1e-9), row
        if cluster_of(row["cluster"]).gpu.family != "cpu":
            assert found.issued == pytest.approx(many.issued), "what the host does depends on no token"
            assert many.parts["host"] <= (1e-3 * many.seconds if setting_of(row).gathers_units else 0), row


@given(
    st.sampled_from(ROWS),
    st.sampled_from(["link", "host_link", "host_memory", "memory_bandwidth", "nic", "ring_step", "base", *CALLS]),
    st.floats(1, 100),
)
def test_faster_hardware_is_never_slower(row: dict[str, Any], quicker: str, factor: float) -> None:
    before = cluster_of(row["cluster"])
    for name in ("", "calls", "network", "gpu"):  # the part of a cluster that has the number
        part = getattr(before, name) if name else before
        if hasattr(part, quicker):
            value = getattr(part, quicker) or before.gpu.host_link  # a CPU has no memory of its host's
            changed = replace(part, **{quicker: value / factor if name in ("calls", "network") else value * factor})
            after = replace(before, **{name: changed}) if name else changed
            break
    slow, fast = (simulate(program(row, cluster)) for cluster in (before, after))
    assert fast.seconds <= slow.seconds * (1 + 1e-9)
    assert (fast.sent, fast.crossed) == (slow.sent, slow.crossed)
