"""Messages are the same wherever objects lie; ranks that are behind catch up; few buckets are launched at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Algorithm,
    Chain,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    Pipeline,
    PipelineStage,
    Ring,
    Shared,
    Tag,
    Traffic,
    Transport,
    Work,
    on_threads,
    pass_on,
)
from collectives.backend import Backend, Pending
from collectives.links.messenger import ACK, ACK_PORT, PORTS
from collectives.messages import HEADER_BYTES
from collectives.pool import Pool

from ..dials.loops import step
from ..dials.record import config_with
from ..support.carried import BF16, CPU, FP32, between_hosts, each, hosts_of, jitter, reduction
from ..support.limits import BOUND, PATIENT
from ..support.machine.program import Backward
from ..support.machine.run import Played, play, run
from ..support.rows import rows
from ..support.sockets import Wire

HEADERS = 0
LOOP = [*step(1), Backward(2, sync=False), *step(3, clear="zeros"), *step(4)]


class Recorded(Pairwise):
    """Records each rank's launches."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.launched = list[tuple[str, int, int, str]]()

    def reduce_scatter(self, *arguments: Any, tag: Tag, **named: Any) -> Work:
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        return super().reduce_scatter(*arguments, tag=tag, **named)

    def all_gather(self, *arguments: Any, tag: Tag, **named: Any) -> Work:
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        return super().all_gather(*arguments, tag=tag, **named)


@pytest.mark.law("every rank enters")
@pytest.mark.law("launch order")
@pytest.mark.parametrize(("stage", "world_size"), rows([(0, 2), (1, 5)], [(2, 2), (3, 5)]))
def test_every_rank_launches_every_bucket_in_layout_order(stage: int, world_size: int) -> None:
    """Gradients come in another order on each rank, and some never do. With five ranks most slices are empty."""
    made: dict[int, Recorded] = {}

    def recorded(transport: Transport) -> Recorded:
        return made.setdefault(transport.rank, Recorded(transport))

    config = config_with({"stage": stage, "world_size": world_size, "collective": recorded})
    run(config, *LOOP, backend=Played(on_threads(world_size, lambda transport: play(config, LOOP, transport))))
    first = made[0].launched
    assert all(made[rank].launched == first for rank in range(world_size))
    rounds: dict[int, list[int]] = {}
    for kind, round_, index, _ in first:
        if kind == Kind.REDUCE_SCATTER.name:
            rounds.setdefault(round_, []).append(index)
    orders = list(rounds.values())
    assert len(orders[0]) > 3
    assert orders == [sorted(set(orders[0]))] * len(orders), "a bucket of frozen parameters is left out"


Message = tuple[int, int, int, str]  # to whom, port, size, digest


class Spy(Wire):
    """Records the messages of this rank on open channels. Opening itself is left out: it draws a random number."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.name, self.messages = backend.name, list[Message]()

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        if slot >= PORTS:
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            self.messages.append((to, slot % PORTS, tensor.numel(), digest))
        return super().send(tensor, to, slot)


def wire(stage: int) -> list[tuple[list[Message], Any]]:
    """Train on two ranks; return all that each rank sends, and the traffic of its transport."""

    def program(transport: Transport) -> tuple[list[Message], Any]:
        spy, made = Spy(transport.backend), list[Pairwise]()
        collective = lambda inner: made.append(Pairwise(inner)) or made[0]  # noqa: E731 - counts this one's messages
        config = config_with({"stage": stage, "world_size": 2, "collective": collective})
        play(config, LOOP, Transport(spy))
        return spy.messages, made[0].transport.traffic

    return on_threads(2, program)


def zeroed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: allocate(*given).zero_()


def digest_of_the_wire() -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Pool, "take"), (Transport, "empty")):  # padding is sent, too
            patch.setattr(owner, name, zeroed(getattr(owner, name)))
        return [
            [hashlib.sha256(repr(messages).encode()).hexdigest() for messages, _ in wire(stage)] for stage in range(4)
        ]


PROGRAM = """
import json, torch
kept = [bytearray(n) for n in range(9999)]
from tests.collectives.test_transport import digest_of_the_wire
torch.set_num_threads(1)
print(json.dumps([hash("zero"), digest_of_the_wire()]))
"""


@pytest.mark.law("names on the wire")
def test_the_wire_knows_neither_hashes_of_strings_nor_addresses() -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment, root = {**os.environ, "PYTHONHASHSEED": "1234567"}, Path(__file__).resolve().parents[2]
    other = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    ours = digest_of_the_wire()
    told, theirs = json.loads(other.communicate(timeout=100)[0])
    assert told != hash("zero")
    assert theirs == ours


def assert_balanced(traffic: list[Traffic]) -> None:
    assert sum(t.payload_sent for t in traffic) == sum(t.payload_received for t in traffic) > 0
    assert sum(t.control_sent for t in traffic) == sum(t.control_received for t in traffic) > 0


@pytest.mark.law("traffic")
@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
def test_traffic_is_what_the_backend_sent(stage: int) -> None:
    found = wire(stage)
    for messages, counted in found:
        assert all(size for _, _, size, _ in messages), "nothing without bytes is sent"
        assert [port for _, port, _, _ in messages].count(HEADERS) == counted.messages
        assert {size for _, port, size, _ in messages if port == HEADERS} == {HEADER_BYTES}
        assert {size for _, port, size, _ in messages if port == ACK_PORT} <= {ACK.size}
        sent = sum(size for _, port, size, _ in messages if port != ACK_PORT)
        assert sent == counted.payload_sent + counted.control_sent
    assert_balanced([counted for _, counted in found])


@pytest.mark.parametrize("algorithm", [Pairwise, Ring, Shared, between_hosts])
def test_every_algorithm_counts_as_received_what_it_counts_as_sent(algorithm: Algorithm) -> None:
    bounds = [0, 3, 5, 9]

    def program(transport: Transport) -> Traffic:
        collective, whole = algorithm(transport), torch.ones(9)
        own = whole[bounds[transport.rank] : bounds[transport.rank + 1]]
        collective.reduce_scatter(whole, bounds, own, start=None, tag=reduction(round_=1)).wait()
        collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
        return collective.transport.traffic

    assert_balanced(on_threads(3, program))


class Rounds:
    """A rank that runs rounds of reductions, as a reducer does: own ones with 1 + rank, others with -0.0."""

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


class Log:
    """Launches that record what is done with them."""

    def __init__(self, *methods: str) -> None:
        self.events: list[tuple[str, int]] = []
        self._methods = methods or ("wait",)

    def launch(self, bucket: int) -> Any:
        self.events.append(("launch", bucket))
        return SimpleNamespace(**{name: partial(self.events.append, (name, bucket)) for name in self._methods})

    def of(self, what: str) -> list[int]:
        return [bucket for name, bucket in self.events if name == what]


def passing_on(log: Log, passed_on: int) -> Pipeline:
    """Return a pipeline of reductions one at a time, of which so many may be passed on and not complete."""
    return Pipeline(PipelineStage(1, log.launch, pass_on), PipelineStage(passed_on))


def test_a_round_cannot_begin_inside_another() -> None:
    log = Log()
    pipeline = Pipeline(PipelineStage(2, log.launch))
    pipeline.begin_round([0, 1])
    pipeline.ready(1)
    with pytest.raises(RuntimeError, match="before the last one was complete"):
        pipeline.begin_round([0, 1])
    pipeline.finish()
    pipeline.begin_round([5])
    pipeline.ready(5)
    assert (log.of("launch"), log.of("wait")) == ([0, 1, 5], [0, 1])
    pipeline.drain()
    assert log.of("wait") == [0, 1, 5]
    with pytest.raises(ValueError, match="at least one bucket must be allowed in flight, not 0"):
        Pipeline(PipelineStage(0, log.launch))


def test_a_round_that_was_abandoned_is_not_waited_for_and_another_may_begin() -> None:
    log = Log("wait", "pass_on")
    pipeline = passing_on(log, 1)
    pipeline.begin_round([0, 1, 2])
    pipeline.ready(0)
    pipeline.ready(1)
    pipeline.abandon()
    pipeline.begin_round([5])
    pipeline.finish()
    assert (log.of("launch"), log.of("wait")) == ([0, 1, 5], [5])


PASSED_ON = "launch 0, pass_on 0, launch 1, pass_on 1, launch 2, wait 0, pass_on 2, launch 3, wait 1, "
PASSED_ON += "pass_on 3, wait 2, wait 3"


@pytest.mark.parametrize(
    ("log", "buckets", "events"),
    [(Log("wait", "pass_on"), 4, PASSED_ON), (Log(), 2, "launch 0, wait 0, launch 1, wait 1, wait 0, wait 1")],
    ids=["passed on", "completed"],
)
def test_a_bucket_is_passed_on_before_the_next_launch(log: Log, buckets: int, events: str) -> None:
    pipeline = passing_on(log, 2)
    pipeline.begin_round(range(buckets))
    pipeline.finish()
    assert ", ".join(f"{name} {bucket}" for name, bucket in log.events) == events


@pytest.mark.law("buffers in flight")
@pytest.mark.law("launch order")
@given(
    limits=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    order=st.permutations(range(6)),
    interrupted=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3),
)
def test_buckets_pass_every_stage_in_order_and_within_its_limit(
    limits: list[int], order: Sequence[int], interrupted: set[tuple[int, int]]
) -> None:
    """Each work is begun once, even if waits are interrupted; then one may be ended again, which does nothing."""
    inside: list[list[int]] = [[] for _ in limits]
    begun: list[list[int]] = [[] for _ in limits]
    left = set(interrupted)

    def stage(number: int, limit: int) -> PipelineStage:
        def begin(bucket: int) -> int:
            assert len(inside[number]) < limit
            assert not number or bucket not in inside[number - 1], "it is in two stages"
            inside[number].append(bucket)
            begun[number].append(bucket)
            return bucket

        def end(bucket: int) -> None:
            if (number, bucket) in left:
                left.discard((number, bucket))
                raise KeyboardInterrupt
            if bucket in inside[number]:  # else it is called again, since what followed was interrupted
                assert inside[number].pop(0) == bucket, "not the oldest"

        return PipelineStage(limit, begin, end)

    def until_it_ends(call: Callable[[], object]) -> None:
        try:
            call()
        except KeyboardInterrupt:
            until_it_ends(call)

    pipeline = Pipeline(*itertools.starmap(stage, enumerate(limits)))
    pipeline.begin_round(range(len(order)))
    for bucket in order:
        until_it_ends(partial(pipeline.ready, bucket))
    until_it_ends(pipeline.finish)
    assert begun == [list(range(len(order)))] * len(limits)
    assert inside == [[] for _ in limits]


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
    blocks: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
        alive = [block for reference in blocks if (block := reference()) is not None]
        assert sum(block.nbytes() for block in alive) == pool.held_bytes, "what was dropped is there beside what is new"
        block = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        blocks.append(weakref.ref(block))
        return block

    pool = Pool(exact=exact, allocate=allocate)
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


def test_after_a_message_that_is_out_of_date_the_next_one_has_its_own_length() -> None:
    def program(transport: Transport) -> list[bytes]:
        texts = iter([b"out of date"] * transport.rank + [b"now"])
        return transport.meet(Tag(Kind.MEET, "a meeting", 1 - transport.rank), lambda: None, lambda: next(texts))

    assert Loopback[list[bytes]](2, timeout=BOUND).run(program) == [[b"now", b"now"]] * 2
