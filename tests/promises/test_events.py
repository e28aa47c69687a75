"""A profiler shows a step as ranges in their order, and the loggers say what was chosen and what a rank does."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer

from ..support.rows import rows
from ..support.sockets import on_sockets

WIDTH = 16
CAP_MB = 1.5 * WIDTH * WIDTH * 4 / 2**20  # one layer's weight and bias, which are two parameters
Step = Callable[[nn.Module, ZeroOptimizer], None]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()


def plain_step(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_on(transport: Transport, model: nn.Module, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"bucket_cap_mb": CAP_MB, **arguments}
    return ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, **arguments)


def ranges(stage: int, step: Step = plain_step, *, world_size: int = 2, **arguments: Any) -> str:
    """Return the ranges of group rank 0's second step, indented by their nesting, without "zero::"."""

    def program(transport: Transport) -> str:
        model = build()
        optimizer = optimizer_on(transport, model, stage, **arguments)
        step(model, optimizer)
        if transport.rank:
            step(model, optimizer)
            return ""
        with profile(activities=[ProfilerActivity.CPU]) as profiled:  # only of this thread
            step(model, optimizer)
        return nested(profiled)

    return on_threads(world_size, program)[0]


def nested(profiled: profile) -> str:
    found = [event for event in profiled.events() or [] if event.name.startswith("zero::")]
    lines, ends = [], list[float]()
    for event in sorted(found, key=lambda event: (event.time_range.start, -event.time_range.end)):
        while ends and ends[-1] <= event.time_range.start:
            ends.pop()
        lines.append("  " * len(ends) + event.name.removeprefix("zero::"))
        ends.append(event.time_range.end)
    return "\n".join(lines)


def each(verb: str) -> list[str]:
    """Return the range of each bucket."""
    return [f"{verb} bucket {number}" for number in range(2)]


def inside(name: str, *ranges: str) -> list[str]:
    """Return a range and those inside it."""
    return [name, *(f"  {line}" for line in ranges)]


ONE_AT_A_TIME = [
    *("reduce_scatter bucket 0", "wait_for_reduce_scatter bucket 0"),
    *("reduce_scatter bucket 1", "wait_for_reduce_scatter bucket 1"),
]
CLIPPED = inside("clip", "agree")
UPDATES = ("update bucket 0", "all_gather bucket 0", "update bucket 1", "all_gather bucket 1")
OF_UNITS = [
    *("unshard unit 0", "unshard unit 1", "wait_for_unshard unit 0", "install unit 0", "uninstall unit 0"),
    *("reshard unit 0", "wait_for_unshard unit 1", "install unit 1", "uninstall unit 1", "unshard unit 0"),
    *("install unit 1", "reduce_scatter bucket 0", "reshard unit 1", "wait_for_unshard unit 0", "install unit 0"),
    *("wait_for_reduce_scatter bucket 0", "reduce_scatter bucket 1", "wait_for_reduce_scatter bucket 1"),
    "reshard unit 0",
]
EXPECTED = {
    2: [*ONE_AT_A_TIME, *CLIPPED, *inside("step", "agree", *UPDATES, *each("wait_for_all_gather"))],
    3: [*OF_UNITS, *CLIPPED, *inside("step", "agree", *each("update"))],
}


@pytest.mark.parametrize("stage", rows([3], [2]))
def test_a_profiler_shows_a_step_by_buckets_and_units_and_no_parameter(stage: int) -> None:
    of_root = "the root's rest"  # it has no parameters
    assert [line for line in ranges(stage).splitlines() if of_root not in line] == EXPECTED[stage]


def scaled_without_sync(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with optimizer.no_sync():
        scaler.scale(model(torch.ones(2, WIDTH)).square().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    optimizer.zero_grad()


def test_catching_up_unscaling_and_disks_are_shown_where_they_happen(tmp_path: Path) -> None:
    caught_up = [*inside("unscale", "agree", *inside("catch_up", *ONE_AT_A_TIME)), "step"]
    assert ranges(2, scaled_without_sync).splitlines()[: len(caught_up)] == caught_up
    _, _, of_step = ranges(2, world_size=1, offload=Offload(tmp_path)).partition("\nstep\n")
    of_states = [line.strip() for line in of_step.splitlines() if line.strip().startswith(("prefetch", "evict"))]
    assert of_states == [*each("prefetch"), *each("evict")]
    assert "  update bucket 0\n    evict bucket 0\n" in of_step


def lines_of(caplog: pytest.LogCaptureFixture, logger: str, level: int, rank: int = 0) -> list[str]:
    found = [record for record in caplog.records if record.name == logger and record.levelno == level]
    return [text for record in found if (text := record.getMessage()).startswith(f"rank {rank}")]


def train(stage: int, world_size: int = 2, ranks: Callable[..., Any] = on_threads, **arguments: Any) -> None:
    def program(transport: Transport) -> None:
        model = build()
        with closing(optimizer_on(transport, model, stage, **arguments)) as optimizer:
            for _ in range(2):
                plain_step(model, optimizer)

    ranks(world_size, program)


APART = "common memory: no (the ranks that share a copy do not all share a host's memory), offload: none"
THREADS = "sharding factor 2, collective pairwise (the ranks are threads), common memory: no"
LINES: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2}, f"2: stage 2, AdamW, 2 buckets of at most 0.001465 MiB, 0 units, {THREADS} (every rank holds whole"),
    ({"stage": 3}, f"2 units, sharding factor 2, collective pairwise (the ranks are threads), {APART}"),
    ({"stage": 3, "collective": "ring"}, "ring (asked for by name), common memory: no ("),
    ({"stage": 3, "world_size": 1, "offload": Offload(tempfile.gettempdir())}, "offload: states on disk"),
    ({"stage": 3, "world_size": 1}, "(one rank sends nothing), common memory: no (one rank holds the whole copy)"),
    ({"stage": 2, "world_size": 4, "sharding_factor": 2}, "2 replicas of 2; the ranks are threads"),
    ({"stage": 3, "ranks": on_sockets}, "common memory: yes (the ranks that share a copy are on one host)"),
]


@pytest.mark.parametrize(("arguments", "words"), LINES)
def test_each_optimizer_says_once_what_was_chosen_and_why(
    arguments: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(**arguments)
    for rank in range(arguments.get("world_size", 2)):
        (line,) = lines_of(caplog, "zero", logging.INFO, rank)
        assert words in line
        assert len(lines_of(caplog, "collectives", logging.INFO, rank)) == 1
    assert not [record for record in caplog.records if record.levelno < logging.INFO]


def test_at_debug_a_rank_says_what_it_does_also_when_it_catches_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def program(transport: Transport) -> None:
        model = build()
        with closing(optimizer_on(transport, model, 2)) as optimizer:
            plain_step(model, optimizer)
            if transport.rank == 0:
                backward(model)
            optimizer.step()
        if transport.rank == 0:
            transport.abort("no room")

    on_threads(2, program)
    for rank, caught_up in enumerate(([], ["catch_up"])):
        found = [line.removeprefix(f"rank {rank}: ") for line in lines_of(caplog, "zero", logging.DEBUG, rank)]
        assert found[: len(EXPECTED[2])] == [line.strip() for line in EXPECTED[2]]
        assert [line for line in found if line == "catch_up"] == caught_up
    said = lines_of(caplog, "collectives", logging.DEBUG, 1)
    assert "rank 1: meets all ranks, in step() [meet, round 1, index 2]" in said
    assert any("rank 1: catches up, in step() [meet, round " in line for line in said)
    assert lines_of(caplog, "collectives", logging.DEBUG)[-1] == "rank 0: aborts: no room"
