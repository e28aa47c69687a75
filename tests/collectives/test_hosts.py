"""Sums that go from host to host or from replica to replica: their order, their bytes, and no buffer touched early.

NCCL is not available here, and hosts are pretended: ranks are threads, whose transfers finish at their wait and detect
every earlier access (see `tests.support.late`). Sums go by messages, or by process groups of hosts, rails or replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import Collective, CollectiveError, Pipeline, PipelineStage, Transport, Work, on_threads, pass_on
from collectives.algorithms import plans
from collectives.algorithms.plans import Hosts, Plan
from collectives.backends import gloo as gloo_backend
from collectives.backends.gloo import GlooBackend
from collectives.topology import _replicas_by_nccl
from zero import ZeroOptimizer
from zero.core.stage import FOLDS_IN_FLIGHT

from ..support.carried import BF16, FP32, assert_same_bits, awkward, equal_hosts, folded, plain_sum, reduction
from ..support.late import LateLoopback, folded_by_groups, on_late_threads
from ..support.limits import BOUND, at_once
from ..support.models import seeded
from ..support.narrowed import PRECISIONS
from ..support.rows import only, rows

BUCKETS, BACKWARDS = 3, 3


def by_replicas(transport: Transport, replicas: int = 2) -> Collective:
    return _replicas_by_nccl(transport, equal_hosts(transport, replicas)).collective


WAYS: dict[str, Callable[..., Any]] = {"messages": folded, "groups": folded_by_groups, "replicas": by_replicas}
SUMS: dict[str, tuple[int, Sequence[int], torch.dtype]] = {  # hosts or replicas, bounds, dtype of contributions
    "2 hosts of 3": (2, range(0, 97, 16), BF16),
    "4 hosts of 2": (4, range(0, 129, 16), FP32),
    "4 hosts of 1": (4, range(0, 65, 16), BF16),
    "1 host of 3": (1, range(0, 49, 16), FP32),
    "2 hosts, uneven": (2, [0, 64, 100, 100, 130], FP32),
    "2 hosts, one element": (2, [0, 0, 0, 0, 1], BF16),
    "2 replicas of 1": (2, [0, 100], FP32),
    "2 replicas of 2": (2, [0, 64, 100], FP32),
    "3 replicas of 2": (3, [0, 0, 100], BF16),
    "2 replicas of 3": (2, [0, 30, 30, 100], BF16),
}
ROWS = [(name, way) for name, way in itertools.product(SUMS, WAYS) if ("replicas" in name) is (way == "replicas")]
FIRST = [("4 hosts of 2", "groups"), ("2 hosts, uneven", "messages"), ("2 hosts, uneven", "groups")]
FIRST += [("2 replicas of 2", "replicas"), ("2 replicas of 3", "replicas")]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST_OF_A_FOLD", 7)


@pytest.mark.parametrize(("name", "way"), only(ROWS, *FIRST))
def test_owners_have_the_sums_in_rank_order_for_the_bytes_of_the_formula(name: str, way: str) -> None:
    """Three backwards, each onto the sums so far. What a rank contributes is written over after the launch."""
    parts, bounds, travel = SUMS[name]
    shards, numel = len(bounds) - 1, bounds[-1]
    world_size = shards * parts if way == "replicas" else shards
    width, copied = world_size // parts, way != "replicas"

    def contribution(backward: int, bucket: int, rank: int) -> Tensor:
        return awkward(numel, travel, 1000 * backward + 100 * rank + bucket)

    def program(transport: Transport) -> tuple[list[list[Tensor]], list[Tensor], list[int]]:
        collective: Collective = WAYS[way](transport, parts)
        low, high = bounds[transport.rank % shards], bounds[transport.rank % shards + 1]
        sums, found, sent = list[Tensor](), list[list[Tensor]](), list[int]()
        for backward in range(BACKWARDS):
            starts: list[Any] = sums or [None] * BUCKETS
            sums = [torch.empty(high - low) if copied or start is None else start for start in starts]

            def launch(bucket: int, backward: int = backward, starts: Any = starts, sums: Any = sums) -> Work:
                source, start = contribution(backward, bucket, transport.rank), starts[bucket]
                tag = reduction(f"bucket {bucket}", backward + 1, bucket)
                work = collective.reduce_scatter(source, bounds, sums[bucket], start=start, tag=tag)
                for tensor in [source] * copied + [start] * (start is not None and way == "groups"):
                    tensor.fill_(77.0)
                return work

            before = transport.traffic
            passing = [PipelineStage(1, launch, pass_on), PipelineStage(100)]
            stages = [PipelineStage(FOLDS_IN_FLIGHT, launch)] if copied else passing
            pipeline = Pipeline(*stages)
            pipeline.begin_round(range(BUCKETS))
            pipeline.finish()
            found.append([each.clone() for each in sums])
            sent.append((transport.traffic - before).payload_sent)
        wholes = [torch.full((numel,), -1.0) for _ in sums]
        for bucket, (whole, out) in enumerate(zip(wholes, sums, strict=True)):
            whole[low:high] = out
            collective.all_gather(whole, bounds, tag=reduction(f"whole {bucket}", 9, bucket)).wait()
        return found, wholes, sent

    results = on_late_threads(world_size, program)
    for bucket in range(BUCKETS):
        total = None
        for backward in range(BACKWARDS):
            total = plain_sum(total, [contribution(backward, bucket, rank) for rank in range(world_size)], FP32)
            for rank, (found, wholes, _) in enumerate(results):
                low, high = bounds[rank % shards], bounds[rank % shards + 1]
                assert_same_bits(found[backward][bucket], total[low:high])
                if backward == BACKWARDS - 1:
                    assert_same_bits(wholes[bucket], total)
    for backward in range(BACKWARDS):
        by_rank = [sent[backward] / BUCKETS for _, _, sent in results]
        inside = (width - 1) * numel * travel.itemsize
        if way == "replicas":
            assert sum(by_rank) == inside * parts + 2 * (parts - 1) * numel * FP32.itemsize
            continue
        out = [sum(by_rank[host * width : (host + 1) * width]) - inside for host in range(parts)]
        for host in range(parts):
            owned = bounds[(host + 1) * width] - bounds[host * width]
            onward = numel if host + 1 < parts else numel - owned
            assert out[host] == FP32.itemsize * (onward + (owned if backward and host else 0))
        if isinstance(bounds, range):
            assert sum(out) == plans.folded(parts, started=backward > 0) * numel * FP32.itemsize


def test_ranks_of_which_one_has_a_sum_so_far_are_told() -> None:
    def program(transport: Transport) -> None:
        start = torch.zeros(16) if transport.rank == 1 else None
        collective, source, out = folded(transport), torch.ones(64), torch.empty(16)
        with pytest.raises(CollectiveError, match="bucket 0"):
            collective.reduce_scatter(source, range(0, 65, 16), out, start=start, tag=reduction()).wait()

    with at_once():
        on_threads(4, program, timeout=BOUND)


def test_a_replica_in_another_bucket_is_named_before_its_bytes_are_mixed() -> None:
    def program(transport: Transport) -> str:
        collective = by_replicas(transport)
        for bucket in (0, 7 if transport.rank >= 2 else 3):
            tag = reduction(f"bucket {bucket}", 1, bucket)
            work = collective.reduce_scatter(torch.ones(8), [0, 4, 8], torch.empty(4), start=None, tag=tag)
            try:
                work.wait()
            except CollectiveError as error:
                assert bucket
                return f"{type(error).__name__}: {error}"
        return "nothing"

    for rank, message in enumerate(LateLoopback[str](4, timeout=0.2).run(program)):
        assert "bucket 3" in message
        assert rank < 2 or ("bucket 7" in message and message.startswith("MismatchError"))


@pytest.mark.first(0)
@pytest.mark.parametrize(("stage", "precision"), rows([(3, "fp32")], [(0, "fp32"), (1, "bf16"), (2, "bf16")]))
def test_what_is_described_is_what_is_sent_and_bounds_the_buckets_under_way(stage: int, precision: str) -> None:
    def program(transport: Transport) -> tuple[Any, int]:
        model = seeded(0, lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))))
        arguments: dict[str, Any] = {"collective": folded_by_groups, "mixed_precision": PRECISIONS.get(precision)}
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.015, **arguments)
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


def crossed(plan: Plan, hosts: Hosts, started: bool, travel: int, accumulate: int) -> int:
    """Return the bytes of an element between hosts: of the running sum, and of contributions that are sent to it."""
    walk = [*([plan.owner] if started else []), *(stop.at for stop in plan.stops)]
    sums = sum(accumulate for a, b in itertools.pairwise(walk) if hosts.of[a] != hosts.of[b])
    return sums + sum(travel for stop in plan.stops for rank in stop.adds if hosts.of[rank] != hosts.of[stop.at])


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.sampled_from([(2, 4), (4, 4), (2, 2), (4, 8)]),
    st.booleans(),
)
@settings(max_examples=100)
def test_a_plan_adds_each_rank_in_order_and_sends_no_more_than_directly(
    placed: list[int], width: tuple[int, int], started: bool
) -> None:
    hosts = Hosts(tuple(tuple(r for r, h in enumerate(placed) if h == host) for host in dict.fromkeys(placed)))
    for owner, plan in enumerate(plans.plans(hosts, started, *width)):
        assert [rank for stop in plan.stops for rank in stop.adds] == list(range(len(placed)))
        assert plan.owner == plan.stops[-1].at == owner
        for stop in plan.stops[:-1]:
            assert {hosts.of[rank] for rank in stop.adds} == {hosts.of[stop.at]}
        assert all(a.at != b.at for a, b in itertools.pairwise(plan.stops))
        apart = sum(host != placed[owner] for host in placed)
        assert plan.bytes_per_element == crossed(plan, hosts, started, *width) <= apart * width[0]


@pytest.mark.parametrize("case", list(itertools.product((0, 2), (0, 2), (False, True), (False, True))), ids=str)
def test_collectives_that_may_not_have_ended_are_aborted_with_the_group(
    case: tuple[int, int, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of its parts. A kernel that waits for a lost rank would never end, nor would the process."""
    launched, awaited, ended, of_a_part = case
    event, device, of_device, part = mock.Mock(), torch.device("cuda", 0), mock.Mock(), mock.Mock()
    part.abort_collectives.return_value = of_a_part
    event.query.return_value = ended
    monkeypatch.setattr(torch, "Event", lambda of: event if of == device else None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    backend = object.__new__(GlooBackend)
    backend.group = mock.Mock()
    backend._on_streams, backend._parts = gloo_backend._UnderWay(), [part]
    monkeypatch.setattr(gloo_backend, "_backends", lambda group: {"cpu": "gloo", "cuda": "nccl"})
    monkeypatch.setattr(gloo_backend, "_of_device", lambda group, kind: {"cuda": of_device}[kind])
    for _ in range(launched):
        backend._on_streams.launched()
    for _ in range(min(launched, awaited)):
        backend._on_streams.awaited(device)
        event.record.assert_called_with("of cuda:0")
    expected = launched > 0 and (awaited < launched or not ended)
    assert backend.abort_collectives() == (expected or of_a_part)
    assert of_device.abort.call_count == expected


def test_a_collective_that_a_stream_waits_for_is_known_also_when_another_stream_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [mock.Mock(query=lambda: False), mock.Mock(query=lambda: True)]
    made, streams, device = iter(events), iter(["aside", "of the backward"]), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "Event", lambda of: next(made))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: next(streams))
    under_way = gloo_backend._UnderWay()
    for _ in events:
        under_way.launched()
        under_way.awaited(device)
    assert under_way
