"""Collectives over the threads of one process: what they compute, what they send, and how they fail."""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    ALGORITHMS,
    Algorithm,
    BucketQueue,
    Chain,
    CollectiveError,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    PeerError,
    Ring,
    Tag,
    Traffic,
    Transport,
    Work,
    on_threads,
    solo,
)
from collectives.fold import BLOCK
from collectives.memory import SLACK, SPARE, Pool
from collectives.messages import HEADER_BYTES, LABEL_BYTES

T = TypeVar("T")
CPU = torch.device("cpu")
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SAME = [(dtype, dtype) for dtype in (FP64, FP32, BF16, FP16)]
MIXED = [(BF16, FP32), (FP16, FP32), (FP32, FP64)]
BOTH = pytest.mark.parametrize("algorithm", [Pairwise, Ring])
SOON = 10.0  # seconds in which an error must have come, under a time limit of 60: it was told, not waited for
PATIENT = 60.0
FEWER = settings(max_examples=settings().max_examples // 3)  # of the profile: each example starts threads

world_sizes = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)


def reduction(label: str = "bucket 0", round_: int = 0, index: int = 0, digest: int = 0) -> Tag:
    return Tag(Kind.REDUCE_SCATTER, label, round_, index, digest)


def splits(world_size: int) -> st.SearchStrategy[list[int]]:
    """Bounds of a flat tensor, uneven and with empty slices."""
    sizes = st.lists(st.sampled_from([0, 0, 1, 3, 16, 64, 257]), min_size=world_size, max_size=world_size)
    return sizes.map(lambda drawn: list(itertools.accumulate(drawn, initial=0)))


split_groups = world_sizes.flatmap(splits)


def awkward(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Mixed magnitudes and signs, zeros of both signs, subnormals, the largest number, infinities and NaN. Every
    seventh is -0.0 whatever the seed, so that ranks add nothing but these: their sum is -0.0."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    exponents = torch.randint(-12, 12, (numel,), generator=generator, dtype=FP64)
    plain = (torch.randn(numel, generator=generator, dtype=FP64) * 2**exponents).to(dtype)
    special = torch.tensor(
        [-0.0, 0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, -info.tiny / 4], dtype=FP64
    ).to(dtype)
    chosen = special[torch.randint(0, len(special), (numel,), generator=generator)]
    mixed = torch.where(torch.rand(numel, generator=generator) < 0.3, chosen, plain)
    mixed[::7] = -0.0
    return mixed


def whole_numbers(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small enough that every sum of nine is exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, (numel,), generator=generator).to(dtype)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    different = ours.contiguous().view(torch.uint8) != theirs.contiguous().view(torch.uint8)
    assert not different.any(), f"{ours} is not {theirs}"


def plain_sum(start: Tensor | None, contributions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The loop of a single process: the first is taken as it is, the others are added one by one."""
    parts = [*([] if start is None else [start]), *contributions]
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def each(group: Loopback[Any], program: Callable[[Transport], T]) -> list[T | CollectiveError]:
    """What each rank returned, or the collective error that it raised."""

    def guarded(transport: Transport) -> T | CollectiveError:
        try:
            return program(transport)
        except CollectiveError as error:
            return error

    return group.run(guarded)


def jitter(seed: int) -> Callable[[int, str, int], None]:
    """Random delays, which no result may depend on."""
    sources = [random.Random(seed + rank) for rank in range(8)]

    def interfere(rank: int, event: str, peer: int) -> None:
        if sources[rank].random() < 0.3:
            time.sleep(sources[rank].random() * 1e-3)

    return interfere


# -- reduce-scatter ----------------------------------------------------------------------------------------------------

WAYS = [
    ("no start", "out of its own"),
    ("no start", "out in source"),
    ("start given", "out of its own"),
    ("start given", "out in source"),
    ("start is out", "out of its own"),
]
"""Where the running sum is, and where the new one goes: a slice's owner may keep it inside the contribution."""


def reduce_scattered(
    algorithm: Algorithm,
    bounds: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    way: tuple[str, str],
    contributions: list[Tensor],
    starts: list[Tensor],
) -> list[Tensor]:
    """Each rank's sum, by ``algorithm``."""

    def program(transport: Transport) -> Tensor:
        low, high = bounds[transport.rank], bounds[transport.rank + 1]
        source = contributions[transport.rank].clone()
        out = source[low:high] if way[1] == "out in source" else torch.full((high - low,), 77.0, dtype=dtypes[1])
        start = None
        if way[0] != "no start":
            start = starts[transport.rank].clone()
            if way[0] == "start is out":
                start = out.copy_(start)
        work = algorithm(transport).reduce_scatter(source, bounds, out, start=start, tag=reduction())
        work.wait()
        first = out.clone()
        work.wait()
        assert_same_bits(out, first)
        return out

    return on_threads(len(bounds) - 1, program)


def expected_sums(
    bounds: list[int], dtype: torch.dtype, way: tuple[str, str], contributions: list[Tensor], starts: list[Tensor]
) -> list[Tensor]:
    return [
        plain_sum(None if way[0] == "no start" else starts[rank], [x[low:high] for x in contributions], dtype)
        for rank, (low, high) in enumerate(itertools.pairwise(bounds))
    ]


def drawn_inputs(
    make: Callable[[int, torch.dtype, int], Tensor],
    bounds: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """A contribution and a running sum for each rank."""
    ranks = range(len(bounds) - 1)
    contributions = [make(bounds[-1], dtypes[0], seed + rank) for rank in ranks]
    return contributions, [make(bounds[r + 1] - bounds[r], dtypes[1], seed + 100 + r) for r in ranks]


@pytest.mark.parametrize("way", WAYS)
@given(bounds=split_groups, dtypes=st.sampled_from(SAME), seed=seeds)
@FEWER
def test_pairwise_is_the_fold_in_rank_order_bit_for_bit(
    way: tuple[str, str], bounds: list[int], dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    contributions, starts = drawn_inputs(awkward, bounds, dtypes, seed)
    sums = reduce_scattered(Pairwise, bounds, dtypes, way, contributions, starts)
    for ours, plain in zip(sums, expected_sums(bounds, dtypes[1], way, contributions, starts), strict=True):
        assert_same_bits(ours, plain)


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] == "out of its own"])
@given(bounds=split_groups, dtypes=st.sampled_from(MIXED), seed=seeds)
@FEWER
def test_pairwise_adds_narrow_contributions_in_the_wide_accumulator(
    way: tuple[str, str], bounds: list[int], dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    contributions, starts = drawn_inputs(awkward, bounds, dtypes, seed)
    sums = reduce_scattered(Pairwise, bounds, dtypes, way, contributions, starts)
    for ours, plain in zip(sums, expected_sums(bounds, dtypes[1], way, contributions, starts), strict=True):
        assert_same_bits(ours, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("way", WAYS)
def test_the_fold_s_blocks_are_not_seen(world_size: int, way: tuple[str, str]) -> None:
    bounds = [0, *(2 * BLOCK + 3 + rank for rank in range(world_size))]
    contributions, starts = drawn_inputs(awkward, bounds, (FP32, FP32), 5)
    sums = reduce_scattered(Pairwise, bounds, (FP32, FP32), way, contributions, starts)
    for ours, plain in zip(sums, expected_sums(bounds, FP32, way, contributions, starts), strict=True):
        assert_same_bits(ours, plain)


@given(world_size=world_sizes, seed=seeds)
def test_pairwise_is_what_autograd_accumulates(world_size: int, seed: int) -> None:
    contributions = [awkward(64, FP32, seed + rank) for rank in range(world_size)]
    parameter = torch.zeros(64, requires_grad=True)
    for contribution in contributions:
        torch.autograd.backward(parameter, contribution.clone())
    bounds = [0, *[64] * world_size]
    sums = reduce_scattered(Pairwise, bounds, (FP32, FP32), WAYS[0], contributions, [])
    assert parameter.grad is not None
    assert_same_bits(sums[0], parameter.grad)


@pytest.mark.parametrize("way", WAYS)
@given(bounds=split_groups, dtypes=st.sampled_from(SAME), seed=seeds)
@FEWER
def test_ring_equals_pairwise_where_sums_are_exact(
    way: tuple[str, str], bounds: list[int], dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    contributions, starts = drawn_inputs(whole_numbers, bounds, dtypes, seed)
    ours = reduce_scattered(Ring, bounds, dtypes, way, contributions, starts)
    theirs = reduce_scattered(Pairwise, bounds, dtypes, way, contributions, starts)
    for ring, pairwise in zip(ours, theirs, strict=True):
        assert torch.equal(ring, pairwise), "as numbers: 1 - 1 + -0.0 has a sign that depends on the order"


@given(bounds=split_groups, seed=seeds)
def test_ring_stays_within_the_bound_of_a_sum_in_any_order(bounds: list[int], seed: int) -> None:
    """(W - 1) 2^-24 sum |x|: the bound of W - 1 roundings to fp32, which holds in every order."""
    world_size = len(bounds) - 1
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(bounds[-1], generator=generator) for _ in range(world_size)]
    sums = reduce_scattered(Ring, bounds, (FP32, FP32), WAYS[0], contributions, [])
    columns = zip(*(x.tolist() for x in contributions), strict=True)
    for ours, column in zip(torch.cat(sums).tolist(), columns, strict=True):
        exact = math.fsum(column)
        assert abs(ours - exact) <= (world_size - 1) * 2.0**-24 * math.fsum(map(abs, column))


def test_only_the_algorithm_that_folds_calls_itself_exact() -> None:
    """A sum whose bits depend on the order: 1 + 2^-24 is 1, but 2^-24 + 2^-24 is not nothing."""
    contributions = [torch.full((3,), value) for value in (1.0, 2.0**-24, 2.0**-24)]
    for algorithm, folds in ((Pairwise, True), (Ring, False)):
        sums = torch.cat(reduce_scattered(algorithm, [0, 1, 2, 3], (FP32, FP32), WAYS[0], contributions, []))
        assert bool((sums == 1.0).all()) == folds
        assert algorithm.exact == folds


# -- all-gather --------------------------------------------------------------------------------------------------------


@BOTH
@given(bounds=split_groups, dtype=st.sampled_from([FP64, FP32, BF16, FP16]), seed=seeds)
@FEWER
def test_all_gather_puts_every_slice_in_its_place(
    algorithm: Algorithm, bounds: list[int], dtype: torch.dtype, seed: int
) -> None:
    whole = awkward(bounds[-1], dtype, seed)

    def program(transport: Transport) -> Tensor:
        low, high = bounds[transport.rank], bounds[transport.rank + 1]
        buffer = torch.full((bounds[-1],), 77.0, dtype=dtype)
        buffer[low:high] = whole[low:high]
        work = algorithm(transport).all_gather(buffer, bounds, tag=Tag(Kind.ALL_GATHER, "bucket 0"))
        work.wait()
        work.wait()
        return buffer

    for buffer in on_threads(len(bounds) - 1, program):
        assert_same_bits(buffer, whole)


# -- traffic -----------------------------------------------------------------------------------------------------------


def total(traffics: Sequence[Traffic]) -> Traffic:
    return Traffic(*(sum(values) for values in zip(*(tuple(vars(t).values()) for t in traffics), strict=True)))


@BOTH
@given(bounds=split_groups, dtype=st.sampled_from([FP64, FP32, BF16]))
@FEWER
def test_each_collective_sends_one_pass_of_payload(algorithm: Algorithm, bounds: list[int], dtype: torch.dtype) -> None:
    """(W - 1) n elements summed over ranks, whatever the split; headers are counted apart."""
    world_size, numel = len(bounds) - 1, bounds[-1]

    def program(transport: Transport) -> tuple[Traffic, Traffic]:
        collective = algorithm(transport)
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank], dtype=dtype)
        collective.reduce_scatter(torch.ones(numel, dtype=dtype), bounds, out, start=None, tag=reduction()).wait()
        between = transport.traffic
        collective.all_gather(torch.ones(numel, dtype=dtype), bounds, tag=Tag(Kind.ALL_GATHER, "bucket 0")).wait()
        return between, transport.traffic - between

    for traffic in map(total, zip(*on_threads(world_size, program), strict=True)):
        assert traffic.payload_sent == traffic.payload_received == (world_size - 1) * numel * dtype.itemsize
        assert traffic.control_sent == traffic.control_received == HEADER_BYTES * traffic.messages


def test_pairwise_sends_all_but_its_own_slice() -> None:
    bounds = [0, 5, 5, 12]

    def program(transport: Transport) -> Traffic:
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank])
        Pairwise(transport).reduce_scatter(torch.ones(12), bounds, out, start=None, tag=reduction()).wait()
        return transport.traffic

    traffics = on_threads(3, program)
    assert [t.payload_sent for t in traffics] == [4 * 7, 4 * 12, 4 * 5]
    assert [t.payload_received for t in traffics] == [4 * 5 * 2, 0, 4 * 7 * 2]
    assert [t.messages for t in traffics] == [2, 2, 2]


def test_an_exchange_is_control_traffic() -> None:
    def program(transport: Transport) -> Traffic:
        transport.exchange(b"x" * (10 + transport.rank), Tag(Kind.EXCHANGE, "step()"))
        return transport.traffic

    first, second = on_threads(2, program)
    assert first == Traffic(0, 0, HEADER_BYTES + 10, HEADER_BYTES + 11, 1)
    assert second == Traffic(0, 0, HEADER_BYTES + 11, HEADER_BYTES + 10, 1)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_single_rank_sends_nothing(name: str) -> None:
    transport = solo()
    collective = ALGORITHMS[name](transport)
    out = torch.tensor([10.0, 20.0])
    collective.reduce_scatter(torch.tensor([1.0, 2.0]), [0, 2], out, start=out, tag=reduction()).wait()
    collective.all_gather(out, [0, 2], tag=Tag(Kind.ALL_GATHER, "bucket 0")).wait()
    assert out.tolist() == [11.0, 22.0]
    assert transport.exchange(b"mine", Tag(Kind.EXCHANGE, "step()")) == [b"mine"]
    assert transport.meet(Tag(Kind.MEET, "step()", 3), lambda: pytest.fail("nobody is ahead")).round == 3
    assert transport.fork().rank == 0
    assert transport.traffic == Traffic()


def test_native_says_that_it_needs_a_process_group() -> None:
    for result in each(Loopback(2), ALGORITHMS["native"]):
        assert isinstance(result, CollectiveError)
        assert "torch.distributed process group" in str(result)


# -- several at once, and late -----------------------------------------------------------------------------------------


def rounds_of_buckets(algorithm: Algorithm, transport: Transport, seed: int, in_flight: int) -> list[Tensor]:
    """Three rounds of reductions of four buckets, then their gathers; at most ``in_flight`` under way."""
    collective = algorithm(transport)
    edges = torch.arange(transport.world_size + 1)
    results = []
    for round_ in range(3):
        wholes: list[tuple[Tensor, list[int]]] = []
        works: list[Work] = []
        for bucket in range(4):
            bounds = (edges * (7 * bucket + round_)).tolist()
            source = whole_numbers(bounds[-1], FP32, seed + 31 * round_ + 7 * bucket + transport.rank)
            whole = torch.zeros(bounds[-1])
            own = whole[bounds[transport.rank] : bounds[transport.rank + 1]]
            tag = reduction(f"bucket {bucket}", round_, bucket)
            if len(works) >= in_flight:
                works.pop(0).wait()
            works.append(collective.reduce_scatter(source, bounds, own, start=None, tag=tag))
            wholes.append((whole, bounds))
        Chain(works).wait()
        gathers = [
            collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "parameters", round_, bucket))
            for bucket, (whole, bounds) in enumerate(wholes)
        ]
        Chain(gathers).wait()
        results += [whole for whole, _ in wholes]
    return results


@BOTH
@given(world_size=world_sizes, seed=st.integers(0, 1000), in_flight=st.integers(1, 5), delays=st.booleans())
@FEWER
def test_neither_delays_nor_the_number_in_flight_change_a_result(
    algorithm: Algorithm, world_size: int, seed: int, in_flight: int, delays: bool
) -> None:
    group = Loopback[list[Tensor]](world_size, interfere=jitter(seed) if delays else None)
    results = group.run(lambda transport: rounds_of_buckets(algorithm, transport, seed, in_flight))
    number = itertools.count()
    for round_, bucket in itertools.product(range(3), range(4)):
        numel = world_size * (7 * bucket + round_)
        parts = [whole_numbers(numel, FP32, seed + 31 * round_ + 7 * bucket + rank) for rank in range(world_size)]
        here = next(number)
        for rank in range(world_size):
            assert torch.equal(results[rank][here], plain_sum(None, parts, FP32))


@given(
    orders=st.integers(2, 5).flatmap(lambda w: st.lists(st.permutations(range(4)), min_size=w, max_size=w)),
    seed=st.integers(0, 1000),
)
def test_direct_exchanges_may_be_waited_for_in_any_order(orders: list[list[int]], seed: int) -> None:
    world_size = len(orders)
    bounds = [5 * rank for rank in range(world_size + 1)]

    def program(transport: Transport) -> list[Tensor]:
        outs = [torch.empty(5) for _ in range(4)]
        works = [
            Pairwise(transport).reduce_scatter(
                torch.full((bounds[-1],), 10.0**index + transport.rank),
                bounds,
                out,
                start=None,
                tag=reduction(index=index),
            )
            for index, out in enumerate(outs)
        ]
        for index in orders[transport.rank]:
            works[index].wait()
        return outs

    for outs in on_threads(world_size, program):
        for index, out in enumerate(outs):
            assert out.tolist() == [world_size * 10.0**index + sum(range(world_size))] * 5


def test_a_tensor_that_is_overwritten_before_the_wait_is_seen() -> None:
    """The threads are as late as a network is allowed to be."""
    overwritten = threading.Barrier(2)

    def program(transport: Transport) -> Tensor:
        tensor = torch.zeros(3)
        if transport.rank == 0:
            work = transport.isend(tensor, 1, reduction())
            tensor.fill_(7.0)
            overwritten.wait()
        else:
            work = transport.irecv(tensor, 0, reduction())
            overwritten.wait()
        work.wait()
        return tensor

    assert on_threads(2, program)[1].tolist() == [7.0, 7.0, 7.0]


def test_a_tensor_that_is_read_before_the_wait_is_old() -> None:
    posted, looked = threading.Barrier(2), threading.Barrier(2)

    def program(transport: Transport) -> list[float]:
        tensor = torch.full((1,), 1.0 + transport.rank)
        if transport.rank == 0:
            work = transport.isend(tensor, 1, reduction())
        else:
            work = transport.irecv(tensor, 0, reduction())
        posted.wait()
        early = tensor.item()
        looked.wait()
        work.wait()
        return [early, tensor.item()]

    assert on_threads(2, program) == [[1.0, 1.0], [2.0, 1.0]]


def test_only_flat_tensors_travel() -> None:
    transport = Loopback[None](2).transports[0]
    for tensor in (torch.zeros(2, 2), torch.zeros(()), torch.zeros(4)[::2]):
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.isend(tensor, 1, reduction())
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.irecv(tensor, 1, reduction())
    assert transport.traffic == Traffic()


# -- exchange ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=300), min_size=2, max_size=2), min_size=1, max_size=8))
def test_exchange_gives_every_rank_all_bytes_in_rank_order(data: list[list[bytes]]) -> None:
    def program(transport: Transport) -> list[list[bytes]]:
        mine = data[transport.rank]
        return [transport.exchange(mine[i], Tag(Kind.EXCHANGE, "step()", index=i)) for i in range(2)]

    for first, second in on_threads(len(data), program):
        assert first == [pair[0] for pair in data]
        assert second == [pair[1] for pair in data]


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange_and_meet_are_possible_while_a_collective_is_under_way(world_size: int) -> None:
    bounds = [2 * rank for rank in range(world_size + 1)]

    def program(transport: Transport) -> tuple[list[bytes], int, list[float]]:
        out = torch.empty(2)
        work = Pairwise(transport).reduce_scatter(
            torch.ones(bounds[-1]), bounds, out, start=None, tag=reduction(round_=1)
        )
        met = transport.meet(Tag(Kind.MEET, "step()", 1), lambda: pytest.fail("nobody is ahead"))
        data = transport.exchange(bytes([transport.rank]), Tag(Kind.EXCHANGE, "step()", 1))
        work.wait()
        return data, met.round, out.tolist()

    expected = ([bytes([rank]) for rank in range(world_size)], 1, [float(world_size)] * 2)
    assert on_threads(world_size, program) == [expected] * world_size


# -- groups ------------------------------------------------------------------------------------------------------------


def gathered_ranks(transport: Transport, label: str) -> list[float]:
    """An all-gather of everybody's rank in the group, as proof that a group works."""
    buffer = torch.full((transport.world_size,), float(transport.rank))
    tag = Tag(Kind.ALL_GATHER, label)
    Pairwise(transport).all_gather(buffer, range(transport.world_size + 1), tag=tag).wait()
    return buffer.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_forked_channels_do_not_mix(world_size: int) -> None:
    """Ranks use three channels in different orders, which on one channel would be a mismatch."""
    bounds = list(range(world_size + 1))

    def program(transport: Transport) -> list[float]:
        channels = [transport, transport.fork(), transport.fork()]
        outs = [torch.empty(1) for _ in channels]
        order = [(i + transport.rank) % 3 for i in range(3)]
        works = {
            i: Pairwise(channels[i]).reduce_scatter(
                torch.full((world_size,), 10.0**i), bounds, outs[i], start=None, tag=reduction(f"user {i}")
            )
            for i in order
        }
        for i in reversed(order):
            works[i].wait()
        return [out.item() for out in outs]

    expected = [world_size * 10.0**i for i in range(3)]
    assert on_threads(world_size, program) == [expected] * world_size


def test_a_failure_of_one_channel_leaves_the_group_whole() -> None:
    def program(transport: Transport) -> list[float]:
        channel = transport.fork()
        with pytest.raises(CollectiveError):
            channel.exchange(b"", Tag(Kind.EXCHANGE, f"call {transport.rank}"))
        return gathered_ranks(transport, "parent") + gathered_ranks(transport.fork(), "another")

    assert on_threads(2, program) == [[0.0, 1.0, 0.0, 1.0]] * 2


@pytest.mark.parametrize("ranks", [[1, 3], [3, 1], [3, 0, 2], [2], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_a_part_of_a_group_has_ranks_of_its_own(ranks: list[int]) -> None:
    """In the order that was asked for, while the whole group is at work."""
    contributions = [awkward(8 * len(ranks), FP32, rank) for rank in range(4)]
    bounds = [8 * i for i in range(len(ranks) + 1)]

    def program(transport: Transport) -> tuple[int, Tensor, list[float]] | None:
        out = torch.empty(1)
        above = Pairwise(transport).reduce_scatter(
            torch.ones(4), range(5), out, start=None, tag=reduction("the whole group")
        )
        result = None
        if transport.rank in ranks:
            part = transport.split(ranks)
            own = torch.empty(8)
            source = contributions[transport.rank].clone()
            Pairwise(part).reduce_scatter(source, bounds, own, start=None, tag=reduction("the part")).wait()
            assert part.world_size == len(ranks)
            result = part.rank, own, gathered_ranks(part, "the part")
        above.wait()
        assert out.item() == 4.0
        return result

    results = on_threads(4, program)
    for group_rank, rank in enumerate(ranks):
        found = results[rank]
        assert found is not None
        assert found[0] == group_rank
        low = bounds[group_rank]
        assert_same_bits(found[1], plain_sum(None, [contributions[r][low : low + 8] for r in ranks], FP32))
        assert found[2] == [float(i) for i in range(len(ranks))]


def test_parts_of_parts_count_from_their_parent() -> None:
    def program(transport: Transport) -> list[float] | None:
        if transport.rank not in (1, 3, 4):
            return None
        part = transport.split([4, 3, 1])
        return gathered_ranks(part.split([2, 0]), "inner") if part.rank in (0, 2) else None

    assert on_threads(5, program) == [None, [0.0, 1.0], None, None, [0.0, 1.0]]


def test_channels_of_one_part_do_not_mix() -> None:
    def program(transport: Transport) -> list[float]:
        first, second = transport.split([1, 0], 0), transport.split([1, 0], 1)
        pair = (first, second) if transport.rank else (second, first)
        outs = {part: torch.empty(1) for part in pair}
        works = [
            Pairwise(part).reduce_scatter(
                torch.ones(2), [0, 1, 2], outs[part], start=None, tag=reduction("ab"[part is second])
            )
            for part in pair
        ]
        Chain(works).wait()
        return [outs[first].item(), outs[second].item()]

    assert on_threads(2, program) == [[2.0, 2.0]] * 2


def test_who_is_not_in_a_part_cannot_open_it() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is not one of the group's ranks \[1, 3\]"):
        Loopback[None](4).transports[0].split([1, 3])


# -- mismatches --------------------------------------------------------------------------------------------------------

OTHER_TAGS = [
    Tag(Kind.ALL_GATHER, "the first", 3, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the second", 3, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 2, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 3, 6, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 6),
]


@BOTH
@pytest.mark.parametrize("other", OTHER_TAGS)
def test_ranks_in_different_collectives_both_learn_of_both(algorithm: Algorithm, other: Tag) -> None:
    tags = [Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 5), other]

    def program(transport: Transport) -> None:
        collective, tag = algorithm(transport), tags[transport.rank]
        if tag.kind is Kind.ALL_GATHER:
            collective.all_gather(torch.ones(4), [0, 2, 4], tag=tag).wait()
        else:
            collective.reduce_scatter(torch.ones(4), [0, 2, 4], torch.empty(2), start=None, tag=tag).wait()

    begin = time.monotonic()
    errors = each(Loopback(2, timeout=PATIENT), program)
    assert time.monotonic() - begin < SOON
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError), error
        for who in (rank, 1 - rank):
            tag = tags[who]
            said = f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"
            assert f"rank {who} is in {said}" in str(error)


@BOTH
def test_ranks_with_different_sizes_both_learn_of_both(algorithm: Algorithm) -> None:
    def program(transport: Transport) -> None:
        size = 2 + transport.rank
        tag = reduction("bucket 7")
        algorithm(transport).reduce_scatter(
            torch.ones(2 * size), [0, size, 2 * size], torch.empty(size), start=None, tag=tag
        ).wait()

    first, second = each(Loopback(2, timeout=PATIENT), program)
    assert isinstance(first, MismatchError)
    assert isinstance(second, MismatchError)
    assert "bucket 7" in str(first)
    assert "(8 and 12 bytes)" in str(first)
    assert "(12 and 8 bytes)" in str(second)


@BOTH
@pytest.mark.parametrize("bounds", [[0, 0, 4], [0, 4, 4]])
def test_a_mismatch_is_found_where_slices_are_empty(algorithm: Algorithm, bounds: list[int]) -> None:
    def program(transport: Transport) -> None:
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank])
        tag = reduction(f"bucket {transport.rank}")
        algorithm(transport).reduce_scatter(torch.ones(4), bounds, out, start=None, tag=tag).wait()

    for error in each(Loopback(2, timeout=PATIENT), program):
        assert isinstance(error, MismatchError), error


def test_a_mismatch_of_one_rank_reaches_all() -> None:
    def program(transport: Transport) -> None:
        tag = Tag(Kind.EXCHANGE, "clip" if transport.rank == 2 else "step()")
        transport.exchange(b"", tag)

    errors = each(Loopback(4, timeout=PATIENT), program)
    assert all(isinstance(error, (MismatchError, PeerError)) for error in errors)
    assert all("clip [exchange" in str(error) and "step() [exchange" in str(error) for error in errors)


def test_a_mismatch_ends_the_waits_of_ranks_that_had_no_part_in_it() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 2:
            transport.irecv(torch.empty(1), 0, reduction("for later")).wait()
        other = 1 - transport.rank
        tag = reduction(f"bucket {transport.rank}")
        Chain([transport.irecv(torch.empty(1), other, tag), transport.isend(torch.ones(1), other, tag)]).wait()

    begin = time.monotonic()
    group = Loopback[None](3, timeout=PATIENT)
    *two, third = each(group, program)
    assert time.monotonic() - begin < SOON
    assert all(isinstance(error, MismatchError) for error in two)
    assert isinstance(third, PeerError)
    assert "rank 0 failed: rank 0 is in bucket 0" in str(third)
    for transport in group.transports:
        with pytest.raises(CollectiveError, match="this communicator is closed"):
            transport.fork()


# -- failures ----------------------------------------------------------------------------------------------------------


def _in_reduce_scatter(algorithm: Algorithm) -> Callable[[Transport], Any]:
    def wait(transport: Transport) -> None:
        bounds = [2 * rank for rank in range(transport.world_size + 1)]
        source, out = torch.ones(bounds[-1]), torch.empty(2)
        algorithm(transport).reduce_scatter(source, bounds, out, start=None, tag=reduction()).wait()

    return wait


def _in_all_gather(algorithm: Algorithm) -> Callable[[Transport], Any]:
    def wait(transport: Transport) -> None:
        bounds = range(transport.world_size + 1)
        tag = Tag(Kind.ALL_GATHER, "parameters")
        algorithm(transport).all_gather(torch.ones(transport.world_size), bounds, tag=tag).wait()

    return wait


WAITS: dict[str, Callable[[Transport], Any]] = {
    "pairwise reduce-scatter": _in_reduce_scatter(Pairwise),
    "pairwise all-gather": _in_all_gather(Pairwise),
    "ring reduce-scatter": _in_reduce_scatter(Ring),
    "ring all-gather": _in_all_gather(Ring),
    "exchange": lambda transport: transport.exchange(b"", Tag(Kind.EXCHANGE, "step()")),
    "meet": lambda transport: transport.meet(Tag(Kind.MEET, "step()"), lambda: None),
    "fork": lambda transport: transport.fork(),
}
waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())


@waits
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_abort_reaches_every_peer_with_its_reason(world_size: int, wait: Callable[[Transport], Any]) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.abort("the disk is full")
        else:
            wait(transport)

    begin = time.monotonic()
    group = Loopback[Any](world_size, timeout=PATIENT)
    errors = each(group, program)
    assert time.monotonic() - begin < SOON
    for rank in set(range(world_size)) - {1}:
        assert isinstance(errors[rank], PeerError), errors[rank]
        assert "rank 1 failed" in str(errors[rank])
        assert "the disk is full" in str(errors[rank])
    for transport in group.transports:
        for again in WAITS.values():
            with pytest.raises(CollectiveError, match=r"this communicator is closed.*the disk is full.*build a new"):
                again(transport)


def test_a_wait_that_failed_fails_again() -> None:
    def program(transport: Transport) -> list[str]:
        if transport.rank == 0:
            transport.abort("the disk is full")
            return []
        work = transport.irecv(torch.empty(1), 0, reduction())
        found = []
        for _ in range(2):
            with pytest.raises(CollectiveError) as caught:
                work.wait()
            found.append(str(caught.value))
        return found

    first, second = Loopback[list[str]](2, timeout=PATIENT).run(program)[1]
    assert "rank 0 failed: the disk is full" in first
    assert "closed since an earlier failure" in second


def test_a_reason_of_any_length_and_script_can_be_told() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.abort("a" + "é" * 5000)
        else:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "step()"))

    _, error = each(Loopback(2, timeout=PATIENT), program)
    assert isinstance(error, PeerError)
    assert "a" + "é" * 2000 in str(error)


@waits
def test_a_rank_that_raises_ends_the_waits_of_the_others(wait: Callable[[Transport], Any]) -> None:
    others: list[BaseException] = []

    def program(transport: Transport) -> None:
        if transport.rank == 2:
            raise ZeroDivisionError("in the user's model")
        try:
            wait(transport)
        except PeerError as error:
            others.append(error)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the user's model"):
        Loopback[None](3, timeout=PATIENT).run(program)
    assert time.monotonic() - begin < SOON
    assert len(others) == 2
    assert all("rank 2 left: ZeroDivisionError: in the user's model" in str(error) for error in others)


@waits
def test_a_rank_that_does_not_come_is_named_after_the_time_limit(wait: Callable[[Transport], Any]) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            wait(transport)

    begin = time.monotonic()
    error, _ = each(Loopback(2, timeout=0.2), program)
    assert 0.2 <= time.monotonic() - begin < SOON
    assert isinstance(error, PeerError)
    assert "rank 0, in " in str(error)
    assert re.search(r"no answer from rank 1 after \d+\.\d s", str(error))


# -- meetings ----------------------------------------------------------------------------------------------------------


class Rounds:
    """A rank that enters rounds of reductions, as a reducer does; its own contribute 1 + rank, the others' -0.0."""

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
        agreed = self.transport.meet(Tag(Kind.MEET, "step()", self.entered, self.meetings), self.catch_up)
        assert agreed == Tag(Kind.MEET, "step()", self.entered, self.meetings)


def check_meetings(
    algorithm: Algorithm, sizes: Sequence[int], plan: Sequence[Sequence[int]], agree: bool, seed: int | None
) -> None:
    """``plan``: for each meeting, how many rounds each rank enters by itself before it."""
    world_size = len(sizes)

    def program(transport: Transport) -> tuple[list[int], list[list[float]]]:
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


@BOTH
@pytest.mark.parametrize("world_size", [2, 3, 5])
@given(data=st.data())
@FEWER
def test_a_rank_that_is_behind_catches_up_exactly_what_it_missed(
    algorithm: Algorithm, world_size: int, data: st.DataObject
) -> None:
    """For any number of rounds a rank, any split (empty slices send no bytes), with and without delays."""
    per_rank = st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size)
    plan = data.draw(st.lists(per_rank, min_size=1, max_size=3), "rounds a rank before each meeting")
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 4]), min_size=world_size, max_size=world_size), "slices")
    agree = data.draw(st.booleans(), "an exchange inside each round")
    seed = data.draw(st.none() | st.integers(0, 1000), "delays")
    check_meetings(algorithm, sizes, plan, agree, seed)


@BOTH
@pytest.mark.parametrize("sizes", [[0, 0, 16], [16, 0, 0], [0, 16, 0], [0, 0, 0]])
@pytest.mark.parametrize("before", list(itertools.permutations([0, 1, 2])))
def test_a_rank_that_is_behind_learns_of_rounds_that_send_it_no_bytes(
    algorithm: Algorithm, sizes: list[int], before: tuple[int, ...]
) -> None:
    check_meetings(algorithm, sizes, [before], agree=False, seed=None)


def test_rounds_in_which_nothing_is_sent_count_too() -> None:
    """As when every parameter is frozen: the announcement itself says how many there were."""

    def program(transport: Transport) -> int:
        caught_up: list[int] = []
        met = transport.meet(Tag(Kind.MEET, "step()", transport.rank), lambda: caught_up.append(1))
        assert met.round == 2
        return len(caught_up)

    assert on_threads(3, program) == [2, 1, 0]


def test_ranks_at_different_meetings_both_learn_of_both() -> None:
    purposes = ["clip_grad_norm_()", "step()"]

    def program(transport: Transport) -> None:
        transport.meet(Tag(Kind.MEET, purposes[transport.rank], 2, 1), lambda: pytest.fail("nobody is ahead"))

    for error in each(Loopback(2, timeout=PATIENT), program):
        assert isinstance(error, MismatchError)
        for rank, purpose in enumerate(purposes):
            assert f"rank {rank} is in {purpose} [meet, round 2, index 1]" in str(error)


@BOTH
def test_ranks_at_different_meetings_after_different_rounds_both_learn_of_both(algorithm: Algorithm) -> None:
    def program(transport: Transport) -> None:
        rounds = Rounds(transport, algorithm, [3, 3], agree=False)
        for _ in range(2 * transport.rank):
            rounds.enter(1.0)
        transport.meet(Tag(Kind.MEET, f"purpose {transport.rank}", rounds.entered, 1), rounds.catch_up)

    for error in each(Loopback(2, timeout=PATIENT), program):
        assert isinstance(error, MismatchError)
        assert "purpose 0 [meet, round 2" in str(error)
        assert "purpose 1 [meet, round 2" in str(error)


# -- buckets in order --------------------------------------------------------------------------------------------------


class Launches:
    """What a queue did: buckets in order of launch and of completion, and how many were under way at most."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.completed: list[int] = []
        self.most = 0

    def launch(self, bucket: int) -> Work:
        self.launched.append(bucket)
        self.most = max(self.most, len(self.launched) - len(self.completed))
        return _Launch(self, bucket)


class _Launch:
    def __init__(self, log: Launches, bucket: int) -> None:
        self._log, self._bucket = log, bucket

    def wait(self) -> None:
        self._log.completed.append(self._bucket)


@given(
    rounds=st.lists(
        st.lists(st.integers(0, 30), unique=True, max_size=10).flatmap(
            lambda order: st.tuples(st.just(order), st.permutations(order), st.integers(0, len(order)))
        ),
        max_size=3,
    ),
    limit=st.integers(1, 4),
)
def test_buckets_are_launched_in_order_as_soon_as_they_may(
    rounds: list[tuple[list[int], list[int], int]], limit: int
) -> None:
    """Whatever the order in which they become ready, and if some never do; a round knows nothing of the last."""
    expected: list[int] = []
    log = Launches()
    queue = BucketQueue(log.launch, limit)
    for order, readiness, count in rounds:
        assert queue.done
        queue.begin(order)
        ready: set[int] = set()
        for bucket in readiness[:count]:
            queue.ready(bucket)
            ready.add(bucket)
            prefix = list(itertools.takewhile(ready.__contains__, order))
            assert log.launched == expected + prefix
            assert queue.done == (len(prefix) == len(order))
        queue.finish()
        expected += order
        assert queue.done
        assert log.launched == log.completed == expected
    assert log.most == min(limit, max((len(order) for order, _, _ in rounds), default=0))


def test_a_round_cannot_begin_inside_another() -> None:
    log = Launches()
    queue = BucketQueue(log.launch, 2)
    queue.begin([0, 1])
    queue.ready(1)
    with pytest.raises(RuntimeError, match="before the last one was complete"):
        queue.begin([0, 1])
    queue.finish()
    queue.begin([5])
    queue.ready(5)
    assert (log.launched, log.completed) == ([0, 1, 5], [0, 1])
    queue.drain()
    assert log.completed == [0, 1, 5]


def test_at_least_one_bucket_is_in_flight() -> None:
    with pytest.raises(ValueError, match="not 0"):
        BucketQueue(Launches().launch, 0)


# -- scratch memory ----------------------------------------------------------------------------------------------------


@given(
    events=st.lists(
        st.tuples(st.sampled_from([0, 1, 7, 100, 130, 170, 220, 290, 380, 500]), st.sampled_from([FP32, BF16]))
        | st.integers(0, 20),
        max_size=40,
    ),
    views_only=st.booleans(),
)
def test_the_pool_hands_out_no_block_twice_and_holds_a_bounded_surplus(
    events: list[tuple[int, torch.dtype] | int], views_only: bool
) -> None:
    """An event takes a tensor, or lets go of the one of that number. What is held keeps its content."""
    pool = Pool()
    live: list[tuple[Tensor, int, int]] = []  # what is held, what was written there, bytes asked for
    most_asked = peak = 0

    def take(number: int, numel: int, dtype: torch.dtype) -> Tensor:
        taken = pool.take(numel, dtype, CPU)
        assert (taken.shape, taken.dtype) == ((numel,), dtype)
        assert taken.data_ptr() % 64 == 0
        taken.fill_(number)
        return taken[numel // 2 :] if views_only else taken

    for number, event in enumerate(events):
        if isinstance(event, tuple):
            live.append((take(number, *event), number, event[0] * event[1].itemsize))
        elif live:
            del live[event % len(live)]
        asked = sum(nbytes for _, _, nbytes in live)
        most_asked, peak = max(most_asked, asked), max(peak, pool.held_bytes)
        assert asked <= pool.held_bytes <= SPARE * most_asked
        assert pool.peak_bytes == peak
        assert all((held == written).all() for held, written, _ in live)


def test_a_block_is_reused_as_soon_as_nobody_holds_it_also_through_a_view() -> None:
    pool = Pool()
    first = pool.take(100, FP32, CPU)
    address = first.data_ptr()
    view = first[10:20].view(2, 5).t()
    del first
    second = pool.take(100, FP32, CPU)
    assert second.data_ptr() != address, "a view holds the block"
    array = view.numpy()
    del view
    third = pool.take(100, FP32, CPU)
    assert third.data_ptr() not in (address, second.data_ptr()), "an array holds it, too"
    del array
    fourth = pool.take(200, BF16, CPU)
    assert fourth.data_ptr() == address, "bytes count, not dtypes"
    assert pool.storages() == {address, second.data_ptr(), third.data_ptr()}
    assert pool.held_bytes == pool.peak_bytes == 1200


def test_a_block_is_reused_for_what_nearly_fills_it() -> None:
    pool = Pool()
    address = pool.take(1000, FP32, CPU).data_ptr()
    fitting = math.ceil(1000 / SLACK)
    assert pool.take(fitting, FP32, CPU).data_ptr() == address
    assert pool.take(1000, FP32, CPU).data_ptr() == address
    held = pool.take(fitting - 1, FP32, CPU)
    assert held.data_ptr() != address
    assert held.untyped_storage().nbytes() == 4 * (fitting - 1)


def test_blocks_that_fit_no_more_are_given_up() -> None:
    pool = Pool()
    for numel in (100, 130, 170, 220, 290, 380, 500):
        pool.take(numel, FP32, CPU)
        assert 4 * numel <= pool.held_bytes <= SPARE * 4 * numel


def test_nothing_takes_no_memory() -> None:
    pool = Pool()
    empty = pool.take(0, BF16, CPU)
    assert (empty.shape, empty.dtype) == ((0,), BF16)
    assert pool.held_bytes == pool.peak_bytes == 0
    assert pool.storages() == frozenset()


def test_a_message_under_way_holds_its_scratch_memory() -> None:
    posted, looked = threading.Barrier(2), threading.Barrier(2)

    def program(transport: Transport) -> bool | list[float]:
        if transport.rank == 1:
            target = torch.empty(50)
            work = transport.irecv(target, 0, reduction())
            posted.wait()
            looked.wait()
            work.wait()
            return target.tolist()
        scratch = transport.scratch(50, FP32, CPU)
        address = scratch.data_ptr()
        transport.isend(scratch.fill_(3.0), 1, reduction())  # the handle is dropped, as by an exception
        del scratch
        posted.wait()
        reused_at_once = transport.scratch(50, FP32, CPU).fill_(4.0).data_ptr() == address
        looked.wait()
        return reused_at_once

    assert Loopback[bool | list[float]](2).run(program) == [False, [3.0] * 50]


def test_direct_exchange_needs_scratch_for_the_slices_of_the_others_and_gives_it_back() -> None:
    def program(transport: Transport) -> tuple[int, int]:
        bounds = [100 * rank for rank in range(5)]
        for round_ in range(3):
            out = torch.empty(100)
            source = torch.ones(400)
            tag = reduction(round_=round_)
            Pairwise(transport).reduce_scatter(source, bounds, out, start=None, tag=tag).wait()
        return transport.pool.peak_bytes, transport.pool.held_bytes

    assert on_threads(4, program) == [(3 * 400, 3 * 400)] * 4


@pytest.mark.parametrize("numel", [1, 17, 4099])
def test_buffers_start_on_64_byte_boundaries(numel: int) -> None:
    buffer = solo().empty(numel, BF16, CPU)
    assert (buffer.shape, buffer.dtype) == ((numel,), BF16)
    assert buffer.data_ptr() % 64 == 0


# -- tags --------------------------------------------------------------------------------------------------------------

int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=100) | st.text("aé漢🙂", min_size=20, max_size=60)
tags = st.builds(Tag, st.sampled_from(Kind), labels, int64, int32, int64)


@given(tags, int64)
def test_a_tag_survives_the_wire_but_for_the_end_of_a_long_label(tag: Tag, size: int) -> None:
    header = tag.pack(size)
    assert len(header) == HEADER_BYTES
    found, found_size = Tag.unpack(header)
    assert found_size == size
    assert (found.kind, found.round, found.index, found.digest) == (tag.kind, tag.round, tag.index, tag.digest)
    assert tag.label.startswith(found.label)
    if found.label != tag.label:
        assert len(found.label.encode()) <= LABEL_BYTES
        assert len(tag.label[: len(found.label) + 1].encode()) > LABEL_BYTES, "one more character would not fit"


@given(tags)
def test_a_tag_is_recognised_by_who_receives_it(tag: Tag) -> None:
    found, _ = Tag.unpack(tag.pack(0))
    assert tag.same(found)
    assert found.same(tag)


@given(tags, st.sampled_from(["kind", "round", "index", "digest", "label"]))
def test_tags_that_differ_in_anything_are_not_the_same(tag: Tag, field: str) -> None:
    other = {
        "kind": Tag(Kind(tag.kind % len(Kind) + 1), tag.label, tag.round, tag.index, tag.digest),
        "round": Tag(tag.kind, tag.label, tag.round ^ 1, tag.index, tag.digest),
        "index": Tag(tag.kind, tag.label, tag.round, tag.index ^ 1, tag.digest),
        "digest": Tag(tag.kind, tag.label, tag.round, tag.index, tag.digest ^ 1),
        "label": Tag(tag.kind, "x" + tag.label, tag.round, tag.index, tag.digest),
    }[field]
    if field == "label" and tag.label.startswith("x" * LABEL_BYTES):
        return  # what differs lies behind the end
    assert not tag.same(Tag.unpack(other.pack(0))[0])
    assert not tag.same(other)


def test_long_labels_in_many_scripts_are_no_mismatch() -> None:
    label = "bucket 0 (модель.слой.0.вес ... модель.слой.31.вес" + "é" * 40

    def program(transport: Transport) -> list[bytes]:
        return transport.exchange(b"x", Tag(Kind.EXCHANGE, "a" + label)) + transport.exchange(
            b"y", Tag(Kind.EXCHANGE, label)
        )

    assert on_threads(2, program) == [[b"x", b"x", b"y", b"y"]] * 2
