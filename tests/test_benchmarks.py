"""The benchmarks run in their smallest form, find a wrong result, count bytes as the algorithms send them, and say what
they need."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import network
from benchmarks.cases import GLOO, IN_COMMON, RELEASED, ROOFLINE, Case, Operation, Shape, check, write_values
from benchmarks.job import Job, Measured
from benchmarks.processes import RankError, run_ranks
from benchmarks.tables import Crossing
from benchmarks.wire import Wire
from collectives import Hierarchical, Kind, Loopback, Pairwise, Ring, Tag, Transport
from collectives.messages import HEADER_BYTES
from collectives.plans import plans

typer = pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner  # noqa: E402

from benchmarks import collectives as one_host  # noqa: E402
from benchmarks import two_hosts  # noqa: E402

SMALLEST = replace(one_host.QUICK, sizes=[4096], seconds=0.01, least=1, most=2, late=0.05)
WIRES = [Wire(hosts, on_each, 1e9) for hosts, on_each in ((2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2))]
ALGORITHMS = {
    "pairwise": lambda transport, wire: Pairwise(transport),
    "ring": lambda transport, wire: Ring(transport),
    "hierarchical": lambda transport, wire: Hierarchical(transport, wire.places.ranks),
}
ELEMENTS = 300  # of a slice: a message of its own size, unlike a header


def _run(module, *arguments):
    application = typer.Typer()
    application.command()(module.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


def test_every_algorithm_is_timed_checked_drawn_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "QUICK", SMALLEST)
    done = _run(one_host, "--ranks", 2, "--quick", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    parts = json.loads((tmp_path / "collectives.json").read_text())["parts"]
    timed = {(part["operation"], part["algorithm"]) for part in parts if "operation" in part}
    everywhere = {"shared", "pairwise", "ring", GLOO, ROOFLINE}
    assert timed == {
        *(("reduce-scatter", name) for name in everywhere),
        *(("all-gather", name) for name in everywhere | {IN_COMMON, RELEASED}),
    }
    assert all(0 < seconds < 60 for part in parts for seconds in part.get("seconds", []))
    assert {part["algorithm"] for part in parts if "cpu_seconds" in part} == everywhere - {ROOFLINE}
    assert (tmp_path / "collectives.png").read_bytes().startswith(b"\x89PNG")
    again = _run(one_host, "--show", tmp_path / "collectives.json", "--markdown", "--out", tmp_path / "again")
    assert "| 4 KiB |" in done.stdout
    assert again.stdout == done.stdout


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
    """Payload bytes that left and reached each host, as the carrier of the ranks, threads here, saw them."""
    loopback = Loopback[None](wire.world_size, timeout=10)
    of = wire.places.of
    crossed: Counter[tuple[int, int]] = Counter()

    def count(transport: Transport) -> None:
        send = transport.carrier.send

        def counted(tensor, to, slot):
            if of[transport.rank] != of[to] and tensor.numel() != HEADER_BYTES:
                crossed[of[transport.rank], of[to]] += tensor.numel()
            return send(tensor, to, slot)

        transport.carrier.send = counted

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
    left, came = [3000, 3000, 2000, 2000], [2000, 2000, 3000, 3000]  # by rank: both of a host see one counter
    measured = Measured("reduce-scatter", 4, n, "hierarchical", [2.0, 4.0, 3.0], left, came, [1500, 1500, 1000, 1000])
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
def test_without_root_or_tools_it_says_what_it_needs(
    user: int, tools: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.os, "geteuid", lambda: user)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}" if tool in tools else None)
    monkeypatch.setattr(network, "_call", never)
    monkeypatch.setattr(two_hosts, "run_ranks", never)
    done = _run(two_hosts, "--quick", "--out", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stdout == ""


class _PlayedIp:
    """`ip` and `tc` that know the names of namespaces alone, and fail at the call number ``fails``."""

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


CALLS = 3 + 2 * 8  # that make two hosts


@pytest.mark.parametrize("fails", range(CALLS + 1))
def test_namespaces_are_removed_whatever_happens(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"zero-bench-1-switch", "another"}  # of a process that lives, and of somebody else
    played = _PlayedIp(others | {"zero-bench-99999999-host0"}, fails)  # and of a process that was killed
    monkeypatch.setattr(network, "_call", played)
    expected = network.NetworkError if fails < CALLS else KeyboardInterrupt

    def use() -> None:
        with network.hosts(2, 1000) as names:
            assert played.there == others | {*names, f"zero-bench-{os.getpid()}-switch"}
            raise KeyboardInterrupt

    with pytest.raises(expected):
        use()
    assert played.there == others
