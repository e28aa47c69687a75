"""Between hosts a sum crosses as rarely as its order allows, evenly spread over the links, and as planned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.algorithms.plans import Hosts, Plan, plans


def hosts_of(assignment: Sequence[int]) -> Hosts:
    return Hosts(tuple(tuple(r for r, h in enumerate(assignment) if h == host) for host in dict.fromkeys(assignment)))


def crossed(plan: Plan, hosts: Hosts, started: bool, travel: int, accumulate: int) -> int:
    """Return the bytes of an element between hosts.

    They are those of the running sum, and of the contributions that are sent to where they are added.
    """
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
    assignment: list[int], width: tuple[int, int], started: bool
) -> None:
    """Where its memory is seen: a stop adds what its own host has."""
    hosts = hosts_of(assignment)
    for owner, plan in enumerate(plans(hosts, started, *width)):
        assert [rank for stop in plan.stops for rank in stop.adds] == list(range(len(assignment)))
        assert plan.owner == plan.stops[-1].at == owner
        for stop in plan.stops[:-1]:
            assert {hosts.of[rank] for rank in stop.adds} == {hosts.of[stop.at]}
        assert all(a.at != b.at for a, b in itertools.pairwise(plan.stops))
        apart = sum(host != assignment[owner] for host in assignment)
        assert plan.bytes_per_element == crossed(plan, hosts, started, *width) <= apart * width[0]
