"""The order of buckets, and the scratch memory in use."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, UntypedStorage

from collectives import (
    BucketQueue,
    Kind,
    Loopback,
    Pairwise,
    Tag,
    Transport,
    Work,
    on_threads,
    solo,
)
from collectives.messenger import MOST_DEFERRED, SMALL
from collectives.pool import Pool

from ..support.carried import (
    BF16,
    CPU,
    FP32,
    reduction,
)
from ..support.sockets import on_wires

# -- buckets in order --------------------------------------------------------------------------------------------------


class Launches:
    """Records a queue: buckets in order of launch and of completion, and the most that were under way."""

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
    """The order in which they become ready does not matter, and some never do.

    A round does not depend on the round before.
    """
    expected: list[int] = []
    log = Launches()
    queue = BucketQueue(log.launch, limit)
    for order, readiness, count in rounds:
        assert queue.done
        queue.begin_round(order)
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
    queue.begin_round([0, 1])
    queue.ready(1)
    with pytest.raises(RuntimeError, match="before the last one was complete"):
        queue.begin_round([0, 1])
    queue.finish()
    queue.begin_round([5])
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
    exact=st.booleans(),
)
def test_the_pool_hands_out_no_block_twice_and_holds_a_bounded_surplus(
    events: list[tuple[int, torch.dtype] | int], views_only: bool, exact: bool
) -> None:
    """An event takes a tensor, or releases the tensor of that number. Tensors in use keep their content."""
    pool = Pool(exact=exact)
    live: list[tuple[Tensor, int, int]] = []  # a tensor in use, the value written into it, the requested bytes
    most_asked = most_live = largest = peak = 0

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
        most_live = max(most_live, sum(nbytes > 0 for _, _, nbytes in live))
        largest = max([largest, *(nbytes for _, _, nbytes in live)])
        assert asked <= pool.held_bytes <= (most_asked if exact else most_live * largest)
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


@given(
    events=st.lists(
        st.sampled_from([0, 1, 7, 100, 130, 170, 220, 290, 380, 500, 501]) | st.integers(-9, -1), max_size=30
    )
)
def test_who_asks_for_the_same_again_and_again_is_given_warm_blocks_alone(events: list[int]) -> None:
    pool, fresh = Pool(allocate=lambda nbytes, device: made(nbytes)), list[int]()

    def made(nbytes: int) -> UntypedStorage:
        fresh.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    for number in range(len(events) + 2):
        live: list[Tensor] = []
        before = len(fresh)
        for event in events:
            if event >= 0:
                live.append(pool.take(event, FP32, CPU))
            elif live:
                del live[event % len(live)]
        del live
        if number > len(events):
            assert len(fresh) == before


def test_a_block_serves_what_is_smaller_and_the_smallest_that_fits_is_taken() -> None:
    pool = Pool()
    large, small = pool.take(1000, FP32, CPU), pool.take(10, FP32, CPU)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    first, second = pool.take(3, FP32, CPU), pool.take(3, FP32, CPU)
    assert (second.data_ptr(), first.data_ptr()) == addresses
    assert pool.peak_bytes == 4040


def test_a_block_that_has_become_too_small_is_replaced() -> None:
    pool = Pool()
    for numel in (100, 130, 170, 220, 290, 380, 500):
        pool.take(numel, FP32, CPU)
        assert pool.held_bytes == 4 * numel
    pool.trim()
    assert pool.held_bytes == 0
    assert pool.peak_bytes == 2000


def test_blocks_of_an_exact_pool_are_as_long_as_what_is_asked_for() -> None:
    pool = Pool(exact=True)
    for numel in (100, 99, 100):
        assert pool.take(numel, FP32, CPU).untyped_storage().nbytes() == pool.held_bytes == 4 * numel


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

    slices = 3 * 4 * 128  # each begins on a boundary
    assert on_threads(4, program) == [(slices, slices)] * 4


@pytest.mark.parametrize("numel", [1, 17, 4099])
def test_buffers_start_on_64_byte_boundaries(numel: int) -> None:
    buffer = solo().empty(numel, BF16, CPU)
    assert (buffer.shape, buffer.dtype) == ((numel,), BF16)
    assert buffer.data_ptr() % 64 == 0


def test_what_nobody_waits_for_is_bounded_also_where_ranks_never_meet() -> None:
    """Over a network many bytes are acknowledged, and acknowledgements are awaited only when ranks synchronize."""
    rounds, numel = 400, SMALL // 4 + 1

    def program(transport: Transport) -> int:
        pairwise, buffer = Pairwise(transport), torch.empty(2 * numel)
        most = 0
        for number in range(rounds):
            buffer[transport.rank * numel : (transport.rank + 1) * numel] = number
            tag = Tag(Kind.ALL_GATHER, "gather", 1, number)
            pairwise.all_gather(buffer, [0, numel, 2 * numel], tag=tag).wait()
            assert buffer[:: numel - 1].eq(number).all()
            most = max(most, len(transport._messenger.unsent))
        return most

    assert max(on_wires(2, program)) <= MOST_DEFERRED + 1 < rounds
