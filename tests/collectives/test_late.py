"""Training has the plain loop's bits, and touches no memory of a transfer between its launch and its wait.

Every transfer finishes at its wait (`tests.support.late`). On one stream such a program is safe over NCCL, too, which
is not available here: hosts and replicas are pretended. On streams (`tests.support.streamed`) no rank awaits headers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from collectives import ALGORITHMS, Kind, Tag, Transport
from collectives.algorithms import plans
from collectives.launches.sentinel import Post

from ..support.carried import folded, reduction
from ..support.late import LateBackend, folded_by_groups, on_late_threads
from ..support.limits import PATIENT
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import only
from ..support.streamed import StreamedLoopback

GATHER = Tag(Kind.ALL_GATHER, "parameters")
STEPS = (
    Step((Round(), Round(), Round()), clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round(), Round(sync=False))),
    Step((Round(sync=False), Round()), toggle=("frozen",), clips=((0.1, 3.0),), clear="zeros"),
)
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))  # not at stage 3, where all ranks run all forwards
ONE_ROUND = (Step((Round(),), clips=((0.1, 2.0),)),) * 2  # for sums in the order of the plain loop's, by `late.py`
SEVERAL = Program(3, 2, bucket_cap_mb=0.001, collective="all_to_all", steps=STEPS + FEWER)  # buckets under way at once
MIXED = replace(SEVERAL, world_size=2, precision=PRECISIONS["bf16"])
KEPT = Program(4, 3, reshard=2, steps=STEPS[1:])
REPLICAS = [
    Program(4, 1, sharding_factor=2, steps=STEPS),
    Program(3, 2, sharding_factor=1, steps=STEPS[:2] + FEWER),
    Program(6, 3, "sgd momentum", sharding_factor=3, steps=STEPS[:2]),
]


def fold(stage: int, way: Any, precision: str = "fp32") -> Program:
    steps = STEPS if stage == 3 else STEPS + FEWER
    return Program(4, stage, collective=way, precision=PRECISIONS.get(precision), steps=steps)


def late(program: Program) -> list[Any]:
    def run(transport: Transport) -> Any:
        assert isinstance(transport.backend, LateBackend)
        found = run_rank(program, transport)
        assert transport.backend.most_launched >= (2 if program.collective in ("all_to_all", "native") else 0)
        return found

    return on_late_threads(program.world_size, run)


def on_streams(program: Program) -> list[Any]:
    loopback: StreamedLoopback[Any] = StreamedLoopback(program.world_size, limit=PATIENT)

    def run(transport: Transport) -> Any:
        found = run_rank(program, transport)
        assert transport.backend.board().num_keys() > 0, "the sentinels have opened their board"
        return found

    with mock.patch.object(Post, "_explain", side_effect=AssertionError("a sentinel has used it")) as used:
        results = loopback.run(run)
    assert not used.called
    return results


ROWS: dict[str, tuple[Callable[[Program], list[Any]], Program]] = {
    "all_to_all, stage 0": (late, replace(SEVERAL, stage=0)),
    "all_to_all, stage 2": (late, SEVERAL),
    "all_to_all, stage 3": (late, replace(SEVERAL, stage=3, steps=STEPS)),
    "all_to_all, stage 1, bf16": (late, replace(MIXED, stage=1)),
    "all_to_all, stage 3, bf16": (late, replace(MIXED, stage=3, steps=STEPS)),
    "pairwise, stage 1": (late, replace(SEVERAL, stage=1, collective="pairwise")),
    "pairwise, stage 3, bf16": (late, replace(MIXED, stage=3, collective="pairwise", steps=STEPS)),
    "native, stage 2": (late, Program(3, 2, collective="native", steps=ONE_ROUND)),
    "native, stage 3": (late, Program(3, 3, collective="native", steps=ONE_ROUND)),
    "kept by 2 with NCCL": (late, KEPT),
    **{f"replicas of {each.sharding_factor} with NCCL": (late, each) for each in REPLICAS},
    "fold by messages, stage 1, bf16": (late, fold(1, folded, "bf16")),
    "fold by messages, stage 3": (late, fold(3, folded)),
    "fold by groups, stage 0": (late, fold(0, folded_by_groups)),
    "fold by groups, stage 2": (late, fold(2, folded_by_groups)),
    "fold by groups, stage 3": (late, fold(3, folded_by_groups)),
    "all_to_all on streams, stage 0": (on_streams, replace(SEVERAL, stage=0)),
    "all_to_all on streams, stage 3": (on_streams, replace(SEVERAL, stage=3, steps=STEPS)),
    "kept by 2 with NCCL on streams": (on_streams, KEPT),
    **{f"replicas of {each.sharding_factor} with NCCL on streams": (on_streams, each) for each in REPLICAS},
}
FIRST = [
    *("all_to_all, stage 3, bf16", "pairwise, stage 3, bf16", "native, stage 3", "kept by 2 with NCCL"),
    *("fold by messages, stage 1, bf16", "fold by groups, stage 3", "all_to_all on streams, stage 0"),
    *("kept by 2 with NCCL on streams", "replicas of 1 with NCCL on streams"),
]


@pytest.mark.parametrize("name", only(ROWS, *FIRST))
def test_training_has_the_plain_loops_bits_when_every_transfer_finishes_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, program = ROWS[name]
    monkeypatch.setattr(plans, "LEAST_OF_A_FOLD", 7)
    monkeypatch.setattr("collectives.topology._all_have_nccl", lambda *_: "NCCL" in name)
    if program.collective == "auto":
        monkeypatch.setattr("collectives.topology.ThreadBackend", type(None))  # threads pass for processes
    results = run(program)
    states = results[0][3]
    assert states is not None
    assert_same_states(states, compare(program, results).optimizer.state_dict())


@pytest.mark.parametrize(
    ("bounds", "padded"),
    [([0, 4, 8, 13], True), ([0, 5, 5, 12], False), ([0, 3, 4], True), ([0, 7, 9], False)],
    ids=str,
)
def test_slices_are_padded_to_the_longest_if_that_adds_at_most_half(bounds: list[int], padded: bool) -> None:
    sizes = [high - low for low, high in itertools.pairwise(bounds)]

    def program(transport: Transport) -> tuple[int, int]:
        ALGORITHMS["all_to_all"](transport).all_gather(torch.ones(bounds[-1]), bounds, tag=GATHER).wait()
        return transport.traffic.payload_sent // 4, transport.traffic.payload_received // 4

    for own, found in zip(sizes, on_late_threads(len(sizes), program), strict=True):
        others = len(sizes) - 1
        assert found == ((others * max(sizes),) * 2 if padded else (others * own, sum(sizes) - own))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("all_to_all", r"rank 1: all_to_all in bucket 0 \[reduce_scatter, round 0, index 0\]: its input was written"),
        ("pairwise", r"rank 1: send to rank 0 in bucket 0 \[reduce_scatter, round 0, index 0\]: its input was written"),
        ("forgotten", r"all_gather in parameters .*: it was never waited for"),
    ],
)
def test_what_is_written_before_its_wait_or_never_waited_for_is_found(algorithm: str, said: str) -> None:
    def program(transport: Transport) -> None:
        source = torch.ones(8)
        if algorithm == "forgotten":
            ALGORITHMS["all_to_all"](transport).all_gather(source, [0, 4, 8], tag=GATHER)
            return
        collective, out = ALGORITHMS[algorithm](transport), torch.zeros(4)
        work = collective.reduce_scatter(source, [0, 4, 8], out, start=None, tag=reduction())
        source.add_(transport.rank)
        work.wait()

    with pytest.raises(AssertionError, match=said):
        on_late_threads(2, program)
