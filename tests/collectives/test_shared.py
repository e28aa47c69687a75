"""Every algorithm against every other: shared memory, direct exchange, a ring, and hosts drawn at random."""

from __future__ import annotations

import functools
import itertools
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Algorithm,
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Ring,
    Shared,
    Tag,
    Transport,
)
from collectives.algorithms.ordered_sum import ordered_sum

from ..support.carried import (
    MIXED,
    SAME,
    assert_same_bits,
    awkward,
    jitter,
    plain_sum,
    splits,
    whole_numbers,
)
from ..support.sockets import meet, routed
from .test_collectives import WAYS

CPU = torch.device("cpu")
FEWER = settings(max_examples=settings().max_examples // 2)
transport_module = sys.modules["collectives.transport"]
shared_module = sys.modules["collectives.algorithms.shared"]  # `collectives.shared` is a function
SMALL = 64  # the most elements of a chunk here, so that few elements make many chunks


@dataclass(frozen=True)
class Job:
    """Several reductions and gathers in flight.

    ``hosts``: the host of each rank; ``way``: where the sums are, see `WAYS`.
    """

    bounds: tuple[int, ...]
    hosts: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    way: tuple[str, str]
    in_flight: int
    seed: int
    delays: bool

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def ranks_of_hosts(self) -> list[list[int]]:
        return [[r for r, h in enumerate(self.hosts) if h == host] for host in dict.fromkeys(self.hosts)]

    def contribution(self, make: Any, number: int, rank: int) -> Tensor:
        return make(self.bounds[-1], self.dtypes[0], self.seed + 100 * number + rank)

    def start(self, make: Any, number: int, rank: int) -> Tensor | None:
        numel = self.bounds[rank + 1] - self.bounds[rank]
        return None if self.way[0] == "no start" else make(numel, self.dtypes[1], self.seed + 100 * number + rank + 50)

    def sums(self, make: Any, number: int) -> list[Tensor]:
        parts = [self.contribution(make, number, rank) for rank in range(self.world_size)]
        return [
            plain_sum(self.start(make, number, rank), [part[low:high] for part in parts], self.dtypes[1])
            for rank, (low, high) in enumerate(itertools.pairwise(self.bounds))
        ]


def jobs(
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]], ways: Sequence[tuple[str, str]] = WAYS, most_ranks: int = 8
) -> Any:
    def of(world_size: int) -> Any:
        hosts = st.lists(st.integers(0, min(3, world_size - 1)), min_size=world_size, max_size=world_size)
        return st.builds(
            Job,
            splits(world_size).map(tuple),
            st.one_of(hosts, hosts.map(sorted)).map(tuple),
            st.sampled_from(dtypes),
            st.sampled_from(ways),
            st.integers(1, 4),
            st.integers(0, 2**31),
            st.booleans(),
        )

    return st.integers(1, most_ranks).flatmap(of)


def program(job: Job, make: Any, algorithm: Callable[[Transport], Any], transport: Transport) -> list[Tensor]:
    """Return this rank's sums and gathered buffers. Inputs are overwritten as soon as the wait allows it."""
    collective = algorithm(transport)
    t, results, works = collective.transport, [], []
    low, high = job.bounds[t.rank], job.bounds[t.rank + 1]
    for number in range(job.in_flight):
        source = t.scratch(job.bounds[-1], job.dtypes[0], CPU).copy_(job.contribution(make, number, t.rank))
        out = source[low:high] if job.way[1] == "out in source" else t.scratch(high - low, job.dtypes[1], CPU)
        start = job.start(make, number, t.rank)
        if start is not None and job.way[0] == "start is out":
            start = out.copy_(start)
        tag = Tag(Kind.REDUCE_SCATTER, "sums", number + 1, number)
        works.append((collective.reduce_scatter(source, job.bounds, out, start=start, tag=tag), source, out))
    for work, source, out in works:
        work.wait()
        results.append(out.clone())
        source.fill_(77.0)
        out.fill_(77.0)
    gathers = []
    for number in range(job.in_flight):
        whole = t.scratch(job.bounds[-1], job.dtypes[1], CPU).fill_(66.0)
        whole[low:high] = results[number]
        gathers.append((collective.all_gather(whole, job.bounds, tag=Tag(Kind.ALL_GATHER, "wholes", 1, number)), whole))
    for work, whole in gathers:
        work.wait()
        work.wait()
        results.append(whole.clone())
        whole.fill_(77.0)
    return results


def check(job: Job, make: Any, algorithm: Algorithm, equal: Callable[[Tensor, Tensor], None]) -> None:
    group = Loopback[list[Tensor]](
        job.world_size, timeout=20.0, interfere=jitter(job.seed % 1000) if job.delays else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_module, "CHUNK", SMALL)
        found = group.run(functools.partial(program, job, make, algorithm))
    for number in range(job.in_flight):
        expected = job.sums(make, number)
        for rank in range(job.world_size):
            equal(found[rank][number], expected[rank])
            equal(found[rank][job.in_flight + number], torch.cat(expected))


def algorithms_of(job: Job) -> list[Algorithm]:
    return [Pairwise, Shared, lambda transport: Hierarchical(transport, job.ranks_of_hosts)]


def equal_numbers(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), "as numbers: 1 - 1 + -0.0 has a sign that depends on the order"


@given(jobs(SAME + MIXED))
@FEWER
def test_every_algorithm_gives_the_same_sums_of_whole_numbers(job: Job) -> None:
    """All dtypes, uneven and empty slices, 1 to 8 ranks on any hosts, several in flight, with and without a start."""
    if job.dtypes[0] != job.dtypes[1] and job.way[1] == "out in source":
        return
    for algorithm in [Ring, *algorithms_of(job)]:
        check(job, whole_numbers, algorithm, equal_numbers)


@given(jobs(SAME))
@FEWER
def test_shared_and_hierarchical_are_the_fold_in_rank_order_bit_for_bit(job: Job) -> None:
    for algorithm in algorithms_of(job)[1:]:
        check(job, awkward, algorithm, assert_same_bits)


@given(jobs(MIXED, [way for way in WAYS if way[1] == "out of its own"]))
@FEWER
def test_narrow_contributions_are_added_in_the_wide_accumulator(job: Job) -> None:
    for algorithm in algorithms_of(job)[1:]:
        check(job, awkward, algorithm, assert_same_bits)


@given(jobs(SAME))
@FEWER
@pytest.mark.full
def test_the_same_through_sockets_and_memory_that_cannot_be_written(job: Job) -> None:
    """Peers' memory is mapped read-only; some hosts share memory, with a network between them."""
    check(job, awkward, lambda transport: Shared(Transport(meet(transport))), assert_same_bits)
    hosts = job.ranks_of_hosts
    check(job, awkward, lambda transport: Hierarchical(routed(transport, hosts), hosts), assert_same_bits)


def test_a_contribution_of_private_memory_is_copied_to_where_peers_read() -> None:
    bounds = [0, 3, 5]

    def run(transport: Transport) -> tuple[list[float], list[float]]:
        collective = Shared(Transport(meet(transport)))
        rank = transport.rank
        out, whole = torch.empty(bounds[rank + 1] - bounds[rank]), torch.full((5,), float(rank))
        source = torch.full((5,), 1.0 + rank)
        collective.reduce_scatter(source, bounds, out, start=None, tag=Tag(Kind.REDUCE_SCATTER, "sum")).wait()
        collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole")).wait()
        return out.tolist(), whole.tolist()

    found = Loopback[tuple[list[float], list[float]]](2, timeout=20.0).run(run)
    assert found == [([3.0] * 3, [0.0] * 3 + [1.0] * 2), ([3.0] * 2, [0.0] * 3 + [1.0] * 2)]


@pytest.mark.parametrize("algorithm", [Pairwise, Shared], ids=lambda a: a.name)
def test_a_contribution_is_read_and_not_written_but_for_one_s_own_slice(algorithm: Algorithm) -> None:
    bounds = [0, 100, 250, 300]

    def run(transport: Transport) -> None:
        source = awkward(300, torch.float32, transport.rank)
        before, rank = source.clone(), transport.rank
        low, high = bounds[rank], bounds[rank + 1]
        tag = Tag(Kind.REDUCE_SCATTER, "sum")
        algorithm(transport).reduce_scatter(source, bounds, source[low:high], start=None, tag=tag).wait()
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all are done"))
        source[low:high] = before[low:high]
        assert_same_bits(source, before)

    Loopback[None](3, timeout=20.0, interfere=jitter(1)).run(run)


@pytest.mark.full
def test_a_thousand_collectives_in_flight_keep_their_order_and_their_memory_is_bounded() -> None:
    count, numel = 1000, 30
    bounds = [0, 10, 30]

    def run(transport: Transport) -> tuple[bool, int]:
        collective = Shared(Transport(meet(transport)))
        t, rank = collective.transport, transport.rank
        delays = random.Random(rank)
        size = bounds[rank + 1] - bounds[rank]
        jobs = []
        for number in range(count):
            source = t.scratch(numel, torch.float32, CPU).fill_(float(number + rank))
            out = torch.empty(size)
            tag = Tag(Kind.REDUCE_SCATTER, "sum", 1, number)
            jobs.append((collective.reduce_scatter(source, bounds, out, start=None, tag=tag), out))
            del source
            if delays.random() < 0.01:
                time.sleep(1e-3)
        right = True
        for number, (work, out) in enumerate(jobs):
            work.wait()
            right &= out.tolist() == [2.0 * number + 1] * size
        return right, t.pool.held_bytes

    for right, held in Loopback[tuple[bool, int]](2, timeout=20.0).run(run):
        assert right
        assert held == count * numel * 4


def test_an_exception_while_reading_ends_the_waits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails in the middle of its sum.

    The others have finished theirs, and wait until it has read their memory.
    """
    bounds = [0, 2, 5, 8]

    def failing(parts: Sequence[Tensor], out: Tensor) -> None:
        if out.numel() == 2:
            raise ZeroDivisionError("in the sum")
        ordered_sum(parts, out)

    monkeypatch.setattr(shared_module, "ordered_sum", failing)

    def run(transport: Transport) -> str:
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank])
        tag = Tag(Kind.REDUCE_SCATTER, "sum 7")
        with pytest.raises((CollectiveError, ZeroDivisionError)) as caught:
            Shared(transport).reduce_scatter(torch.ones(8), bounds, out, start=None, tag=tag).wait()
        return str(caught.value)

    begin = time.monotonic()
    first, *others = Loopback[str](3, timeout=60.0).run(run)
    assert time.monotonic() - begin < 10.0
    assert first == "in the sum"
    for error in others:
        assert re.search(r"in sum 7: rank \d failed: .*rank 0, while reading: ZeroDivisionError: in the sum", error)
