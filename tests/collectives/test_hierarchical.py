"""Several hosts: where and in which order a sum is formed, the bytes between hosts, and the ranks named in errors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import Hierarchical, Kind, Loopback, Tag, Transport
from collectives.algorithms.plans import Hosts, Plan, plans
from collectives.backends.hybrid import HybridBackend
from collectives.messages import HEADER_BYTES
from collectives.peer_links import ACK_PORT, PAYLOAD_PORT, PORTS

from ..support.carried import splits
from ..support.sockets import Wire, routed

FEWER = settings(max_examples=settings().max_examples // 3)


def hosts_of(assignment: Sequence[int]) -> Hosts:
    return Hosts(tuple(tuple(r for r, h in enumerate(assignment) if h == host) for host in dict.fromkeys(assignment)))


def equal_hosts(count: int, ranks: int) -> Hosts:
    return Hosts(tuple(tuple(range(host * ranks, (host + 1) * ranks)) for host in range(count)))


assignments = st.lists(st.integers(0, 3), min_size=1, max_size=9)
widths = st.sampled_from([(2, 4), (4, 4), (2, 2), (4, 8)])


@given(assignments, widths, st.booleans())
@settings(max_examples=200)
def test_a_plan_adds_every_rank_once_in_order_where_its_memory_is_seen(
    assignment: list[int], width: tuple[int, int], started: bool
) -> None:
    hosts = hosts_of(assignment)
    for owner, plan in enumerate(plans(hosts, started, *width)):
        assert [rank for stop in plan.stops for rank in stop.adds] == list(range(len(assignment)))
        assert plan.owner == plan.stops[-1].at == owner
        for stop in plan.stops[:-1]:
            assert {hosts.of[rank] for rank in stop.adds} == {hosts.of[stop.at]}
        assert all(a.at != b.at for a, b in itertools.pairwise(plan.stops))


def crossed(plan: Plan, hosts: Hosts, started: bool, travel: int, accumulate: int) -> int:
    """Return the bytes of an element between hosts.

    They are those of the running sum, and of the contributions that are sent to where they are added.
    """
    walk = [*([plan.owner] if started else []), *(stop.at for stop in plan.stops)]
    sums = sum(accumulate for a, b in itertools.pairwise(walk) if hosts.of[a] != hosts.of[b])
    return sums + sum(travel for stop in plan.stops for rank in stop.adds if hosts.of[rank] != hosts.of[stop.at])


@given(assignments, widths, st.booleans())
@settings(max_examples=200)
def test_a_plan_is_never_worse_than_a_direct_exchange(
    assignment: list[int], width: tuple[int, int], started: bool
) -> None:
    hosts = hosts_of(assignment)
    for owner, plan in enumerate(plans(hosts, started, *width)):
        apart = sum(host != assignment[owner] for host in assignment)
        assert plan.bytes_per_element == crossed(plan, hosts, started, *width) <= apart * width[0]


@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (2, 2), (2, 4), (3, 1), (3, 3), (4, 1), (4, 2), (5, 8)])
def test_equal_hosts_cross_as_often_as_the_closed_form_says(count: int, ranks: int) -> None:
    """A sum crosses H - 1 times for one rank a host and for the last host's slices, else H times.

    The average is H - 1/H for many ranks.
    """
    hosts, world_size = equal_hosts(count, ranks), count * ranks
    crossings = [plan.bytes_per_element // 4 for plan in plans(hosts, False, 4, 4)]
    elsewhere = count - 1 if ranks == 1 else count
    assert crossings == [elsewhere] * (world_size - ranks) + [count - 1] * ranks
    if ranks > 1:
        assert count * sum(crossings) == world_size * (count * count - 1)


@pytest.mark.parametrize(("count", "ranks", "busiest"), [(2, 1, 1), (2, 2, 3), (3, 2, 8), (4, 2, 10), (2, 4, 8)])
def test_plans_of_equal_bytes_are_spread_over_the_links(count: int, ranks: int, busiest: int) -> None:
    """Counts the slices on the busiest link in one direction.

    With random ties it would be 4 for two hosts of two ranks.
    """
    load: Counter[tuple[int, str]] = Counter()
    for plan in plans(equal_hosts(count, ranks), False, 1, 1):
        for sender, receiver, _ in plan.links:
            load[sender, "out"] += 1
            load[receiver, "in"] += 1
    assert max(load.values()) == busiest


def run_counted(assignment: Sequence[int], bounds: Sequence[int], started: bool) -> tuple[list[int], list[int], int]:
    """Return the bytes between hosts in a reduce-scatter and in an all-gather, by sender; and all bytes but acks."""
    hosts = hosts_of(assignment)
    payload, acks = [[0] * len(assignment), [0] * len(assignment)], [0] * len(assignment)

    class Counting(Wire):
        phase = 0

        def send(self, tensor: Tensor, to: int, slot: int) -> Any:
            assert assignment[self.rank] != assignment[to], "ranks of a host need no network"
            if slot % PORTS == PAYLOAD_PORT:
                payload[self.phase][self.rank] += tensor.numel()
            acks[self.rank] += tensor.numel() if slot % PORTS == ACK_PORT else 0
            return super().send(tensor, to, slot)

    def run(transport: Transport) -> int:
        rank = transport.rank
        counting = Counting(transport.backend)
        backend = routed(transport, hosts.ranks).backend
        assert isinstance(backend, HybridBackend)
        backend._remote = counting
        collective = Hierarchical(Transport(backend), hosts.ranks)
        t = collective.transport
        out = torch.zeros(bounds[rank + 1] - bounds[rank])
        source = t.scratch(bounds[-1], torch.float32, torch.device("cpu")).fill_(1.0)
        tag = Tag(Kind.REDUCE_SCATTER, "sum", 1)
        collective.reduce_scatter(source, bounds, out, start=out if started else None, tag=tag).wait()
        counting.phase = 1
        collective.all_gather(source, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
        return counting.sent

    sent = Loopback[int](len(assignment), timeout=20.0).run(run)
    return payload[0], payload[1], sum(sent) - sum(acks)


@given(
    st.integers(1, 6).flatmap(lambda w: st.tuples(st.lists(st.integers(0, 2), min_size=w, max_size=w), splits(w))),
    st.booleans(),
)
@FEWER
def test_what_crosses_between_hosts_is_what_the_plans_say(drawn: tuple[list[int], list[int]], started: bool) -> None:
    assignment, bounds = drawn
    hosts = hosts_of(assignment)
    reduced, gathered, sent = run_counted(assignment, bounds, started)
    sizes = [high - low for low, high in itertools.pairwise(bounds)]
    ways = plans(hosts, started, 4, 4)
    assert sum(reduced) == sum(plan.bytes_per_element * size for plan, size in zip(ways, sizes, strict=True))
    others = len(hosts.ranks) - 1
    assert gathered == [4 * size * others for size in sizes], "each rank sends its slice once to each other host"
    assert (sent - sum(reduced) - sum(gathered)) % HEADER_BYTES == 0


def test_the_ranks_of_a_host_share_the_work_for_another_host() -> None:
    """Slices of one host go to different ranks of the other host, as far as it has enough."""
    hosts = equal_hosts(2, 4)
    for here, there in ((0, 1), (1, 0)):
        assert [hosts.delegate(owner, there) for owner in hosts.ranks[here]] == list(hosts.ranks[there])
    uneven = Hosts(((0, 1, 2), (3,)))
    assert [uneven.delegate(owner, 1) for owner in range(3)] == [3, 3, 3]
    assert uneven.delegate(3, 0) == 0
