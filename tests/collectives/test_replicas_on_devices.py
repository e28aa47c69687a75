"""Hybrid sharding by process groups of the replicas and of the owners of a slice, as on GPUs with NCCL.

NCCL is not available here. On threads, transfers finish at their wait and detect every earlier access (see
`tests.support.late`). On processes, gloo's own collectives take NCCL's place.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import BucketQueue, Choice, CollectiveError, PeerError, Replicated, Transport, Work, topology
from collectives.algorithms.hybrid_sharding import _OnDevice
from collectives.backends import gloo as gloo_backend
from collectives.backends.gloo import GlooBackend, connect
from collectives.topology import _replicas_by_nccl, replicate
from zero import ZeroOptimizer

from ..support.carried import BF16, FP32, SOON, assert_same_bits, awkward, plain_sum, reduction
from ..support.late import LateBackend, LateLoopback, on_late_threads
from ..support.plain import assert_same_states
from ..support.pool import SIZE, GlooPool
from ..support.programs import Program, Round, Step, compare, run_rank
from .test_rendezvous import on_hosts, works

BUCKETS = 5
STEPS = (
    Step((Round(), Round()), clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round())),
    Step((Round(), Round(sync=False)), clear="zeros"),
)


def by_nccl(transport: Transport, factor: int) -> Choice:
    world = range(transport.world_size)
    return _replicas_by_nccl(transport, [world[first : first + factor] for first in world[::factor]])


def contribution(rank: int, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
    return awkward(numel, dtype, 100 * rank + bucket)


# -- the sum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "bounds"),
    [(2, [0, 100]), (4, [0, 100]), (4, [0, 64, 100]), (6, [0, 0, 100]), (6, [0, 30, 30, 100]), (8, [0, 70, 100])],
)
@pytest.mark.parametrize(("travel", "total"), [(FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.by_default("False-travel0-total0-4-bounds2", "True-travel1-total1-6-bounds4")
def test_every_replica_has_the_sum_in_rank_order_and_no_buffer_is_touched_on_its_way(
    world_size: int, bounds: list[int], travel: torch.dtype, total: torch.dtype, started: bool
) -> None:
    """Uneven and empty slices; a sum so far comes first."""
    factor, numel = len(bounds) - 1, bounds[-1]

    def program(transport: Transport) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
        choice = by_nccl(transport, factor)
        collective, place = choice.collective, choice.shard_group.rank
        low, high = bounds[place], bounds[place + 1]
        sums = [awkward(numel, total, bucket)[low:high].clone() for bucket in range(BUCKETS)]

        def launch(bucket: int) -> Work:
            source, out = contribution(transport.rank, bucket, numel, travel), sums[bucket]
            tag = reduction(f"bucket {bucket}", 1, bucket)
            return collective.reduce_scatter(source, bounds, out, start=out if started else None, tag=tag)

        before = transport.traffic
        queue = BucketQueue(launch, 1, 100)
        queue.begin_round(range(BUCKETS))
        queue.finish()
        sent = transport.traffic - before
        wholes = []
        for bucket, out in enumerate(sums):
            whole = torch.full((numel,), -1.0, dtype=total)
            whole[low:high] = out
            collective.all_gather(whole, bounds, tag=reduction(f"whole {bucket}", 2, bucket)).wait()
            wholes.append(whole)
        return sums, wholes, (sent.payload_sent, sent.payload_received)

    found = on_late_threads(world_size, program)
    for bucket in range(BUCKETS):
        start = awkward(numel, total, bucket) if started else None
        expected = plain_sum(start, [contribution(rank, bucket, numel, travel) for rank in range(world_size)], total)
        for rank, (sums, wholes, _) in enumerate(found):
            low, high = bounds[rank % factor], bounds[rank % factor + 1]
            assert_same_bits(sums[bucket], expected[low:high])
            assert_same_bits(wholes[bucket], expected)
    inside = (factor - 1) * numel * travel.itemsize * (world_size // factor)
    between = 2 * (world_size // factor - 1) * numel * total.itemsize
    for which in range(2):
        assert sum(traffic[which] for _, _, traffic in found) == BUCKETS * (inside + between)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[LateBackend, list[tuple[str, int, int]]]:
    """Return what each rank of each process group has launched, as it is launched: (name, rank, elements)."""
    found: dict[LateBackend, list[tuple[str, int, int]]] = defaultdict(list)

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(LateBackend, name)

        def call(self: LateBackend, tensor: Tensor, *given: Any) -> Any:
            found[self].append((name, given[0] if isinstance(given[0], int) else -1, tensor.numel()))
            return real(self, tensor, *given)

        return call

    for name in ("pass_to", "take_from", "broadcast", "all_to_all", "all_gather"):
        monkeypatch.setattr(LateBackend, name, noting(name))
    return found


def test_each_pair_of_replicas_is_connected_before_a_backward(calls: dict[Any, list[tuple[str, int, int]]]) -> None:
    """NCCL makes the communicator of a pair at its first transfer, and both wait for each other then."""
    on_late_threads(6, lambda transport: by_nccl(transport, 2).reason)
    owners = sorted(each for each in calls.values())
    first, middle, last = [("pass_to", 1, 1)], [("take_from", 0, 1), ("pass_to", 2, 1)], [("take_from", 1, 1)]
    assert owners == sorted([first, middle, last] * 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.by_default("0")
def test_both_ranks_of_a_communicator_use_it_in_one_order_whatever_is_ready_first(
    seed: int, calls: dict[LateBackend, list[tuple[str, int, int]]]
) -> None:
    """Otherwise two communicators could wait for each other on a device. Buckets have different lengths."""
    factor, world_size = 2, 6

    def program(transport: Transport) -> None:
        choice = by_nccl(transport, factor)
        queue = BucketQueue(partial(launch, transport, choice.collective), 1, 100)
        for round_ in range(2):
            queue.begin_round(range(BUCKETS))
            ready = Random(f"{seed} {round_} {transport.rank}").sample(range(BUCKETS), BUCKETS)
            for bucket in ready:
                queue.ready(bucket)
            queue.finish()

    def launch(transport: Transport, collective: Any, bucket: int) -> Work:
        length = 8 * (bucket + 1)
        bounds, out = [0, length, 2 * length], torch.empty(length)
        tag = reduction(f"bucket {bucket}", 1 + bucket, bucket)
        work: Work = collective.reduce_scatter(torch.ones(2 * length), bounds, out, start=None, tag=tag)
        return work

    on_late_threads(world_size, program)
    of_owners = [backend for backend in calls if backend.world_size == world_size // factor]
    assert len(of_owners) == world_size
    for one, other in itertools.permutations(of_owners, 2):
        if one._world is other._world and one.rank + 1 == other.rank:
            passed = [numel for name, _, numel in calls[one] if name == "pass_to"]
            taken = [numel for name, source, numel in calls[other] if (name, source) == ("take_from", one.rank)]
            assert passed == taken
            assert len(passed) == 1 + 2 * BUCKETS
        if one._world is other._world:
            totals = [numel for name, _, numel in calls[one] if name == "broadcast"]
            assert totals == [numel for name, _, numel in calls[other] if name == "broadcast"]
            assert len(totals) == 2 * BUCKETS


def test_a_replica_in_another_bucket_is_named_before_its_bytes_are_mixed_with_others() -> None:
    """Both replicas announced the round together, with the same first bucket."""

    def program(transport: Transport) -> str:
        collective = by_nccl(transport, 2).collective
        begin = time.monotonic()
        for bucket in (0, 7 if transport.rank >= 2 else 3):
            tag = reduction(f"bucket {bucket}", 1, bucket)
            work = collective.reduce_scatter(torch.ones(8), [0, 4, 8], torch.empty(4), start=None, tag=tag)
            try:
                work.wait()
            except CollectiveError as error:
                assert bucket
                assert time.monotonic() - begin < SOON
                return f"{type(error).__name__}: {error}"
        return "nothing"

    for rank, message in enumerate(LateLoopback[str](4, timeout=1).run(program)):
        if rank >= 2:
            assert message.startswith("MismatchError")
            assert "bucket 7" in message
        assert "bucket 3" in message


@pytest.mark.parametrize("error", [PeerError("unplugged"), KeyError("a bug")])
@pytest.mark.parametrize("call", ["take_from", "pass_to", "broadcast"])
def test_a_transfer_that_cannot_begin_is_an_error_on_every_rank(call: str, error: Exception) -> None:
    """On the second of three replicas of one rank."""

    def program(transport: Transport) -> str:
        collective = by_nccl(transport, 1).collective
        assert isinstance(collective, Replicated)
        assert isinstance(collective.hops, _OnDevice)
        if transport.rank == 1:
            mock.patch.object(collective.hops._owners, call, side_effect=error).start()
        work = collective.reduce_scatter(torch.ones(8), [0, 8], torch.empty(8), start=None, tag=reduction())
        try:
            work.wait()
            transport.exchange(b"", reduction("later"))
        except (CollectiveError, KeyError) as raised:
            return f"{type(raised).__name__}: {raised}"
        return "nothing"

    for rank, message in enumerate(LateLoopback[str](3, timeout=1).run(program)):
        assert message != "nothing", rank
        if rank == 1:
            assert str(error) in message


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        *(Program(4, stage, sharding_factor=2, steps=STEPS) for stage in (1, 2, 3)),
        *(Program(4, stage, sharding_factor=1, steps=STEPS) for stage in (1, 2)),
        Program(6, 3, "sgd momentum", sharding_factor=3, steps=STEPS),
        Program(4, 3, reshard=2, steps=STEPS),
        Program(8, 3, sharding_factor=4, reshard=2, steps=STEPS[:2]),
    ],
    ids=lambda p: f"{p.world_size}of{p.sharding_factor}-stage{p.stage}",
)
@pytest.mark.by_default("4of2-stage1", "4of2-stage3", "4ofNone-stage3")
def test_training_gives_the_bits_of_the_plain_loop(program: Program) -> None:
    with (
        mock.patch("collectives.topology._all_have_nccl", return_value=True),
        mock.patch("collectives.topology.ThreadBackend", NoEvents),  # threads pass for processes
    ):
        results = on_late_threads(program.world_size, lambda transport: run_rank(program, transport))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


class NoEvents(gloo_backend._UnderWay):
    """Gloo's collectives on the CPU, taken for work on a stream, which has no event here."""

    def awaited(self, device: torch.device) -> None:
        self._not_awaited -= 1


def believed(stack: ExitStack) -> None:
    """Let gloo pass for NCCL, and the CPU for a device."""
    stack.enter_context(mock.patch("collectives.topology._all_have_nccl", return_value=True))
    stack.enter_context(mock.patch.object(gloo_backend, "_UnderWay", NoEvents))
    stack.enter_context(mock.patch.object(GlooBackend, "stays_on", return_value=True))


def on_processes(group: dist.ProcessGroup, rank: int, programs: list[Program]) -> Any:
    with ExitStack() as stack:
        believed(stack)
        return [run_rank(program, group) for program in programs]


def test_so_does_training_on_processes(gloo: GlooPool) -> None:
    """Also what construction copies from rank 0 goes by the group's own broadcast."""
    programs = [
        Program(SIZE, 1, sharding_factor=2, steps=STEPS),
        Program(SIZE, 2, "adamw fused", sharding_factor=1, steps=STEPS[:1]),
        Program(SIZE, 3, sharding_factor=2, steps=STEPS),
        Program(SIZE, 3, reshard=2, steps=STEPS[:2]),
    ]
    by_rank = gloo.run(on_processes, programs, ranks=range(SIZE))
    for number, program in enumerate(programs):
        results = [found[number] for found in by_rank]
        assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


def copies(group: dist.ProcessGroup, rank: int) -> tuple[list[Tensor], int, int]:
    """Return the parameters and buffers that a rank has after construction and `broadcast_buffers`."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    with ExitStack() as stack:
        believed(stack)
        broadcasts = stack.enter_context(mock.patch("torch.distributed.broadcast", side_effect=dist.broadcast))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=1, process_group=group, lr=0.1)
        model[1].running_mean.fill_(float(rank))
        optimizer.broadcast_buffers()
        optimizer.close()
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return values, broadcasts.call_count, optimizer.traffic.payload_sent


def test_rank_0s_values_are_copied_by_the_groups_own_broadcast(gloo: GlooPool) -> None:
    found = gloo.run(copies, ranks=range(3))
    for values, calls, _ in found:
        assert calls > 0
        for ours, theirs in zip(values, found[0][0], strict=True):
            assert_same_bits(ours.view(-1), theirs.view(-1))
    assert found[-1][2] == 0, "the last rank of a ring sends nothing"


# -- the choice --------------------------------------------------------------------------------------------------------


def chosen(group: dist.ProcessGroup, rank: int, hosts: list[int], factor: int) -> tuple[str, str, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooBackend, "device_backend", lambda _, device: {"cuda": "nccl", "cpu": "gloo"}[device.type])
        on_hosts(patch, hosts)
        patch.setattr(topology, "_connect_owners", lambda *_: None)  # there is no such device
        choice = replicate(connect(group).fork(), factor, "auto", torch.device("cuda"))
    assert isinstance(choice.collective, Replicated)
    return works(choice.collective.inner), choice.reason, choice.collective.exact


@pytest.mark.parametrize(
    ("hosts", "factor", "name", "words"),
    [
        ([0, 0, 1, 1], 2, "all_to_all", "2 replicas of 2; with NCCL, each on one host"),
        ([0, 0, 0, 0], 2, "all_to_all", "2 replicas of 2; with NCCL, each on one host"),
        ([0, 1, 0, 1], 2, "native", "2 replicas of 2; with NCCL, some on several hosts, where NCCL adds in an order"),
        ([0, 0, 0, 1], 1, "pairwise", "4 replicas of 1; with NCCL, each on one host"),
    ],
)
def test_what_is_chosen_follows_from_where_the_ranks_of_a_replica_are(
    gloo: GlooPool, hosts: list[int], factor: int, name: str, words: str
) -> None:
    for found, reason, exact in gloo.run(chosen, hosts, factor, ranks=range(SIZE)):
        assert found == name
        assert reason.startswith(words)
        assert exact == (name != "native")


def made(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Return how many process groups exist after each of several optimizers."""
    counts = []
    with ExitStack() as stack:
        believed(stack)
        for stage in (1, 3, 2):
            ZeroOptimizer(
                nn.Linear(8, 8), torch.optim.SGD, stage=stage, process_group=group, sharding_factor=2, lr=0.1
            ).close()
            counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_optimizers_of_one_group_share_its_parts(gloo: GlooPool) -> None:
    for counts in gloo.run(made, ranks=range(SIZE)):
        assert counts[0] == counts[1] == counts[2]


def of_some(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Return what is chosen in a group of three of the job's four ranks."""
    some = dist.new_group([0, 1, 2])
    if rank == 3:
        return []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(GlooBackend, "device_backend", lambda _, device: {"cuda": "nccl", "cpu": "gloo"}[device.type])
        choice = replicate(connect(some).fork(), 1, "auto", torch.device("cuda"))
    assert isinstance(choice.collective, Replicated)
    return [works(choice.collective.inner), choice.reason, *(str(warning.message) for warning in seen)]


def test_in_a_group_of_some_ranks_of_the_job_they_go_through_the_host_which_is_said(gloo: GlooPool) -> None:
    first, *others, outside = gloo.run(of_some, ranks=range(SIZE))
    assert outside == []
    for found in (first, *others):
        assert found[0] == "pairwise"
        assert found[1].startswith("3 replicas of 1; through the host's memory, since")
    assert [len(found) for found in (first, *others)] == [3, 2, 2]
    assert first[2].endswith("give the optimizer the group of all ranks, or leave sharding_factor= away")


def of_parts(group: dist.ProcessGroup, rank: int) -> list[list[float]]:
    """Return what is broadcast in a part of a part of a group."""
    whole = GlooBackend(group, 5.0)
    part = whole.part([[0, 1, 2, 3]]).part([[0, 2], [1, 3]])
    alone = whole.part([[0, 1], [2, 3]]).part([[0], [1]])
    found = []
    for backend in (part, alone):
        tensor = torch.full((2,), float(rank))
        backend.broadcast(tensor, backend.world_size - 1).wait(5.0)
        found.append(tensor.tolist())
    assert alone.world_size == 1
    return found


def test_parts_have_parts(gloo: GlooPool) -> None:
    """As replicas with `reshard_after_forward=k`, which make theirs at the same time."""
    assert gloo.run(of_parts, ranks=range(SIZE)) == [
        [[2.0, 2.0], [0.0, 0.0]],
        [[3.0, 3.0], [1.0, 1.0]],
        [[2.0, 2.0], [2.0, 2.0]],
        [[3.0, 3.0], [3.0, 3.0]],
    ]


def without_memory(group: dist.ProcessGroup, rank: int, error: Exception) -> str:
    make = GlooBackend.part

    def part(self: GlooBackend, parts: Any) -> GlooBackend:
        if rank == 1:
            raise error
        return make(self, parts)

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooBackend, "part", part)
        patch.setattr(gloo_backend._Parts, "of", lambda self, group, *_: group)  # torch's would wait for rank 1
        with pytest.raises((CollectiveError, type(error))) as caught:
            by_nccl(connect(group).fork(), 2)
    assert time.monotonic() - begin < SOON
    return str(caught.value)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("the store is gone")])
def test_a_rank_that_cannot_make_a_process_group_is_named_by_all(gloo: GlooPool, error: Exception) -> None:
    for rank, message in enumerate(gloo.run(without_memory, error, ranks=range(SIZE))):
        assert str(error) in message
        assert "rank 1" in message or rank == 1


# -- a rank that is lost -----------------------------------------------------------------------------------------------


class Recorder:
    """A device's backend that notes that it was aborted."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1


@pytest.mark.parametrize(("launched", "awaited", "ended"), list(itertools.product((0, 2), (0, 2), (False, True))))
def test_collectives_that_may_not_have_ended_are_aborted_with_the_group(
    launched: int, awaited: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that waits for a lost rank would never end, and so neither would the process."""

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def record(self, stream: str) -> None:
            assert stream == "of cuda:0"

        def query(self) -> bool:
            return ended

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    recorder = Recorder()
    backend = object.__new__(GlooBackend)
    backend.group = mock.Mock()
    backend._on_streams, backend._parts = gloo_backend._UnderWay(), []
    monkeypatch.setattr(gloo_backend, "_backends", lambda group: {"cpu": "gloo", "cuda": "nccl"})
    monkeypatch.setattr(gloo_backend, "_of_device", lambda group, kind: {"cuda": recorder}[kind])
    for _ in range(launched):
        backend._on_streams.launched()
    for _ in range(min(launched, awaited)):
        backend._on_streams.awaited(torch.device("cuda", 0))
    expected = launched > 0 and (awaited < launched or not ended)
    assert backend.abort_collectives() == expected
    assert recorder.aborts == expected


def lost(group: dist.ProcessGroup, rank: int) -> tuple[str, int, int]:
    """Fail on rank 1 while collectives are under way; return the later error, and what was aborted."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gloo_backend, "_UnderWay", NoEvents))
        stack.enter_context(mock.patch.object(GlooBackend, "stays_on", return_value=True))
        transport = connect(dist.group.WORLD).fork()
        backend = transport.backend
        assert isinstance(backend, GlooBackend)
        sub = backend.part([range(SIZE)[::2], range(SIZE)[1::2]])
        whole, part = Recorder(), Recorder()
        stack.enter_context(mock.patch.object(gloo_backend, "_backends", return_value={"cuda": "nccl"}))
        stack.enter_context(
            mock.patch.object(gloo_backend, "_of_device", lambda group, _: part if group is sub.group else whole)
        )
        under_way = sub.broadcast(torch.ones(2), 0)
        if rank == 1:
            transport.abort("rank 1 had enough")
        else:
            with pytest.raises(CollectiveError, match="rank 1"):
                transport.exchange(b"", reduction("an exchange"))
        with pytest.raises(CollectiveError, match="closed since an earlier failure") as later:
            transport.check()
        under_way.wait(5.0)
    return str(later.value), whole.aborts, part.aborts


def test_a_failure_aborts_what_is_under_way_in_the_parts_of_its_group(gloo: GlooPool) -> None:
    for message, whole, part in gloo.run(lost, ranks=range(SIZE)):
        assert (whole, part) == (0, 1)
        assert message.endswith(
            "build a new optimizer over a new process group, as this one's collectives on devices were aborted"
        )
