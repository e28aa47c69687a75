"""Every algorithm sums in rank order and gathers alike, whatever the splits, dtypes, hosts and delays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import ALGORITHMS, Algorithm, Hierarchical, Kind, Loopback, Pairwise, Ring, Shared, Tag, Transport

from ..support.carried import (
    CPU,
    MIXED,
    SAME,
    assert_same_bits,
    awkward,
    folded,
    jitter,
    plain_sum,
    splits,
    whole_numbers,
)
from ..support.late import LateLoopback
from ..support.rows import only
from ..support.sockets import meet, routed

pytestmark = pytest.mark.law("traffic")

WAYS = [
    ("no start", "out of its own"),
    ("start given", "out of its own"),
    ("start is out", "out of its own"),
    ("no start", "out in source"),
    ("start given", "out in source"),
]
"""Where the running sum is, and where the new one goes: a slice's owner may keep it inside the contribution."""
APART = WAYS[:3]  # the only ways in which contributions and sums may have different dtypes
FEW = 64  # elements of a chunk and of a block of a sum here, so that few elements make many
Hosts = Sequence[Sequence[int]]
MADE: dict[str, Callable[[Hosts], Algorithm]] = {
    "pairwise": lambda hosts: Pairwise,
    "shared": lambda hosts: Shared,
    "hierarchical": lambda hosts: lambda transport: Hierarchical(transport, hosts),
    "shared by sockets": lambda hosts: lambda transport: Shared(Transport(meet(transport))),
    "hierarchical by sockets": lambda hosts: lambda transport: Hierarchical(routed(transport, hosts), hosts),
    "all_to_all": lambda hosts: ALGORITHMS["all_to_all"],
    "ring": lambda hosts: Ring,
    "fold": lambda hosts: folded,
    "native": lambda hosts: ALGORITHMS["native"],
}
ROWS = [*MADE, *(f"{name}-narrow" for name in MADE if name != "native" and "sockets" not in name)]


def equal_numbers(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), "as numbers: 1 - 1 + -0.0 has a sign that depends on the order"


@pytest.mark.law("delays")
@pytest.mark.parametrize("row", only(ROWS, "shared", "ring", "native", "pairwise-narrow", "hierarchical-narrow"))
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_every_rank_has_the_sums_in_rank_order_and_the_gathered_whole(row: str, data: st.DataObject) -> None:
    """Bit for bit, but for a ring and the group's own sums, which are exact for whole numbers. Several reductions and
    gathers are in flight. Inputs are overwritten as soon as the wait allows it.

    Sums have many blocks and messages many chunks. By sockets, peers' memory is mapped read-only; some hosts share
    memory, with a network between them.
    """
    name, _, narrow = row.partition("-")
    make, equal = (whole_numbers, equal_numbers) if name in ("ring", "native") else (awkward, assert_same_bits)
    world_size = data.draw(st.integers(1, 8))
    bounds = data.draw(splits(world_size), "slices, uneven and empty ones")
    host_of = data.draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size), "host of each rank")
    hosts = [[r for r, h in enumerate(host_of) if h == host] for host in dict.fromkeys(host_of)]
    travel, total = data.draw(st.sampled_from(MIXED if narrow else SAME), "dtypes of contributions and sums")
    begins, ends = data.draw(st.sampled_from(APART if narrow else WAYS))
    numbers, seed = range(data.draw(st.integers(1, 4), "in flight")), data.draw(st.integers(0, 2**31), "seed")
    delays = data.draw(st.none() | st.integers(0, 1000), "delays")

    def contribution(number: int, rank: int) -> Tensor:
        return make(bounds[-1], travel, seed + 100 * number + rank)

    def start_of(number: int, rank: int) -> Tensor | None:
        numel = bounds[rank + 1] - bounds[rank]
        return None if begins == "no start" else make(numel, total, seed + 100 * number + rank + 50)

    def program(transport: Transport) -> list[Tensor]:
        collective = MADE[name](hosts)(transport)
        t, results = collective.transport, list[Tensor]()
        works, gathers = list[Any](), list[Any]()
        low, high = bounds[t.rank], bounds[t.rank + 1]
        for number in numbers:
            source = t.scratch(bounds[-1], travel, CPU).copy_(contribution(number, t.rank))
            out = source[low:high] if ends == "out in source" else t.scratch(high - low, total, CPU)
            start = start_of(number, t.rank)
            if start is not None and begins == "start is out":
                start = out.copy_(start)
            tag = Tag(Kind.REDUCE_SCATTER, "sums", number + 1, number)
            works.append((collective.reduce_scatter(source, bounds, out, start=start, tag=tag), source, out))
        for work, source, out in works:
            work.wait()
            results.append(out.clone())
            source.fill_(77.0)
            out.fill_(77.0)
        for number in numbers:
            whole = t.scratch(bounds[-1], total, CPU).fill_(66.0)
            whole[low:high] = results[number]
            tag = Tag(Kind.ALL_GATHER, "wholes", 1, number)
            gathers.append((collective.all_gather(whole, bounds, tag=tag), whole))
        for work, whole in gathers:
            work.wait()
            work.wait()
            results.append(whole.clone())
            whole.fill_(77.0)
        return results

    group: Loopback[list[Tensor]] = Loopback(world_size, interfere=None if delays is None else jitter(delays))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collectives.transport.CHUNK", FEW)
        patch.setattr("collectives.algorithms.ordered_sum.BLOCK", FEW)
        found = (LateLoopback(world_size) if name in ("all_to_all", "native") else group).run(program)
    for number in numbers:
        parts = [contribution(number, rank) for rank in range(world_size)]
        slices = [
            plain_sum(start_of(number, rank), [part[low:high] for part in parts], total)
            for rank, (low, high) in enumerate(itertools.pairwise(bounds))
        ]
        for rank, results in enumerate(found):
            equal(results[number], slices[rank])
            equal(results[len(numbers) + number], torch.cat(slices))
