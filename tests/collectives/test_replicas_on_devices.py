"""Hybrid sharding by process groups of replicas and owners has the plain loop's bits, and a failure aborts them.

NCCL is not available here. On threads, transfers finish at their wait and detect every earlier access (see
`tests.support.late`). On processes, gloo's own collectives take NCCL's place.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from collectives import BucketQueue, Choice, CollectiveError, Transport, Work
from collectives.backends import gloo as gloo_backend
from collectives.backends.gloo import GlooBackend
from collectives.topology import _replicas_by_nccl

from ..support.carried import BF16, FP32, assert_same_bits, awkward, plain_sum, reduction
from ..support.late import LateLoopback, on_late_threads
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import rows

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


SUMS = [  # ranks, bounds, dtype of contributions, whether a sum so far comes first
    (2, [0, 100], FP32, True),
    (4, [0, 64, 100], FP32, False),
    (6, [0, 0, 100], BF16, False),
    (6, [0, 30, 30, 100], BF16, True),
]


@pytest.mark.parametrize("case", SUMS, ids=str)
def test_every_replica_has_the_sum_and_touches_no_buffer_under_way(
    case: tuple[int, list[int], torch.dtype, bool],
) -> None:
    """Uneven and empty slices."""
    world_size, bounds, travel, started = case
    factor, numel = len(bounds) - 1, bounds[-1]

    def program(transport: Transport) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
        choice = by_nccl(transport, factor)
        collective, place = choice.collective, choice.shard_group.rank
        low, high = bounds[place], bounds[place + 1]
        sums = [awkward(numel, FP32, bucket)[low:high].clone() for bucket in range(BUCKETS)]

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
            whole = torch.full((numel,), -1.0)
            whole[low:high] = out
            collective.all_gather(whole, bounds, tag=reduction(f"whole {bucket}", 2, bucket)).wait()
            wholes.append(whole)
        return sums, wholes, (sent.payload_sent, sent.payload_received)

    found = on_late_threads(world_size, program)
    for bucket in range(BUCKETS):
        start = awkward(numel, FP32, bucket) if started else None
        expected = plain_sum(start, [contribution(rank, bucket, numel, travel) for rank in range(world_size)], FP32)
        for rank, (sums, wholes, _) in enumerate(found):
            low, high = bounds[rank % factor], bounds[rank % factor + 1]
            assert_same_bits(sums[bucket], expected[low:high])
            assert_same_bits(wholes[bucket], expected)
    inside = (factor - 1) * numel * travel.itemsize * (world_size // factor)
    between = 2 * (world_size // factor - 1) * numel * FP32.itemsize
    for which in range(2):
        assert sum(traffic[which] for _, _, traffic in found) == BUCKETS * (inside + between)


def test_a_replica_in_another_bucket_is_named_before_its_bytes_are_mixed() -> None:
    """Both replicas announced the round together, with the same first bucket."""

    def program(transport: Transport) -> str:
        collective = by_nccl(transport, 2).collective
        for bucket in (0, 7 if transport.rank >= 2 else 3):
            tag = reduction(f"bucket {bucket}", 1, bucket)
            work = collective.reduce_scatter(torch.ones(8), [0, 4, 8], torch.empty(4), start=None, tag=tag)
            try:
                work.wait()
            except CollectiveError as error:
                assert bucket
                return f"{type(error).__name__}: {error}"
        return "nothing"

    for rank, message in enumerate(LateLoopback[str](4, timeout=0.2).run(program)):
        if rank >= 2:
            assert message.startswith("MismatchError")
            assert "bucket 7" in message
        assert "bucket 3" in message


class NoEvents(gloo_backend._UnderWay):
    """Gloo's collectives on the CPU, taken for work on a stream, which has no event here."""

    def awaited(self, device: torch.device) -> None:
        self._not_awaited -= 1


PROGRAMS = rows(
    [
        Program(4, 3, reshard=2, steps=STEPS[1:]),
    ],
    [
        Program(4, 1, sharding_factor=2, steps=STEPS),
        Program(4, 2, sharding_factor=1, steps=STEPS),
        Program(6, 3, "sgd momentum", sharding_factor=3, steps=STEPS[:2]),
    ],
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.world_size}of{p.sharding_factor}-stage{p.stage}")
def test_training_gives_the_bits_of_the_plain_loop(program: Program) -> None:
    with (
        mock.patch("collectives.topology._all_have_nccl", return_value=True),
        mock.patch("collectives.topology.ThreadBackend", NoEvents),  # threads pass for processes
    ):
        results = on_late_threads(program.world_size, lambda transport: run_rank(program, transport))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@pytest.mark.parametrize("case", list(itertools.product((0, 2), (0, 2), (False, True), (False, True))), ids=str)
def test_collectives_that_may_not_have_ended_are_aborted_with_the_group(
    case: tuple[int, int, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of its parts. A kernel that waits for a lost rank would never end, nor would the process."""
    launched, awaited, ended, of_a_part = case
    event, device, of_device, part = mock.Mock(), torch.device("cuda", 0), mock.Mock(), mock.Mock()
    part.abort_collectives.return_value = of_a_part
    event.query.return_value = ended
    monkeypatch.setattr(torch, "Event", lambda of: event if of == device else None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    backend = object.__new__(GlooBackend)
    backend.group = mock.Mock()
    backend._on_streams, backend._parts = gloo_backend._UnderWay(), [part]
    monkeypatch.setattr(gloo_backend, "_backends", lambda group: {"cpu": "gloo", "cuda": "nccl"})
    monkeypatch.setattr(gloo_backend, "_of_device", lambda group, kind: {"cuda": of_device}[kind])
    for _ in range(launched):
        backend._on_streams.launched()
    for _ in range(min(launched, awaited)):
        backend._on_streams.awaited(device)
        event.record.assert_called_with("of cuda:0")
    expected = launched > 0 and (awaited < launched or not ended)
    assert backend.abort_collectives() == (expected or of_a_part)
    assert of_device.abort.call_count == expected


def test_a_collective_that_a_stream_waits_for_is_known_also_when_another_stream_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when sums wait on a stream aside, and units on that of a backward."""
    events = [mock.Mock(), mock.Mock()]
    events[0].query.return_value, events[1].query.return_value = False, True
    made, streams, device = iter(events), iter(["aside", "of the backward"]), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "Event", lambda of: next(made))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: next(streams))
    under_way = gloo_backend._UnderWay()
    for _ in events:
        under_way.launched()
        under_way.awaited(device)
    assert under_way
