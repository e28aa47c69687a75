"""Every algorithm sums in rank order and gathers alike, whatever the splits, dtypes, hosts, delays and groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    ALGORITHMS,
    Algorithm,
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Shared,
    Tag,
    Traffic,
    Transport,
    Work,
    broadcast,
    on_threads,
    ring_broadcast,
)
from collectives.broadcast import AHEAD
from collectives.messages import HEADER_BYTES, LABEL_BYTES, header_offset, with_offset

from ..support.carried import (
    CPU,
    MIXED,
    SAME,
    assert_same_bits,
    awkward,
    built,
    jitter,
    plain_sum,
    reduction,
    splits,
    whole_numbers,
)
from ..support.late import LateLoopback
from ..support.plain import assert_same_value
from ..support.rows import only
from ..support.sockets import meet, routed

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
    **{name: partial(built, name) for name in ALGORITHMS},
    "shared by sockets": lambda hosts: lambda transport: Shared(Transport(meet(transport))),
    "hierarchical by sockets": lambda hosts: lambda transport: Hierarchical(routed(transport, hosts), hosts),
}
ROWS = [*MADE, *(f"{name}-narrow" for name in MADE if name != "native" and "sockets" not in name)]


def equal_numbers(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), "as numbers: 1 - 1 + -0.0 has a sign that depends on the order"


@pytest.mark.law("rank order")
@pytest.mark.law("traffic")
@pytest.mark.law("delays")
@pytest.mark.parametrize("row", only(ROWS, "shared", "ring", "native", "pairwise-narrow", "hierarchical-narrow"))
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_every_rank_has_the_sums_in_rank_order_and_the_gathered_whole(row: str, data: st.DataObject) -> None:
    """Bit for bit, but for a ring and the group's own sums, which are exact for whole numbers. Any NaN is one."""
    name, _, narrow = row.partition("-")
    make, equal = (whole_numbers, equal_numbers) if name in ("ring", "native") else (awkward, assert_same_bits)
    equal = partial(assert_same_value, what="a sum", any_nan=True) if narrow and equal is assert_same_bits else equal
    world_size = data.draw(st.integers(1, 8))
    bounds = data.draw(splits(world_size), "slices, uneven and empty ones")
    host_of = data.draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size), "host of each rank")
    hosts = [[r for r, h in enumerate(host_of) if h == host] for host in dict.fromkeys(host_of)]
    travel, total = data.draw(st.sampled_from(MIXED if narrow else SAME), "dtypes of contributions and sums")
    begins, ends = data.draw(st.sampled_from(APART if narrow else WAYS))
    numbers, seed = range(data.draw(st.integers(1, 4), "in flight")), data.draw(st.integers(0, 2**31), "seed")
    delays = data.draw(st.none() | st.integers(0, 1000), "delays")
    orders = data.draw(st.lists(st.permutations(numbers), min_size=world_size, max_size=world_size), "of waits")

    def contribution(number: int, rank: int) -> Tensor:
        return make(bounds[-1], travel, seed + 100 * number + rank)

    def start_of(number: int, rank: int) -> Tensor | None:
        numel = bounds[rank + 1] - bounds[rank]
        return None if begins == "no start" else make(numel, total, seed + 100 * number + rank + 50)

    def program(transport: Transport) -> dict[int, Tensor]:
        collective = MADE[name](hosts)(transport)
        t, results = collective.transport, dict[int, Tensor]()
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
        for number in orders[t.rank] if name == "pairwise" else numbers:
            work, source, out = works[number]
            work.wait()
            results[number] = out.clone()
            source.fill_(77.0)
            out.fill_(77.0)
        for number in numbers:
            whole = t.scratch(bounds[-1], total, CPU).fill_(66.0)
            whole[low:high] = results[number]
            tag = Tag(Kind.ALL_GATHER, "wholes", 1, number)
            gathers.append((collective.all_gather(whole, bounds, tag=tag), whole))
        for number, (work, whole) in enumerate(gathers):
            work.wait()
            work.wait()
            results[len(numbers) + number] = whole.clone()
            whole.fill_(77.0)
        return results

    group: Loopback[dict[int, Tensor]] = Loopback(world_size, interfere=None if delays is None else jitter(delays))
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_half_a_sum_is_no_sum_on_any_rank(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: Any, out: Any) -> None:
        raise error("in the middle")

    def program(transport: Transport) -> str:
        work = Pairwise(transport).reduce_scatter(
            torch.ones(4), [0, 2, 4], torch.empty(2), start=None, tag=Tag(Kind.REDUCE_SCATTER, "bucket 0")
        )
        with pytest.raises(error):
            work.wait()
        with pytest.raises(CollectiveError) as caught:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "later"))
        transport.abort("another reason")
        with pytest.raises(CollectiveError, match="while adding up"):
            transport.check()
        return str(caught.value)

    monkeypatch.setattr("collectives.algorithms.pairwise.ordered_sum", fail)
    for rank, message in enumerate(on_threads(2, program)):
        assert f"rank {rank}, while adding up: {error.__name__}: in the middle" in message


def test_only_flat_tensors_travel() -> None:
    transport = Loopback[None](2).transports[0]
    for tensor in (torch.zeros(2, 2), torch.zeros(()), torch.zeros(4)[::2]):
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.isend(tensor, 1, reduction())
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.irecv(tensor, 1, reduction())
    assert transport.traffic == Traffic()
    with pytest.raises(ValueError, match=r"rank 0 is not one of the group's ranks \["):
        transport.split([1])


int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=100) | st.text("aé漢🙂", min_size=20, max_size=60)
tags = st.builds(Tag, st.sampled_from(Kind), labels, int64, int32, int64)


@given(tags, int64)
def test_a_tag_survives_the_wire_but_for_a_long_labels_end(tag: Tag, size: int) -> None:
    header = with_offset(tag.pack(size), 7)
    assert len(header) == HEADER_BYTES
    found, found_size = Tag.unpack(header)
    assert header_offset(header) == 7
    assert found_size == size
    assert (found.kind, found.round, found.index, found.digest) == (tag.kind, tag.round, tag.index, tag.digest)
    assert tag.same(found)
    assert found.same(tag)
    assert tag.label.startswith(found.label)
    if found.label != tag.label:
        assert len(found.label.encode()) <= LABEL_BYTES
        assert len(tag.label[: len(found.label) + 1].encode()) > LABEL_BYTES, "one more character would not fit"


CHUNK = 1 << 10  # bytes of a chunk here
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5]
TAG = Tag(Kind.BROADCAST, "rank 0's values", 3)


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "CHUNK", CHUNK)
        yield


def values(nbytes: int, rank: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.law("traffic")
@given(
    world_size=st.integers(1, 6),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    seed=st.none() | st.integers(0, 1000),
)
@example(2, SIZES, None)
def test_every_rank_has_rank_0s_bytes_and_sends_each_at_most_once(
    world_size: int, sizes: list[int], seed: int | None
) -> None:
    def program(transport: Transport) -> Traffic:
        before, mine = transport.traffic, [values(nbytes, transport.rank) for nbytes in sizes]
        ring_broadcast(transport, mine, TAG)
        assert all(torch.equal(ours, values(nbytes, 0)) for ours, nbytes in zip(mine, sizes, strict=True))
        return transport.traffic - before

    group = Loopback[Traffic](world_size, interfere=None if seed is None else jitter(seed))
    last, messages = world_size - 1, sum(max(1, -(-nbytes // CHUNK)) for nbytes in sizes)
    for rank, traffic in enumerate(group.run(program)):
        assert traffic.payload_sent == (sum(sizes) if rank < last else 0)
        assert traffic.payload_received == (sum(sizes) if rank else 0)
        assert traffic.messages == last + (messages if rank < last else 0), "a header to each rank, and the chunks"
        assert traffic.control_sent == HEADER_BYTES * traffic.messages


def test_few_chunks_are_under_way_however_large_the_tensor_is() -> None:
    """A backend may copy what is under way; the tensor itself is copied nowhere."""

    def program(transport: Transport) -> list[int]:
        most = [0, 0]

        def counting(number: int, call: Callable[..., Work]) -> Callable[..., Work]:
            under_way = set[int]()

            def begin(tensor: Tensor, *given: Any, **named: Any) -> Work:
                assert tensor.numel() <= CHUNK
                assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                work, address = call(tensor, *given, **named), tensor.data_ptr()
                under_way.add(address)
                most[number] = max(most[number], len(under_way))
                return SimpleNamespace(wait=lambda: (work.wait(), under_way.discard(address)))

            return begin

        buffer = values(9 * CHUNK, transport.rank)
        transport.isend = counting(0, transport.isend)  # type: ignore[method-assign]
        transport.irecv = counting(1, transport.irecv)  # type: ignore[method-assign]
        ring_broadcast(transport, [buffer], TAG)
        return most

    ahead = AHEAD + 1
    assert Loopback[list[int]](4).run(program) == [[ahead, 0], [ahead, AHEAD], [ahead, AHEAD], [0, AHEAD]]
