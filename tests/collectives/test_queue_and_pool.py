"""Buckets are launched in order, few at a time, from scratch memory that is reused when its last holder lets go."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import BucketQueue, Loopback
from collectives.pool import Pool

from ..support.carried import BF16, CPU, FP32, reduction


class Log:
    """Launches that record what is done with them. ``most``: the most that were under way."""

    def __init__(self, *methods: str) -> None:
        """``methods``: those of the works, `wait` and perhaps `pass_on`."""
        self.events: list[tuple[str, int]] = []
        self.most, self._methods = 0, methods or ("wait",)

    def launch(self, bucket: int) -> Any:
        self.events.append(("launch", bucket))
        self.most = max(self.most, len(self.of("launch")) - len(self.of("wait")))
        return SimpleNamespace(**{name: partial(self.events.append, (name, bucket)) for name in self._methods})

    def of(self, what: str) -> list[int]:
        """Return the buckets with which this was done."""
        return [bucket for name, bucket in self.events if name == what]


def test_a_round_cannot_begin_inside_another() -> None:
    log = Log()
    queue = BucketQueue(log.launch, 2)
    queue.begin_round([0, 1])
    queue.ready(1)
    with pytest.raises(RuntimeError, match="before the last one was complete"):
        queue.begin_round([0, 1])
    queue.finish()
    queue.begin_round([5])
    queue.ready(5)
    assert (log.of("launch"), log.of("wait")) == ([0, 1, 5], [0, 1])
    queue.drain()
    assert log.of("wait") == [0, 1, 5]
    with pytest.raises(ValueError, match="at least one bucket must be allowed in flight, not 0"):
        BucketQueue(log.launch, 0)


def test_a_round_that_was_abandoned_is_not_waited_for_and_another_may_begin() -> None:
    log = Log("wait", "pass_on")
    queue = BucketQueue(log.launch, 1, 1)
    queue.begin_round([0, 1, 2])
    queue.ready(0)
    queue.ready(1)
    queue.abandon()
    assert queue.done
    queue.begin_round([5])
    queue.finish()
    assert (log.of("launch"), log.of("wait")) == ([0, 1, 5], [5])


PASSED_ON = "launch 0, pass_on 0, launch 1, pass_on 1, launch 2, wait 0, pass_on 2, launch 3, wait 1, "
PASSED_ON += "pass_on 3, wait 2, wait 3"


@pytest.mark.parametrize(
    ("log", "buckets", "events"),
    [
        (Log("wait", "pass_on"), 4, PASSED_ON),
        (Log(), 2, "launch 0, wait 0, launch 1, wait 1, wait 0, wait 1"),
    ],
    ids=["passed on", "completed"],
)
def test_a_bucket_is_passed_on_before_the_next_launch(log: Log, buckets: int, events: str) -> None:
    """And completed when it is far behind. A work that cannot be passed on is completed in its turn."""
    queue = BucketQueue(log.launch, 1, 2)
    queue.begin_round(range(buckets))
    queue.finish()
    assert ", ".join(f"{name} {bucket}" for name, bucket in log.events) == events


@pytest.mark.law("buffers in flight")
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
        assert not exact or taken.untyped_storage().nbytes() == numel * dtype.itemsize
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


@pytest.mark.law("buffer lifetimes")
def test_a_block_is_reused_as_soon_as_nobody_holds_it_also_through_a_view() -> None:
    pool = Pool()
    first = pool.take(100, FP32, CPU)
    address = first.data_ptr()
    array = first[10:20].view(2, 5).t().numpy()
    del first
    second = pool.take(100, FP32, CPU)
    assert second.data_ptr() != address, "an array holds the block"
    del array
    third = pool.take(200, BF16, CPU)
    assert third.data_ptr() == address, "bytes count, not dtypes"
    assert pool.storages() == {address, second.data_ptr()}
    assert pool.held_bytes == pool.peak_bytes == 800


@pytest.mark.law("buffer lifetimes")
def test_a_message_under_way_holds_its_scratch_memory_and_is_let_go_of_once_sent() -> None:
    """Its handle may be dropped, as by an exception."""
    first, second = Loopback[None](2).transports
    scratch, target = first.scratch(50, FP32, CPU).fill_(3.0), torch.empty(50)
    address, received = scratch.data_ptr(), second.irecv(target, 0, reduction())
    first.isend(scratch, 1, reduction())
    del scratch
    assert first.scratch(50, FP32, CPU).fill_(4.0).data_ptr() != address
    received.wait()
    assert target.tolist() == [3.0] * 50
    sent, received = first.isend(torch.ones(3), 1, reduction()), second.irecv(torch.empty(3), 0, reduction())
    received.wait()
    sent.wait()
    alive = weakref.ref(sent)
    del sent
    assert alive() is None
