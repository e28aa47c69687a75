"""Between hosts the sum goes from host to host in rank order, for the bytes of its formula; no buffer is touched early.

Hosts are pretended: ranks are threads, whose transfers finish at their wait (see `tests.support.late`). Sums go by
messages, or by process groups of hosts and rails, as over NCCL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import BucketQueue, Collective, CollectiveError, Fold, Pairwise, Transport, Work, on_threads
from collectives.algorithms import plans
from collectives.algorithms.plans import folded
from collectives.topology import _fold_by_nccl
from zero import ZeroOptimizer
from zero.core.stage import FOLDS_IN_FLIGHT

from ..support.carried import BF16, CPU, FP32, assert_same_bits, awkward, equal_hosts, plain_sum, reduction
from ..support.late import on_late_threads
from ..support.limits import BOUND, at_once
from ..support.loops import seeded
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import only, rows

BUCKETS, BACKWARDS = 3, 3


def by_messages(transport: Transport, hosts: int = 2) -> Collective:
    return Fold(transport, equal_hosts(transport, hosts), Pairwise(transport))


def by_groups(transport: Transport, hosts: int = 2) -> Collective:
    return _fold_by_nccl(transport, equal_hosts(transport, hosts), CPU)


WAYS: dict[str, Callable[..., Collective]] = {"messages": by_messages, "groups": by_groups}
SUMS = {  # hosts, bounds, dtype of contributions
    "2 hosts of 3": (2, range(0, 97, 16), BF16),
    "4 hosts of 2": (4, range(0, 129, 16), FP32),
    "4 hosts of 1": (4, range(0, 65, 16), BF16),
    "1 host of 3": (1, range(0, 49, 16), FP32),
    "2 hosts, uneven": (2, [0, 64, 100, 100, 130], FP32),
    "2 hosts, one element": (2, [0, 0, 0, 0, 1], BF16),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST_OF_A_FOLD", 7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", only(SUMS, "4 hosts of 2", "2 hosts, uneven"))
def test_owners_have_the_sums_in_rank_order_and_hosts_send_the_bytes_of_the_formula(name: str, way: str) -> None:
    """Three backwards, each onto the sums so far, and several buckets under way. What a rank contributes is written
    over after the launch, and with groups what it has summed, too."""
    hosts, bounds, travel = SUMS[name]
    world_size, numel = len(bounds) - 1, bounds[-1]
    width = world_size // hosts

    def contribution(backward: int, bucket: int, rank: int) -> Tensor:
        return awkward(numel, travel, 1000 * backward + 100 * rank + bucket)

    def program(transport: Transport) -> tuple[list[list[Tensor]], list[int]]:
        collective, rank = WAYS[way](transport, hosts), transport.rank
        sums, found, sent = list[Tensor](), list[list[Tensor]](), list[int]()
        for backward in range(BACKWARDS):
            starts = [each.clone() for each in sums]
            sums = [torch.empty(bounds[rank + 1] - bounds[rank]) for _ in range(BUCKETS)]

            def launch(bucket: int, backward: int = backward) -> Work:
                source = contribution(backward, bucket, rank)
                tag = reduction(f"bucket {bucket}", backward + 1, bucket)
                start = starts[bucket] if starts else None  # noqa: B023
                work = collective.reduce_scatter(source, bounds, sums[bucket], start=start, tag=tag)  # noqa: B023
                source.fill_(77.0)
                if start is not None and way == "groups":
                    start.fill_(77.0)
                return work

            queue, before = BucketQueue(launch, FOLDS_IN_FLIGHT), transport.traffic
            queue.begin_round(range(BUCKETS))
            queue.finish()
            found.append([each.clone() for each in sums])
            sent.append((transport.traffic - before).payload_sent)
        return found, sent

    results = on_late_threads(world_size, program)
    for bucket in range(BUCKETS):
        total = None
        for backward in range(BACKWARDS):
            total = plain_sum(total, [contribution(backward, bucket, rank) for rank in range(world_size)], FP32)
            for rank, (found, _) in enumerate(results):
                assert_same_bits(found[backward][bucket], total[bounds[rank] : bounds[rank + 1]])
    for backward in range(BACKWARDS):
        inside = (width - 1) * numel * travel.itemsize
        out = [0.0] * hosts
        for host in range(hosts):
            ranks = range(host * width, (host + 1) * width)
            out[host] = sum(results[rank][1][backward] for rank in ranks) / BUCKETS - inside
            owned = bounds[ranks[-1] + 1] - bounds[ranks[0]]
            onward = numel if host + 1 < hosts else numel - owned
            assert out[host] == FP32.itemsize * (onward + (owned if backward and host else 0))
        if name.endswith(("of 1", "of 2", "of 3")):
            assert sum(out) == folded(hosts, started=backward > 0) * numel * FP32.itemsize


def test_ranks_of_which_one_has_a_sum_so_far_are_told() -> None:
    def program(transport: Transport) -> None:
        start = torch.zeros(16) if transport.rank == 1 else None
        tag = reduction("bucket 0", 1, 0)
        with pytest.raises(CollectiveError, match="bucket 0"):
            by_messages(transport).reduce_scatter(
                torch.ones(64), range(0, 65, 16), torch.empty(16), start=start, tag=tag
            ).wait()

    with at_once():
        on_threads(4, program, timeout=BOUND)


STEPS = (
    Step((Round(), Round(), Round()), clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round())),
    Step((Round(), Round(sync=False)), clear="zeros"),
)
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))  # not at stage 3, where all ranks run all forwards
FOUR = Program(4, 2, steps=STEPS + FEWER)
PROGRAMS = {
    "stage 0": replace(FOUR, stage=0),
    "stage 1, bf16": replace(FOUR, stage=1, precision=PRECISIONS["bf16"]),
    "stage 2": FOUR,
    "stage 3": replace(FOUR, stage=3, steps=STEPS),
}


TRAININGS = list(itertools.product(PROGRAMS, WAYS))


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "way"), only(TRAININGS, ("stage 1, bf16", "messages"), ("stage 3", "groups")))
def test_training_on_two_hosts_has_the_bits_of_the_plain_loop(name: str, way: str) -> None:
    """Three backwards, `no_sync`, clips, ranks without micro-batches."""
    program: Any = replace(PROGRAMS[name], collective=WAYS[way])  # type: ignore[arg-type]
    results = on_late_threads(program.world_size, lambda transport: run_rank(program, transport))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@pytest.mark.parametrize(("stage", "precision"), rows([(3, "fp32")], [(0, "fp32"), (1, "bf16"), (2, "bf16")]))
@pytest.mark.parametrize("way", only(WAYS, "groups"))
def test_what_is_described_is_what_is_sent_and_bounds_the_buckets_under_way(
    stage: int, precision: str, way: str
) -> None:
    def program(transport: Transport) -> tuple[Any, int]:
        model = seeded(0, lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))))
        arguments: dict[str, Any] = {"collective": WAYS[way], "bucket_cap_mb": 0.015}
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, mixed_precision=PRECISIONS.get(precision), **arguments
        )
        for _ in range(2):
            before = optimizer.traffic
            for _ in range(3):
                model(torch.ones(2, 64)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.describe(), (optimizer.traffic - before).payload_sent

    results = on_late_threads(4, program)
    assert sum(sent for _, sent in results) == results[0][0].formula_traffic_bytes(3, 3)
    for description, _ in results:
        assert "sums of up to 2 buckets under way between hosts, collective fold" in str(description)
        assert 0 < description.bytes["scratch_peak"] <= description.formula_bytes["scratch_peak"]
