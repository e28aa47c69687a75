"""The benchmarks run in their smallest form, detect wrong results, count bytes as sent, and name missing
requirements."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import network
from benchmarks.cases import GLOO, IN_COMMON, RELEASED, ROOFLINE, Case, Operation, Shape, check, write_values
from benchmarks.crossing_rank import Crossed
from benchmarks.job import Job, Measured, quartiles
from benchmarks.processes import RankError, run_ranks
from benchmarks.report import Report
from benchmarks.tables import Crossing
from benchmarks.wire import Wire
from collectives import Hierarchical, Kind, Loopback, Pairwise, Ring, Tag, Transport
from collectives.algorithms.plans import plans
from collectives.peer_links import PAYLOAD_PORT, PORTS

pytestmark = pytest.mark.full

typer = pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from benchmarks import collectives as one_host  # noqa: E402
from benchmarks import (  # noqa: E402
    crossing,
    interleaved,
    memory,
    offload,
    replicas,
    scaling,
    scaling_tables,
    steps,
    two_hosts,
)
from benchmarks.fits import fit  # noqa: E402
from benchmarks.models import Layers, Tensors  # noqa: E402
from benchmarks.processes import forked_ranks  # noqa: E402
from benchmarks.scaling_axes import AXES, BUCKETS, TENSORS, Point  # noqa: E402
from benchmarks.scaling_tables import Sample, ScalingResults  # noqa: E402
from benchmarks.step_job import CAP_MB, Held, Run, StepJob, Trained  # noqa: E402
from benchmarks.systems import DDP, FLOOR, PLAIN  # noqa: E402

from .pictures import FOLDER, misfits  # noqa: E402

RESULTS = Path(crossing.__file__).parent / "results"

SMALLEST = replace(one_host.QUICK, sizes=[4096], seconds=0.01, least=1, most=2, late=0.05)
WIRES = [Wire(hosts, on_each, 1e9) for hosts, on_each in ((2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2))]
ALGORITHMS = {
    "pairwise": lambda transport, wire: Pairwise(transport),
    "ring": lambda transport, wire: Ring(transport),
    "hierarchical": lambda transport, wire: Hierarchical(transport, wire.places.ranks),
}
ELEMENTS = 300  # of a slice


def _run(module, *arguments):
    application = typer.Typer()
    application.command()(module.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def words_fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the text of every picture that a test draws fits."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **named: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield
    assert [line for figure in drawn for line in misfits(figure)] == []


def test_words_that_do_not_fit_are_found() -> None:
    figure = Figure(figsize=(3, 3))
    panel = figure.add_subplot()
    panel.set_title("a title of more letters than there are in a panel of three inches")
    panel.scatter([1, 2], [1, 2])
    panel.annotate("zero 1", (1, 1), xytext=(-3, -3), textcoords="offset points")
    panel.text(1.6, 1.6, "DDP")
    panel.text(1.6, 1.6, "FSDP2")
    figure.supxlabel("--out /home/me")
    wrong = misfits(figure)
    assert wrong[0].endswith("three inches' leaves the picture")
    assert sorted(wrong[1:]) == ["'--out /home/me' names a folder", "'DDP' covers 'FSDP2'", "'zero 1' covers a dot"]


STORED: dict[str, tuple[ModuleType, Sequence[str]]] = {
    "crossing": (crossing, ()),
    "memory": (memory, ()),
    "offload": (offload, ()),
    "scaling": (scaling, ()),
    "steps": (steps, ()),
    "steps-bf16": (steps, ("--precision", "bf16")),
}


@pytest.mark.parametrize("name", STORED)
def test_the_page_shows_what_stored_results_say(name: str, tmp_path: Path) -> None:
    module, options = STORED[name]
    done = _run(module, *options, "--show", RESULTS / f"{name}.json", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() in (RESULTS.parent / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in RESULTS.glob(f"{name}.png")}


def test_stored_results_are_small_are_shown_and_name_no_folder() -> None:
    stored = {path.stem: path.read_text() for path in RESULTS.iterdir() if path.suffix != ".png"}
    assert stored.keys() == STORED.keys() | {"sweep", "gpu-short", *(f"gpu-short-{section}" for section in "abcde")}
    assert sum(len(text.encode()) for text in stored.values()) <= 400_000
    assert not [name for name, text in stored.items() if FOLDER.search(text)]


def test_a_report_is_read_as_it_was_written_and_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--out", "/a folder/b", "--folder=../c", "--model", "deep", "results/here", "--out=zero-bench"]
    monkeypatch.setattr(sys, "argv", ["steps.py", *words])
    parts = [{"a": 1, "b": None}, {"a": 0.1, "b": [1.5]}, {"c": "x"}, {"a": 2, "b": 1e-300}]
    report = Report.of_this_machine("benchmarks.steps", parts)
    assert report.command == "python -m benchmarks.steps --out DIR --folder=DIR --model deep DIR --out=zero-bench"
    report.write(tmp_path / "new" / "steps.json")
    assert Report.read(tmp_path / "new" / "steps.json") == report
    empty = replace(report, parts=[])
    empty.write(tmp_path / "empty.json")
    assert Report.read(tmp_path / "empty.json") == empty


def test_a_run_is_as_slow_as_its_slowest_rank_and_as_large_as_its_largest() -> None:
    ranks = [
        Trained("zero 2", "deep", 0, [1.0, 4.0, 2.0], 0.5, 10, 20, 31, 40, 50, 3, 0.1),
        Trained("zero 2", "deep", 1, [3.0, 1.0, 2.5], 0.7, 11, 19, 30, 41, 51, 2, 0.2),
    ]
    held = {"parameters": 11, "gradients": 20, "states": 31, "peak": 41, "proportional": 101}
    assert Held.of(ranks) == Held("zero 2", "deep", 2, **held)
    assert Run.of(ranks) == Run("zero 2", "deep", 2, **held, seconds=3.0, loss=0.5, bus=0.2)
    assert Sample.of("tensors", 10, ranks) == Sample("tensors", 10, "zero 2", 2, 3, 3.0, 0.5)


def test_quartiles_of_one_round_are_that_round() -> None:
    assert quartiles([2.0]) == (2.0, 2.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 4.0)


def test_every_algorithm_is_timed_checked_drawn_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "QUICK", SMALLEST)
    done = _run(one_host, "--ranks", 2, "--quick", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    parts = Report.read(tmp_path / "collectives.json").parts
    timed = {(part["operation"], part["algorithm"]) for part in parts if "operation" in part}
    everywhere = {"shared", "pairwise", "ring", GLOO, ROOFLINE}
    assert timed == {
        *(("reduce-scatter", name) for name in everywhere),
        *(("all-gather", name) for name in everywhere | {IN_COMMON, RELEASED}),
    }
    assert all(0 < part["low"] <= part["median"] <= part["high"] < 60 for part in parts if "operation" in part)
    assert {part["algorithm"] for part in parts if "cpu_seconds" in part} == everywhere - {ROOFLINE}
    assert (tmp_path / "collectives.png").read_bytes().startswith(b"\x89PNG")
    again = _run(one_host, "--show", tmp_path / "collectives.json", "--markdown", "--out", tmp_path / "again")
    assert "| 4 KiB |" in done.stdout
    assert again.stdout == done.stdout


def test_systems_train_side_by_side_are_shown_drawn_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "QUICK", (1, 1, 1))
    chosen = [FLOOR, DDP, "zero 2"]
    options = [word for name in chosen for word in ("--system", name)]
    done = _run(steps, "--quick", "--model", "deep", *options, "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    runs = [Run(**part) for part in Report.read(tmp_path / "steps.json").parts]
    assert [(run.system, run.model, run.ranks) for run in runs] == [(system, "deep", 2) for system in chosen]
    floor, plain, ours = runs
    assert floor.loss is None
    assert plain.loss == ours.loss is not None
    assert ours.parameters >= plain.parameters
    assert ours.states < 0.51 * plain.states + 1e5
    assert ours.peak > 0 < ours.proportional
    assert 0 < ours.seconds < 60
    assert ours.bus > 0
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    again = _run(steps, "--show", tmp_path / "steps.json", "--markdown", "--out", tmp_path / "again")
    assert "| zero 2 ÷ DDP | deep | ≤ 0.85 |" in done.stdout
    assert again.stdout == done.stdout


def test_steps_in_turn_are_compared_with_those_beside_them(tmp_path: Path) -> None:
    rounds = [{"a": [1.0, 2.0, 9.0], "b": [2.0, 4.0, 9.0]}, {"a": [5.0, 5.0], "b": [5.0, 5.0]}]
    table = interleaved.compared(rounds, "tensors-16", 2)
    assert [row[2:] for row in table.rows] == [["1.000", "1.000–1.000"], ["1.500", "1.250–1.750"]]
    options = ("--model", "tensors-16", "--rounds", "1", "--system", "zero 3", "--system", "zero 2", "--markdown")
    done = _run(interleaved, *options, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "tensors-16, 2 ranks, rounds: 1 of 20 steps, interleaved" in done.stdout
    assert "÷ zero 3" in done.stdout
    parts = Report.read(tmp_path / "interleaved.json").parts
    assert [(part["system"], len(part["seconds"])) for part in parts] == [("zero 3", 20), ("zero 2", 20)]


def test_a_system_or_model_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    calls = (
        (steps, "--system"),
        (steps, "--model"),
        (scaling, "--system"),
        (scaling, "--axis"),
        (interleaved, "--system"),
    )
    for module, option in calls:
        done = _run(module, option, "no such thing", "--out", tmp_path)
        assert done.exit_code == 2
        assert "'no such thing' is no" in done.output
        assert "there are" in done.output


DECADES = [10, 30, 100, 300, 1000, 3000, 10000]
ROUNDING = 1e-9  # the relative error of the solver


@pytest.mark.parametrize(("fixed", "slope"), [(2e-3, 5e-6), (0.5, 1e-7), (1e-6, 3e-4)])
def test_a_line_through_known_points_is_that_line(fixed: float, slope: float) -> None:
    line = fit(DECADES, [fixed + slope * x for x in DECADES])
    assert line is not None
    assert (line.fixed, line.slope) == pytest.approx((fixed, slope), rel=ROUNDING)
    assert line.bend is None
    assert line.beyond == line.slope
    assert [line.at(x) for x in DECADES] == pytest.approx([fixed + slope * x for x in DECADES], rel=ROUNDING)


@pytest.mark.parametrize("bend", DECADES[2:-2])
@pytest.mark.parametrize(("slope", "beyond"), [(5e-6, 5e-5), (5e-5, 5e-6)])
def test_where_a_line_bends_is_named_with_both_slopes(bend: float, slope: float, beyond: float) -> None:
    seconds = [1e-4 + slope * x + (beyond - slope) * max(0, x - bend) for x in DECADES]
    line = fit(DECADES, seconds)
    assert line is not None
    assert line.bend == bend
    assert (line.fixed, line.slope, line.beyond) == pytest.approx((1e-4, slope, beyond), rel=1e3 * ROUNDING)
    assert [line.at(x) for x in DECADES] == pytest.approx(seconds, rel=ROUNDING)


def test_noise_is_no_bend() -> None:
    noise = [1.04, 0.97, 1.03, 0.96, 1.04, 0.98, 1.02]
    line = fit(DECADES, [(1e-3 + 1e-5 * x) * factor for x, factor in zip(DECADES, noise, strict=True)])
    assert line is not None
    assert line.bend is None
    wild = [1.6, 0.6, 1.5, 0.7, 1.6, 0.6, 1.5]
    line = fit(DECADES, [(1e-3 + 1e-5 * x) * factor for x, factor in zip(DECADES, wild, strict=True)])
    assert line is not None
    assert line.bend is None
    assert line.miss > 0.3


def test_one_place_has_no_line() -> None:
    assert fit([], []) is None
    assert fit([64.0, 64.0], [1.0, 2.0]) is None


def _played(axis: str, x: float, system: str, seconds: float, buckets: int = 0, ranks: int = 2) -> Sample:
    return Sample(axis, x, system, 1 if system == PLAIN else ranks, buckets, seconds, 0.5)


def _cells(table: scaling_tables.Table, **wanted: str) -> dict[str, str]:
    """Return the one row that has these cells."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    (found,) = [row for row in rows if all(row[column] == cell for column, cell in wanted.items())]
    return found


def test_costs_and_targets_of_scaling_are_what_its_runs_say(tmp_path: Path) -> None:
    samples = []
    for slow in (1.0, 1.5, 1.2):  # in three rounds the machine, not a system, is slow
        for count in DECADES:
            for system, fixed, each in ((PLAIN, 1e-4, 20e-6), (DDP, 6e-4, 40e-6), ("zero 2", 11e-4, 23e-6)):
                samples.append(_played("tensors", count, system, slow * (fixed + each * count), buckets=1))
        for cap, buckets in ((0.25, 64), (1, 16), (4, 4), (16, 4)):
            samples.append(_played("bucket size", cap, "zero 2", slow * (2e-3 + 2e-4 * buckets), buckets))
        samples.append(_played("bucket size", 0.25, PLAIN, slow * 1e-3))
    results = ScalingResults(samples)
    tables = {table.title.partition(":")[0]: table for table in scaling_tables.every_table(results)}
    row = _cells(tables["tensors"], **{TENSORS.label: "10000", "system": "zero 2"})
    assert row["ms"] == "277.3"
    assert row["quartiles"] == "254.2–312.0"
    assert row["÷ DDP"] == "0.58"
    assert row["µs a tensor over plain"] == "3.72"
    assert _cells(tables["bucket size"], **{BUCKETS.label: "16", "system": "zero 2"})["over plain ms"] == "2.16"
    line = _cells(tables["Fitted lines"], axis="bucket size", system="zero 2")
    assert (line["fixed ms"], line["slope"]) == ("2.40", "240 µs a bucket")
    assert _cells(tables["What it adds to the plain loop, by the fitted lines"], system="zero 2") == {
        "system": "zero 2",
        "ms a step": "1.20",
        "µs a bucket": "240.00",
        "µs a tensor": "3.60",
        "ns an element": "–",
    }
    seen = {row[0]: list(row[1:]) for row in tables["What must be seen"].rows}
    assert seen == {
        "zero 2 ÷ DDP, 10000 tensors": ["≤ 0.70", "0.58", "yes"],
        "zero 2, µs a tensor over the plain loop, 10000 tensors": ["≤ 4", "3.72", "yes"],
    }
    scaling_tables.draw(tmp_path / "scaling.png", results, "played")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_every_axis_is_run_fitted_drawn_and_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(2, 2, 16)
    least = {
        "tensors": replace(TENSORS, points=[Point(count, Tensors(count).name, steps=1) for count in (2, 20)]),
        "elements": replace(AXES["elements"], points=[Point(layers.numel / 1e6, layers.name, steps=1)]),
        "bucket size": replace(
            BUCKETS, points=[Point(cap, layers.name, bucket_cap_mb=cap, steps=1) for cap in (0.0005, CAP_MB)]
        ),
        "ranks": replace(AXES["ranks"], points=[Point(ranks, layers.name, ranks, steps=1) for ranks in (1, 2)]),
    }
    monkeypatch.setattr(scaling.scaling_axes, "QUICK", least)
    options = [word for name in (PLAIN, DDP, "zero 1") for word in ("--system", name)]
    done = _run(scaling, "--quick", *options, "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    samples = [Sample(**part) for part in Report.read(tmp_path / "scaling.json").parts]
    systems = [PLAIN, DDP, "zero 1"]
    assert [(s.axis, s.x, s.system, s.ranks) for s in samples] == [
        (name, point.x, system, 1 if system == PLAIN else point.ranks)
        for name, axis in least.items()
        for point in axis.points
        for system in systems
        if system != PLAIN or axis.has_plain(point)
    ]
    by_place: dict[tuple[str, float], set[float | None]] = {}
    for sample in samples:
        if sample.system != PLAIN:
            by_place.setdefault((sample.axis, sample.x), set()).add(sample.loss)
    assert all(len(losses) == 1 for losses in by_place.values())
    buckets = {(s.x, s.system): s.buckets for s in samples if s.axis == "bucket size"}
    assert (buckets[0.0005, "zero 1"], buckets[CAP_MB, "zero 1"]) == (4, 1)
    assert (buckets[0.0005, DDP], buckets[CAP_MB, DDP]) == (4, 1)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    again = _run(scaling, "--show", tmp_path / "scaling.json", "--markdown", "--out", tmp_path / "again")
    assert "**Fitted lines: seconds = fixed + slope · x**" in done.stdout
    assert again.stdout == done.stdout


def test_forked_ranks_train_alike_each_time_and_one_that_fails_ends_all() -> None:
    job = StepJob("zero 2", "tensors-20", 1, 1)
    with forked_ranks() as train:
        runs = [train(job, ranks) for ranks in (2, 1, 2)]
        losses = [[rank.loss for rank in run] for run in runs]
        assert losses[0] == losses[2]
        assert [[rank.rank for rank in run] for run in runs] == [[0, 1], [0], [0, 1]]
        for rank in itertools.chain(*runs):
            assert len(rank.seconds) == 1
            assert rank.peak > 0 < rank.proportional
        whole, (alone,), _ = runs
        assert all(rank.states < alone.states for rank in whole)
        assert all(rank.parameters >= alone.parameters for rank in whole)
        with pytest.raises(RankError, match=r"KeyError: 'no such system'"):
            train(StepJob("no such system", "tensors-20", 1, 1), 2)


def test_a_rank_that_fails_is_told_with_its_last_words() -> None:
    job = Job(["no such algorithm"], [4096], seconds=0.0, least=1, most=1)
    with pytest.raises(RankError, match=r"rank 0 ended with code 1:(.|\n)*ValueError: collective must be one of"):
        list(run_ranks(job, [()]))


@pytest.mark.parametrize("operation", Operation)
def test_a_wrong_result_is_found_and_a_right_one_is_not(operation: Operation) -> None:
    shape = Shape(rank=1, world_size=3, numel=30_000)
    given = torch.empty(shape.numel if operation is Operation.REDUCE_SCATTER else shape.width)
    result = torch.empty(shape.width if operation is Operation.REDUCE_SCATTER else shape.numel)

    def gather(order: list[int]) -> None:
        for place, rank in enumerate(order):
            write_values(result[place * shape.width : (place + 1) * shape.width], rank, place * shape.width)

    def add(begin: int) -> None:
        part = torch.empty_like(result)
        result.zero_()
        for rank in range(shape.world_size):
            write_values(part, rank, begin)
            result.add_(part)

    if operation is Operation.REDUCE_SCATTER:
        right, wrong = (lambda: add(shape.width)), (lambda: add(2 * shape.width))
    else:
        right, wrong = (lambda: gather([0, 1, 2])), (lambda: gather([0, 2, 1]))
    check(operation, shape, Case("right", right, given, result))
    for broken in (wrong, lambda: None):
        with pytest.raises(AssertionError, match=f"broken gave a wrong {operation.value}"):
            check(operation, shape, Case("broken", broken, given, result))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: f"{wire.hosts}x{wire.ranks_per_host}")
def test_what_crosses_between_hosts_is_the_closed_form(wire: Wire, operation: Operation, name: str) -> None:
    left, came = _crossed(wire, operation, name)
    nbytes = 4 * ELEMENTS * wire.world_size
    assert wire.leaving(name, operation, nbytes) == left
    assert wire.busiest(name, operation, nbytes) == max(left + came)
    assert sum(left) >= wire.hosts * wire.least(nbytes)
    if name == "hierarchical" and operation is Operation.REDUCE_SCATTER:
        assert sum(left) == ELEMENTS * sum(plan.bytes_per_element for plan in plans(wire.places, False, 4, 4))


def _crossed(wire: Wire, operation: Operation, name: str) -> tuple[list[int], list[int]]:
    """Return the payload bytes that left and reached each host, as counted by the backend. Ranks are threads."""
    loopback = Loopback[None](wire.world_size, timeout=10)
    of = wire.places.of
    crossed: Counter[tuple[int, int]] = Counter()

    def count(transport: Transport) -> None:
        send = transport.backend.send

        def counted(tensor, to, slot):
            if of[transport.rank] != of[to] and slot % PORTS == PAYLOAD_PORT:
                crossed[of[transport.rank], of[to]] += tensor.numel()
            return send(tensor, to, slot)

        transport.backend.send = counted

    for transport in loopback.transports:
        count(transport)

    def program(transport: Transport) -> None:
        algorithm = ALGORITHMS[name](transport, wire)
        bounds = [ELEMENTS * rank for rank in range(wire.world_size + 1)]
        buffer = torch.ones(bounds[-1])
        if operation is Operation.REDUCE_SCATTER:
            tag = Tag(Kind.REDUCE_SCATTER, "a reduce-scatter", round=1)
            algorithm.reduce_scatter(buffer, bounds, torch.empty(ELEMENTS), start=None, tag=tag).wait()
        else:
            algorithm.all_gather(buffer, bounds, tag=Tag(Kind.ALL_GATHER, "an all-gather")).wait()

    loopback.run(program)
    hosts = range(wire.hosts)
    return (
        [sum(nbytes for (sender, _), nbytes in crossed.items() if sender == host) for host in hosts],
        [sum(nbytes for (_, receiver), nbytes in crossed.items() if receiver == host) for host in hosts],
    )


def test_the_wire_takes_what_readme_says() -> None:
    wire, n = Wire(2, 2, 1e9), 64 << 20
    assert wire.seconds(wire.least(n)) == (32 << 20) * 8 / 1e9
    assert wire.leaving("pairwise", Operation.ALL_GATHER, n) == [n, n]
    assert wire.leaving("ring", Operation.REDUCE_SCATTER, n) == [n * 3 // 4] * 2
    assert wire.leaving("hierarchical", Operation.ALL_GATHER, n) == [n // 2, n // 2]
    assert sum(wire.leaving("hierarchical", Operation.REDUCE_SCATTER, n) or []) == 2 * n * 3 // 4
    assert wire.leaving(GLOO, Operation.ALL_GATHER, n) is None


def test_ratios_compare_with_the_wire_the_counters_and_the_closed_form() -> None:
    n = 4000
    left, came = [3000, 3000, 2000, 2000], [2000, 2000, 3000, 3000]  # by rank: both ranks of a host read one counter
    measured = Measured("reduce-scatter", 4, n, "hierarchical", 3, 3.0, 2.5, 3.5, left, came, [1500] * 2 + [1000] * 2)
    crossing = Crossing(Wire(2, 2, 8000.0), measured)  # 1000 bytes a second
    assert crossing.times_wire == 3.0 / 2.0
    assert crossing.left == [3000, 2000]
    assert crossing.times_least == 2500 / 2000
    assert crossing.times_formula == 5000 / 6000
    assert crossing.times_own == 1.0
    assert (measured.algbw, measured.busbw) == (n / 3.0, n / 3.0 * 3 / 4)


@pytest.mark.parametrize(
    ("user", "tools", "words"),
    [
        (1000, ("ip", "tc"), "root"),
        (0, (), "`ip` (package iproute2) and `tc` (package iproute2)"),
        (0, ("ip",), "`tc`"),
    ],
)
@pytest.mark.parametrize(("command", "starts"), [(two_hosts, "run_ranks"), (crossing, "crossing_ranks")])
def test_without_root_or_tools_it_says_what_it_needs(
    command: ModuleType,
    starts: str,
    user: int,
    tools: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.os, "geteuid", lambda: user)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}" if tool in tools else None)
    monkeypatch.setattr(network, "_call", never)
    monkeypatch.setattr(command, starts, never)
    done = _run(command, "--out", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stdout == ""


def test_what_crosses_is_beside_its_closed_form_where_that_is_known() -> None:
    """With two hosts of two ranks and 1000 elements, 4000 bytes leave each host; the counters have 40 more."""
    seen = [
        Crossed(stage, factor, rank, 1000, 4040, 6000, 2000, 24000)
        for stage, factor in ((1, 2), (3, 4))
        for rank in range(4)
    ]
    first, second = crossing.table(seen, 2).rows
    assert first == ["stage 1, F = 2", "0.00 0.00", "0.01", "0.02", "1.0000", "1.0000", "1.0100"]
    assert second[-2:] == ["–", "–"]


class _PlayedIp:
    """Simulated `ip` and `tc` that keep only the names of namespaces. The call number ``fails`` fails."""

    def __init__(self, there: set[str], fails: int) -> None:
        self.there, self._left = there, fails

    def __call__(self, command: str) -> str:
        words = command.split()
        if words[:3] == ["ip", "netns", "list"]:
            return "".join(f"{name} (id: 0)\n" for name in self.there)
        if words[:3] == ["ip", "netns", "delete"]:
            self.there.remove(words[3])
            return ""
        if not self._left:
            raise network.NetworkError(command)
        self._left -= 1
        if words[:3] == ["ip", "netns", "add"]:
            self.there.add(words[3])
        return ""


CALLS = 3 + 2 * 8  # to make two hosts


@pytest.mark.parametrize("fails", range(CALLS + 1))
def test_namespaces_are_removed_whatever_happens(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"zero-bench-1-switch", "another"}  # of a process that still runs, and of another program
    played = _PlayedIp(others | {"zero-bench-99999999-host0"}, fails)  # the last is of a killed process
    monkeypatch.setattr(network, "_call", played)
    expected = network.NetworkError if fails < CALLS else KeyboardInterrupt

    def use() -> None:
        with network.hosts(2, 1000) as names:
            assert played.there == others | {*names, f"zero-bench-{os.getpid()}-switch"}
            raise KeyboardInterrupt

    with pytest.raises(expected):
        use()
    assert played.there == others


def test_a_round_between_replicas_takes_what_the_plan_says(tmp_path: Path) -> None:
    """And a hop, in which ranks announce the round. On simulated clocks the result is always the same."""
    done = _run(replicas, "--quick", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = Report.read(tmp_path / "replicas.json").parts
    assert len(found) == 4
    for part in found:
        assert part["seconds"] == pytest.approx(part["planned"] + part["hop"], rel=1e-9)
    assert found[3]["seconds"] < found[2]["seconds"] / 3
