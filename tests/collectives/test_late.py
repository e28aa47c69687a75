"""Training has the plain loop's bits, and touches no memory of a transfer between its launch and its wait.

Every transfer finishes at its wait (`tests.support.late`). On one stream such a program is safe over NCCL, too, which
is not available here: hosts and replicas are pretended. On streams (`tests.support.streamed`) no rank awaits headers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from collectives import AllToAll, Kind, Tag, Transport
from collectives.algorithms import plans
from collectives.launches.sentinel import Post

from ..dials.loops import step, steps
from ..dials.record import config_with
from ..support.carried import built, folded, reduction
from ..support.late import LateBackend, folded_by_groups, on_late_threads
from ..support.limits import PATIENT
from ..support.machine.program import Backward, Command, Config, Freeze, Step, Uneven, ZeroGrad
from ..support.machine.run import Played, play, run
from ..support.rows import only
from ..support.streamed import StreamedLoopback

GATHER = Tag(Kind.ALL_GATHER, "parameters")
CONSTANT = (14,)  # a frozen parameter
LOOP: list[Command] = [
    *step(1, Backward(2), Backward(3)),
    *(Backward(4, sync=False), *step(5, Backward(6, sync=False))),
    *(Freeze(CONSTANT), Backward(7, sync=False), *step(8, clear="zeros")),
]
FEWER = [Backward(9), Uneven(10, (1, 0, 0)), Step(), ZeroGrad(), Uneven(11, (1, 0, 0)), Step(), ZeroGrad()]
Changes = dict[str, Any]
SEVERAL = {"world_size": 3, "collective": "all_to_all"}
MIXED = {"world_size": 2, "collective": "all_to_all", "precision": "bf16"}
KEPT = {"world_size": 4, "stage": 3, "reshard": 2}
REPLICAS: list[Changes] = [
    {"world_size": 4, "stage": 1, "sharding_factor": 2},
    {"world_size": 3, "stage": 2, "sharding_factor": 1},
    {"world_size": 6, "stage": 3, "sharding_factor": 3, "optimizer": "sgd momentum"},
]


def fold(stage: int, way: Any, precision: str = "") -> Changes:
    return {"world_size": 4, "stage": stage, "collective": way, "precision": precision}


def late(config: Config, commands: list[Command]) -> list[Any]:
    def run(transport: Transport) -> Any:
        assert isinstance(transport.backend, LateBackend)
        found = play(config, commands, transport)
        several = config.setting.collective in ("all_to_all", "native")
        assert transport.backend.most_launched >= (2 if several else 0)
        return found

    return on_late_threads(config.setting.world_size, run)


def on_streams(config: Config, commands: list[Command]) -> list[Any]:
    loopback: StreamedLoopback[Any] = StreamedLoopback(config.setting.world_size, limit=PATIENT)

    def run(transport: Transport) -> Any:
        found = play(config, commands, transport)
        assert transport.backend.board().num_keys() > 0, "the sentinels have opened their board"
        return found

    with mock.patch.object(Post, "_explain", side_effect=AssertionError("a sentinel has used it")) as used:
        results = loopback.run(run)
    assert not used.called
    return results


ROWS: dict[str, tuple[Callable[[Config, list[Command]], list[Any]], Changes]] = {
    "all_to_all, stage 0": (late, {**SEVERAL, "stage": 0}),
    "all_to_all, stage 2": (late, {**SEVERAL, "stage": 2}),
    "all_to_all, stage 3": (late, {**SEVERAL, "stage": 3}),
    "all_to_all, stage 1, bf16": (late, {**MIXED, "stage": 1}),
    "all_to_all, stage 3, bf16": (late, {**MIXED, "stage": 3}),
    "pairwise, stage 1": (late, {**SEVERAL, "stage": 1, "collective": "pairwise"}),
    "pairwise, stage 3, bf16": (late, {**MIXED, "stage": 3, "collective": "pairwise"}),
    "native, stage 2": (late, {**SEVERAL, "stage": 2, "collective": "native"}),
    "native, stage 3": (late, {**SEVERAL, "stage": 3, "collective": "native"}),
    "kept by 2 with NCCL": (late, KEPT),
    **{f"replicas of {each['sharding_factor']} with NCCL": (late, each) for each in REPLICAS},
    "fold by messages, stage 1, bf16": (late, fold(1, folded, "bf16")),
    "fold by messages, stage 3": (late, fold(3, folded)),
    "fold by groups, stage 0": (late, fold(0, folded_by_groups)),
    "fold by groups, stage 2": (late, fold(2, folded_by_groups)),
    "fold by groups, stage 3": (late, fold(3, folded_by_groups)),
    "all_to_all on streams, stage 0": (on_streams, {**SEVERAL, "stage": 0}),
    "all_to_all on streams, stage 3": (on_streams, {**SEVERAL, "stage": 3}),
    "kept by 2 with NCCL on streams": (on_streams, KEPT),
    **{f"replicas of {each['sharding_factor']} with NCCL on streams": (on_streams, each) for each in REPLICAS},
}
FIRST = [
    *("pairwise, stage 3, bf16", "all_to_all on streams, stage 0", "kept by 2 with NCCL on streams"),
]


@pytest.mark.parametrize("name", only(ROWS, *FIRST))
def test_training_has_the_plain_loops_bits_when_every_transfer_finishes_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, changes = ROWS[name]
    config = config_with(changes)
    commands = LOOP if config.setting.stage == 3 else LOOP + FEWER
    if config.setting.collective == "native":  # sums in the order of the plain loop's, by `late.py`
        commands = steps(2)
    monkeypatch.setattr(plans, "LEAST_OF_A_FOLD", 7)
    monkeypatch.setattr("collectives.topology._all_have_nccl", lambda *_: "NCCL" in name)
    if config.setting.collective == "auto":
        monkeypatch.setattr("collectives.topology.ThreadBackend", type(None))  # threads pass for processes
    run(config, *commands, backend=Played(ranks(config, commands)))


@pytest.mark.parametrize(
    ("bounds", "padded"),
    [([0, 4, 8, 13], True), ([0, 5, 5, 12], False), ([0, 3, 4], True), ([0, 7, 9], False)],
    ids=str,
)
def test_slices_are_padded_to_the_longest_if_that_adds_at_most_half(bounds: list[int], padded: bool) -> None:
    sizes = [high - low for low, high in itertools.pairwise(bounds)]

    def program(transport: Transport) -> tuple[int, int]:
        AllToAll(transport).all_gather(torch.ones(bounds[-1]), bounds, tag=GATHER).wait()
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
            AllToAll(transport).all_gather(source, [0, 4, 8], tag=GATHER)
            return
        collective, out = built(algorithm)(transport), torch.zeros(4)
        work = collective.reduce_scatter(source, [0, 4, 8], out, start=None, tag=reduction())
        source.add_(transport.rank)
        work.wait()

    with pytest.raises(AssertionError, match=said):
        on_late_threads(2, program)
