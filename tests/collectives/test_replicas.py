"""Sums of several buckets on their way between replicas: at a time, in one order, without memory for their inputs."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import BucketQueue, CollectiveError, Loopback, Pairwise, Replicated, Transport, Work, on_threads
from collectives.messages import StagedWork

from ..support.carried import FP32, assert_same_bits, awkward, each, jitter, plain_sum, reduction

BUCKETS, NUMEL, REPLICAS = 6, 200, 4


class Log:
    """Launches that note what is done with them."""

    def __init__(self, *, staged: bool = True) -> None:
        self.events: list[str] = []
        self._kind = Staged if staged else Plain

    def launch(self, bucket: int) -> Work:
        self.events.append(f"launch {bucket}")
        return self._kind(self, bucket)


class Plain:
    def __init__(self, log: Log, bucket: int) -> None:
        self._log, self._bucket = log, bucket

    def wait(self) -> None:
        self._log.events.append(f"wait {self._bucket}")


class Staged(Plain):
    def pass_on(self) -> None:
        self._log.events.append(f"pass on {self._bucket}")


def test_a_bucket_is_passed_on_before_another_is_launched_and_completed_when_it_is_far_behind() -> None:
    log = Log()
    queue = BucketQueue(log.launch, 1, 2)
    queue.begin_round(range(4))
    for bucket in range(4):
        queue.ready(bucket)
    queue.finish()
    assert log.events == [
        *("launch 0", "pass on 0", "launch 1", "pass on 1", "launch 2"),
        *("wait 0", "pass on 2", "launch 3"),
        *("wait 1", "pass on 3", "wait 2", "wait 3"),
    ]


def test_works_that_cannot_be_passed_on_are_completed_in_their_turn() -> None:
    log = Log(staged=False)
    queue = BucketQueue(log.launch, 1, 2)
    queue.begin_round(range(2))
    queue.finish()
    assert log.events == ["launch 0", "wait 0", "launch 1", "wait 1", "wait 0", "wait 1"]


def replicas_of_one(transport: Transport) -> Replicated:
    return Replicated(transport, Pairwise(transport.split([transport.rank])))


def contribution(rank: int, bucket: int) -> Tensor:
    return awkward(NUMEL, FP32, 100 * rank + bucket)


def reduced(collective: Replicated, sources: Sequence[Tensor], limit: int, behind: int) -> list[Tensor]:
    """Return the sums of all buckets, which a queue launches."""
    rounds = [torch.empty(NUMEL, dtype=FP32) for _ in sources]

    def launch(bucket: int) -> Work:
        tag = reduction(f"bucket {bucket}", 1, bucket)
        return collective.reduce_scatter(sources[bucket], [0, NUMEL], rounds[bucket], start=None, tag=tag)

    queue = BucketQueue(launch, limit, behind)
    queue.begin_round(range(len(sources)))
    queue.finish()
    return rounds


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("behind", [1, 2, 6, 100])
def test_however_many_are_under_way_every_replica_has_the_sum_in_rank_order(limit: int, behind: int) -> None:
    def program(transport: Transport) -> list[Tensor]:
        sources = [contribution(transport.rank, bucket) for bucket in range(BUCKETS)]
        return reduced(replicas_of_one(transport), sources, limit, behind)

    found = Loopback[list[Tensor]](REPLICAS, interfere=jitter(behind)).run(program)
    for bucket in range(BUCKETS):
        expected = plain_sum(None, [contribution(rank, bucket) for rank in range(REPLICAS)], FP32)
        for sums in found:
            assert_same_bits(sums[bucket], expected)


def test_a_replica_adds_to_the_next_bucket_before_the_total_of_the_last_one_has_come_back() -> None:
    """The last replica adds nothing before the first one has passed on every bucket."""
    all_sent = threading.Event()

    def program(transport: Transport) -> bool:
        collective = replicas_of_one(transport)
        outs = [torch.empty(NUMEL, dtype=FP32) for _ in range(BUCKETS)]
        works = list[StagedWork]()
        for bucket, out in enumerate(outs):
            tag = reduction(f"bucket {bucket}", 1, bucket)
            source = contribution(transport.rank, bucket)
            work = collective.reduce_scatter(source, [0, NUMEL], out, start=None, tag=tag)
            if transport.rank == REPLICAS - 1 and not all_sent.wait(20):
                return False
            assert isinstance(work, StagedWork)
            work.pass_on()
            works.append(work)
        if transport.rank == 0:
            all_sent.set()
        for work in works:
            work.wait()
        return True

    assert on_threads(REPLICAS, program) == [True] * REPLICAS


def test_the_input_of_a_bucket_is_free_as_soon_as_it_was_passed_on() -> None:
    def program(transport: Transport) -> list[int]:
        collective, alive = replicas_of_one(transport), list[int]()
        sources: dict[int, weakref.ref[Tensor]] = {}
        outs = [torch.empty(NUMEL, dtype=FP32) for _ in range(BUCKETS)]

        def launch(bucket: int) -> Work:
            source = contribution(transport.rank, bucket)
            sources[bucket] = weakref.ref(source)
            alive.append(sum(reference() is not None for reference in sources.values()))
            tag = reduction(f"bucket {bucket}", 1, bucket)
            return collective.reduce_scatter(source, [0, NUMEL], outs[bucket], start=None, tag=tag)

        gc.disable()  # nothing may need it
        try:
            queue = BucketQueue(launch, 1, 100)
            queue.begin_round(range(BUCKETS))
            queue.finish()
        finally:
            gc.enable()
        return alive

    for alive in on_threads(REPLICAS, program):
        assert max(alive) == 1


def test_memory_for_sums_that_come_is_that_of_the_buckets_that_were_not_passed_on() -> None:
    def program(transport: Transport) -> int:
        sources = [contribution(transport.rank, bucket) for bucket in range(20)]
        collective = replicas_of_one(transport)
        reduced(collective, sources, 1, 100)
        return collective.shard_group.pool.peak_bytes

    found = on_threads(REPLICAS, program)
    assert found[0] == 0
    assert max(found) <= 2 * 4 * (NUMEL + 64)


# -- interrupts --------------------------------------------------------------------------------------------------------


class Interrupting:
    """Raises `KeyboardInterrupt` at one of the instructions with which a thread passes sums on and awaits totals."""

    files, functions = ("hybrid_sharding.py", "queue.py"), ("pass_on", "wait", "_land", "_complete")

    def __init__(self, place: int) -> None:
        self.place, self.reached = place, False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.endswith(self.files) and frame.f_code.co_name in self.functions:
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.place -= 1
                if self.place == 0:
                    self.reached = True
                    raise KeyboardInterrupt
            return self
        return None


def interrupted(victim: int, place: int) -> tuple[bool, list[list[Tensor] | CollectiveError]]:
    """Interrupt a rank at an instruction, and let it go on. Return whether it got there, and what each rank has."""
    interrupting = Interrupting(place)

    def program(transport: Transport) -> list[Tensor]:
        collective = replicas_of_one(transport)
        sums = [torch.empty(NUMEL, dtype=FP32) for _ in range(3)]

        def launch(bucket: int) -> Work:
            tag = reduction(f"bucket {bucket}", 1, bucket)
            source = contribution(transport.rank, bucket)
            return collective.reduce_scatter(source, [0, NUMEL], sums[bucket], start=None, tag=tag)

        queue = BucketQueue(launch, 3, 2)
        queue.begin_round(range(3))
        for bucket in range(3):
            queue.ready(bucket)
        if transport.rank == victim:
            sys.settrace(interrupting)
        try:
            queue.drain()
        except KeyboardInterrupt:
            sys.settrace(None)
            queue.drain()
        finally:
            sys.settrace(None)
        transport.exchange(b"", reduction("the end", 2))
        return sums

    found = each(Loopback[Any](3, timeout=2.0), program)
    return interrupting.reached, found


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1, 2])
@pytest.mark.full
def test_after_an_interrupt_at_any_instruction_all_replicas_have_the_sums_or_all_have_an_error(victim: int) -> None:
    expected = [plain_sum(None, [contribution(rank, bucket) for rank in range(3)], FP32) for bucket in range(3)]
    place, reached = 0, True
    while reached:
        place += 1
        reached, found = interrupted(victim, place)
        failed = [isinstance(each_, CollectiveError) for each_ in found]
        assert all(failed) or not any(failed), f"instruction {place}: {found}"
        for sums in found if not any(failed) else ():
            assert not isinstance(sums, CollectiveError)
            for ours, theirs in zip(sums, expected, strict=True):
                assert_same_bits(ours, theirs)
    assert place > 100
