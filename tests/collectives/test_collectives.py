"""Collectives over the threads of one process: their results and their messages."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    ALGORITHMS,
    Algorithm,
    Chain,
    CollectiveError,
    Kind,
    Loopback,
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
from collectives.algorithms.ordered_sum import BLOCK
from collectives.messages import HEADER_BYTES
from collectives.messenger import SMALL
from collectives.transport import CHUNK, LEAST, chunks

from ..support.carried import (
    BF16,
    BOTH,
    FEWER,
    FP16,
    FP32,
    FP64,
    MIXED,
    SAME,
    assert_same_bits,
    awkward,
    each,
    jitter,
    plain_sum,
    reduction,
    seeds,
    split_groups,
    whole_numbers,
    world_sizes,
)

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
    """Return each rank's sum, by ``algorithm``."""

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
    """Return a contribution and a running sum for each rank."""
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
    """The bound is (W - 1) 2^-24 sum |x|: W - 1 roundings to fp32, in any order."""
    world_size = len(bounds) - 1
    generator = torch.Generator().manual_seed(seed)
    contributions = [torch.randn(bounds[-1], generator=generator) for _ in range(world_size)]
    sums = reduce_scattered(Ring, bounds, (FP32, FP32), WAYS[0], contributions, [])
    columns = zip(*(x.tolist() for x in contributions), strict=True)
    for ours, column in zip(torch.cat(sums).tolist(), columns, strict=True):
        exact = math.fsum(column)
        assert abs(ours - exact) <= (world_size - 1) * 2.0**-24 * math.fsum(map(abs, column))


def test_only_the_algorithm_that_folds_calls_itself_exact() -> None:
    """The bits of this sum depend on the order: 1 + 2^-24 rounds to 1, but 2^-24 + 2^-24 is not 0."""
    contributions = [torch.full((3,), value) for value in (1.0, 2.0**-24, 2.0**-24)]
    for algorithm, in_order in ((Pairwise, True), (Ring, False)):
        sums = torch.cat(reduce_scattered(algorithm, [0, 1, 2, 3], (FP32, FP32), WAYS[0], contributions, []))
        assert bool((sums == 1.0).all()) == in_order
        assert algorithm.exact == in_order


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
    """All ranks together send (W - 1) n elements, whatever the split; headers are counted separately."""
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
    """A header has the number of bytes, which follow behind a marker. If they are many, they follow as a message, which
    has a header, too."""

    def program(transport: Transport) -> tuple[Traffic, Traffic]:
        transport.exchange(b"x" * (10 + transport.rank), Tag(Kind.EXCHANGE, "step()"))
        few = transport.traffic
        transport.exchange(b"x" * (SMALL + 1), Tag(Kind.EXCHANGE, "step()"))
        return few, transport.traffic - few

    many = Traffic(0, 0, 2 * HEADER_BYTES + SMALL + 1, 2 * HEADER_BYTES + SMALL + 1, 2)
    assert on_threads(2, program) == [
        (Traffic(0, 0, HEADER_BYTES + 11, HEADER_BYTES + 12, 1), many),
        (Traffic(0, 0, HEADER_BYTES + 12, HEADER_BYTES + 11, 1), many),
    ]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_single_rank_sends_nothing(name: str) -> None:
    transport = solo()
    collective = ALGORITHMS[name](transport)
    out = torch.tensor([10.0, 20.0])
    collective.reduce_scatter(torch.tensor([1.0, 2.0]), [0, 2], out, start=out, tag=reduction()).wait()
    collective.all_gather(out, [0, 2], tag=Tag(Kind.ALL_GATHER, "bucket 0")).wait()
    assert out.tolist() == [11.0, 22.0]
    assert transport.exchange(b"mine", Tag(Kind.EXCHANGE, "step()")) == [b"mine"]
    meeting = Tag(Kind.MEET, "step()", 3)
    assert transport.meet(meeting, lambda: pytest.fail("nobody is ahead"), lambda: b"mine") == [b"mine"]
    assert transport.fork().rank == 0
    assert transport.traffic == Traffic()


def test_native_says_that_it_needs_a_process_group() -> None:
    for result in each(Loopback(2), ALGORITHMS["native"]):
        assert isinstance(result, CollectiveError)
        assert "torch.distributed process group" in str(result)


# -- several at once, and late -----------------------------------------------------------------------------------------


def rounds_of_buckets(algorithm: Algorithm, transport: Transport, seed: int, in_flight: int) -> list[Tensor]:
    """Run three rounds of reductions of four buckets, then their gathers, with at most ``in_flight`` under way."""
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
@pytest.mark.by_default("Pairwise")
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
    """Threads delay transfers as long as a network may."""
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


@given(st.integers(0, 1 << 24))
def test_chunks_are_a_cut_of_everything_that_leaves_kernels_the_rest_that_there_was(numel: int) -> None:
    """Vector kernels and the scalar loops for the remainder may differ in the bits of a NaN."""
    cuts = list(chunks(numel))
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == numel
    assert all(end % 64 == 0 for _, end in cuts[:-1])
    assert all(end - begin <= CHUNK for begin, end in cuts)
    assert len(cuts) == 1 or all(end - begin >= LEAST for begin, end in cuts[:-1])


def test_a_message_in_chunks_has_one_header_and_is_read_chunk_by_chunk() -> None:
    numel = 3 * LEAST + 5

    def program(transport: Transport) -> list[float]:
        if transport.rank == 0:
            transport.isend(torch.arange(numel, dtype=torch.float32), 1, reduction()).wait()
            assert transport.traffic == Traffic(payload_sent=4 * numel, control_sent=HEADER_BYTES, messages=1)
            return []
        target = torch.zeros(numel)
        works = transport.irecv_chunks(target, 0, reduction())
        last = [end - 1 for _, end in chunks(numel)]
        seen = []
        for number, work in enumerate(works):
            work.wait()
            seen.append(float(target[last[number]]))
        return seen

    assert on_threads(2, program)[1] == [float(end - 1) for _, end in chunks(numel)]


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
    for rank, message in enumerate(on_threads(2, program, timeout=5)):
        assert f"rank {rank}, while adding up: {error.__name__}: in the middle" in message


def test_a_backend_never_cuts_a_message_to_fit() -> None:
    def program(transport: Transport) -> None:
        tensor = torch.zeros(3 + transport.rank, dtype=torch.uint8)
        backend = transport.backend
        side = backend.recv(tensor, 0, 0) if transport.rank else backend.send(tensor, 1, 0)
        with pytest.raises(PeerError, match="3 bytes came where 4 fit"):
            side.wait(5)

    on_threads(2, program, timeout=5)
