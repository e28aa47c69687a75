"""Short messages of many ranks go by a tree of their hosts: few, in time, and a silent rank is named by all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError, Kind, Loopback, Pairwise, Tag, Transport
from collectives import build as build_collective
from collectives.links.control_plane import MESH_RANKS
from collectives.links.messenger import SMALL

from ..support.carried import FEWER, hosts_of, jitter
from .clock import Clocked

TAG = Tag(Kind.EXCHANGE, "telling")
LIMIT = 100.0  # virtual seconds
THREE_HOSTS = [[0, 1, 2], [3, 4], [5], [6]]


@given(data=st.data())
@FEWER
def test_every_rank_has_every_message(data: st.DataObject) -> None:
    """Short ones, long ones, and those that are too long together."""
    world_size = data.draw(st.integers(2, 7))
    hosts = data.draw(hosts_of(world_size))
    lengths = st.sampled_from([0, 1, 300, SMALL // 2, SMALL, SMALL + 1, 3 * SMALL])
    plan = data.draw(st.lists(st.lists(lengths, min_size=world_size, max_size=world_size), min_size=1, max_size=3))
    seed = data.draw(st.none() | st.integers(0, 1000), "delays")

    def program(transport: Transport) -> None:
        transport.route(hosts)
        for number, sizes in enumerate(plan):
            messages = [bytes([rank]) * size for rank, size in enumerate(sizes)]
            tag = Tag(Kind.EXCHANGE, "telling", number)
            assert transport.exchange(messages[transport.rank], tag) == messages

    Loopback[None](world_size, interfere=None if seed is None else jitter(seed)).run(program)


def test_many_ranks_find_their_hosts_when_a_collective_is_built() -> None:
    def program(transport: Transport) -> bool:
        return build_collective(transport, Pairwise).collective.transport.is_routed

    assert Loopback[bool](MESH_RANKS).run(program) == [False] * MESH_RANKS
    assert Loopback[bool](MESH_RANKS + 1).run(program) == [True] * (MESH_RANKS + 1)


@pytest.mark.parametrize("late", [{4: 60, 5: 120, 6: 180}, {0: 60, 1: 130}, {3: 60, 4: 120}], ids=str)
def test_ranks_that_come_one_after_another_are_all_waited_for(late: dict[int, float]) -> None:
    """Each within the time limit after the one before, and together far beyond it: a rank that waits says so. The first
    of a host comes within the limit after the others."""
    group = Clocked[list[bytes]](7, timeout=LIMIT)

    def program(transport: Transport) -> list[bytes]:
        transport.route([[0, 1, 2], [3, 4, 5, 6]])
        group.sleep(late.get(transport.rank, 0.0))
        return transport.exchange(bytes([transport.rank]), TAG)

    assert group.run(program) == [[bytes([rank]) for rank in range(7)]] * 7
    assert group.now == max(late.values())


@pytest.mark.parametrize("row", [*((silent, None) for silent in range(7)), (5, 0), (5, 3)], ids=str)
def test_a_rank_that_is_silent_is_named_by_all(row: tuple[int, int | None]) -> None:
    """A rank that hears from nobody else raises after its own patience; the others as soon as a first one raises. A
    rank that came late is not taken for the silent one."""
    silent, late = row
    hosts = THREE_HOSTS if late is None else [[0, 1, 2], [3, 4, 5, 6]]
    group = Clocked[None](7, timeout=LIMIT)
    given_up: list[float] = []

    def program(transport: Transport) -> None:
        transport.route(hosts)
        if transport.rank == silent:
            group.sleep(100 * LIMIT)
            return
        group.sleep(0.75 * LIMIT * (transport.rank == late))
        with pytest.raises(CollectiveError, match=rf"(no answer from rank|rank) {silent} (after|failed)"):
            transport.exchange(b"", TAG)
        given_up.append(group.now)

    group.run(program)
    assert len(given_up) == 6
    assert min(given_up) >= LIMIT
    assert max(given_up) <= 3 * LIMIT
