"""Ranks that are behind catch up when all ranks synchronize, and receive the rounds that they missed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import (
    Algorithm,
    Chain,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    Ring,
    Shared,
    Tag,
    Transport,
    Work,
    on_threads,
)

from ..support.carried import between_hosts, each, hosts_of, jitter, reduction
from ..support.limits import PATIENT
from ..support.rows import rows


class Rounds:
    """A rank that runs rounds of reductions, as a reducer does.

    In its own rounds it contributes 1 + rank, in others -0.0.
    """

    def __init__(self, transport: Transport, algorithm: Algorithm, sizes: Sequence[int], agree: bool) -> None:
        self.transport, self.collective = transport, algorithm(transport)
        self.bounds = list(itertools.accumulate(sizes, initial=0))
        self.agree = agree
        self.entered = self.meetings = self.caught_up = 0
        self.sums: list[list[float]] = []

    def enter(self, value: float) -> None:
        self.entered += 1
        rank = self.transport.rank
        works: list[Work] = []
        for bucket in range(2):
            out = torch.empty(self.bounds[rank + 1] - self.bounds[rank])
            source = torch.full((self.bounds[-1],), value)
            tag = reduction(f"bucket {bucket}", self.entered, bucket)
            works.append(self.collective.reduce_scatter(source, self.bounds, out, start=None, tag=tag))
        Chain(works).wait()
        self.sums.append(out.tolist())
        if self.agree:
            self.transport.exchange(b"used", Tag(Kind.EXCHANGE, "which were used", self.entered))

    def catch_up(self) -> None:
        self.caught_up += 1
        self.enter(-0.0)

    def meet(self) -> None:
        self.meetings += 1
        tag = Tag(Kind.MEET, "step()", self.entered, self.meetings)
        told = self.transport.meet(tag, self.catch_up, lambda: self.message(self.transport.rank))
        assert told == [self.message(rank) for rank in range(self.transport.world_size)]

    def message(self, rank: int) -> bytes:
        """A message of a rank that has entered as many rounds as this one: short, empty, long, or very long."""
        return bytes([rank, self.entered]) * [1, 0, 3000, 40_000][(rank + self.entered) % 4]


@pytest.mark.law("every rank enters")
@pytest.mark.parametrize("algorithm", rows([Shared], [Pairwise, Ring, between_hosts]))
@given(data=st.data())
def test_a_rank_that_is_behind_catches_up_exactly_what_it_missed(algorithm: Algorithm, data: st.DataObject) -> None:
    """For any number of rounds on a rank and any split (empty slices send no bytes), with and without delays."""
    world_size = data.draw(st.sampled_from([2, 3, 5]))
    per_rank = st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size)
    plan = data.draw(st.lists(per_rank, min_size=1, max_size=3), "rounds a rank before each meeting")
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 4]), min_size=world_size, max_size=world_size), "slices")
    agree = data.draw(st.booleans(), "an exchange inside each round")
    seed = data.draw(st.none() | st.integers(0, 1000), "delays")
    hosts = data.draw(st.none() | hosts_of(world_size), "hosts between which meetings go by a tree")

    def program(transport: Transport) -> tuple[list[int], list[list[float]]]:
        if hosts is not None:
            transport.route(hosts)
        rounds = Rounds(transport, algorithm, sizes, agree)
        caught_up = []
        for before in plan:
            for _ in range(before[transport.rank]):
                rounds.enter(1.0 + transport.rank)
            already = rounds.caught_up
            rounds.meet()
            caught_up.append(rounds.caught_up - already)
        return caught_up, rounds.sums

    interfere = None if seed is None else jitter(seed)
    results = Loopback[tuple[list[int], list[list[float]]]](world_size, interfere=interfere).run(program)
    sums: list[float] = []
    for before in plan:
        sums += [sum(1.0 + r for r in range(world_size) if before[r] > i) for i in range(max(before))]
    for rank, (caught_up, found) in enumerate(results):
        assert caught_up == [max(before) - before[rank] for before in plan]
        assert found == [[value] * sizes[rank] for value in sums]


def test_rounds_in_which_nothing_is_sent_count_too() -> None:
    """This happens when every parameter is frozen: the message has the number of rounds."""

    def program(transport: Transport) -> int:
        caught_up: list[int] = []
        told = transport.meet(
            Tag(Kind.MEET, "step()", transport.rank),
            lambda: caught_up.append(1),
            lambda: bytes([transport.rank + len(caught_up)]),
        )
        assert told == [bytes([2])] * 3
        return len(caught_up)

    assert on_threads(3, program) == [2, 1, 0]


@pytest.mark.parametrize("algorithm", rows([Shared], [Pairwise, Ring, between_hosts]))
def test_ranks_at_different_meetings_after_different_rounds_both_learn_of_both(algorithm: Algorithm) -> None:
    for ahead in (0, 2):

        def program(transport: Transport, ahead: int = ahead) -> None:
            rounds = Rounds(transport, algorithm, [3, 3], agree=False)
            for _ in range(ahead * transport.rank):
                rounds.enter(1.0)
            transport.meet(Tag(Kind.MEET, f"purpose {transport.rank}", rounds.entered, 1), rounds.catch_up)

        for error in each(Loopback(2, timeout=PATIENT), program):
            assert isinstance(error, MismatchError)
            for rank in range(2):
                assert f"rank {rank} is in purpose {rank} [meet, round {ahead}, index 1]" in str(error)
