"""A rank waits for a send only after it has heard from the receiver since that one posted the receive.

If the receiver is killed before it has received, gloo may drop the send without an error, and the wait lasts until the
time limit, half an hour by default. A receive from a rank that is gone does report an error. So a rank waits for a
message from the receiver first: one of the same collective, or an ack.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import (
    Algorithm,
    Collective,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Replicated,
    Ring,
    Tag,
    Transport,
    messenger,
    ring_broadcast,
)
from collectives.backend import Pending
from collectives.backends.threads import ThreadBackend, _Side, _Transfer, _World
from zero import ZeroOptimizer
from zero.core.cuts import EvenCuts
from zero.state.gather import gather_to

from ..kills import by_tree, halves
from ..support.plain import assert_same_model, plain_step
from ..support.pool import GlooPool

LARGE = 300  # a unit's buckets have as many rows and columns
NUMELS = [1, 12, messenger.SMALL, messenger.SMALL + 1]  # some slices are empty, small, large


class Clock:
    """When each transfer was sent, and when its receive was posted, in the order in which the threads did so."""

    def __init__(self) -> None:
        self._ticks, self._lock = itertools.count(1), threading.Lock()
        self._sent: dict[_Transfer, int] = {}
        self._posted: dict[_Transfer, int] = {}

    def send(self, post: Callable[[], Pending]) -> _Side:
        return self._record(post, self._sent)

    def recv(self, post: Callable[[], Pending]) -> _Side:
        return self._record(post, self._posted)

    def _record(self, post: Callable[[], Pending], times: dict[_Transfer, int]) -> _Side:
        with self._lock:
            side = post()
            assert isinstance(side, _Side)
            times[side._transfer] = next(self._ticks)
            return side

    def sent(self, side: _Side) -> int:
        with self._lock:
            return self._sent[side._transfer]

    def posted(self, side: _Side) -> int | None:
        with self._lock:
            return self._posted.get(side._transfer)


class Sent:
    """A send whose wait checks that its receiver has been heard from."""

    def __init__(self, backend: HearingBackend, side: _Side, to: int) -> None:
        self._backend, self._side, self._to = backend, side, to

    def wait(self, timeout: float) -> None:
        posted = self._backend.clock.posted(self._side)
        assert posted is not None, f"rank {self._to} has not posted a receive for this send"
        assert posted < self._backend.heard[self._to], f"rank {self._to} was not heard from since it posted the receive"
        self._side.wait(timeout)


class Received:
    """A receive that records when what it brings was sent."""

    def __init__(self, backend: HearingBackend, side: _Side, source: int) -> None:
        self._backend, self._side, self._source = backend, side, source

    def wait(self, timeout: float) -> None:
        self._side.wait(timeout)
        heard = self._backend.heard
        heard[self._source] = max(heard[self._source], self._backend.clock.sent(self._side))


class HearingBackend(ThreadBackend):
    """Ranks as threads, with `Sent` and `Received`."""

    def __init__(self, world: _World, clock: Clock, rank: int, world_size: int) -> None:
        super().__init__(world, rank, world_size, timeout=30.0)
        self.clock, self.heard = clock, defaultdict[int, int](int)

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        send = super().send
        return Sent(self, self.clock.send(lambda: send(tensor, to, slot)), to)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        recv = super().recv
        return Received(self, self.clock.recv(lambda: recv(tensor, source, slot)), source)


class HearingLoopback(Loopback[None]):
    """A group of threads with `HearingBackend`."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._world = _World(None)  # the transports of `Loopback` already listen in the world that it made
        clock = Clock()
        self.transports = [
            Transport(HearingBackend(self._world, clock, rank, world_size)) for rank in range(world_size)
        ]


def reduce_scatter(collective: Collective, numel: int, tag: Tag) -> None:
    owners = 1 if isinstance(collective, Replicated) else collective.transport.world_size
    bounds = [numel * rank // owners for rank in range(owners + 1)]
    rank = collective.transport.rank % owners
    out = torch.empty(bounds[rank + 1] - bounds[rank])
    collective.reduce_scatter(torch.ones(numel), bounds, out, start=None, tag=tag).wait()


def all_gather(collective: Collective, numel: int, tag: Tag) -> None:
    world_size = collective.transport.world_size
    bounds = [numel * rank // world_size for rank in range(world_size + 1)]
    collective.all_gather(torch.ones(numel), bounds, tag=tag).wait()


def gather_states(collective: Collective, numel: int, tag: Tag) -> None:
    transport = collective.transport
    cuts = EvenCuts(numel * transport.world_size, transport.world_size, 1)
    gather_to(torch.ones(numel), cuts, transport, [0], tag)


def exchange(collective: Collective, numel: int, tag: Tag) -> None:
    collective.transport.exchange(bytes(numel), tag)


def broadcast(collective: Collective, numel: int, tag: Tag) -> None:
    ring_broadcast(collective.transport, [torch.ones(numel)] * 4, replace(tag, kind=Kind.BROADCAST))


def meet(collective: Collective, numel: int, tag: Tag) -> None:
    collective.transport.meet(replace(tag, round=0), lambda: None, lambda: bytes(numel))


def catch_up(collective: Collective, numel: int, tag: Tag) -> None:
    """Let ranks that have entered fewer rounds than others catch up at a meeting."""
    entered = tag.index * 3
    first = entered

    def enter() -> None:
        nonlocal entered
        entered += 1
        reduce_scatter(collective, numel, replace(tag, label=f"round {entered}", round=entered))

    for _ in range((collective.transport.rank + tag.index) % 3):
        enter()
    collective.transport.meet(replace(tag, kind=Kind.MEET, round=entered), enter, lambda: bytes(entered - first))


ALGORITHMS: dict[str, Callable[[Transport], Collective]] = {
    "pairwise": Pairwise,
    "ring": Ring,
    "hierarchical": lambda t: Hierarchical(t, halves(t.world_size)),
    "replicated": lambda t: Replicated(t, Pairwise(t.split([t.rank]))),
    "tree": lambda t: Pairwise(by_tree(t)),
    "ring by a tree": lambda t: Ring(by_tree(t)),
}
CALLS = [
    *((name, reduce_scatter) for name in ALGORITHMS if "tree" not in name),
    *((name, all_gather) for name in ("pairwise", "ring", "hierarchical")),
    *(("pairwise", call) for call in (gather_states, broadcast, exchange, meet)),
    *(("tree", call) for call in (exchange, meet)),
    *((name, catch_up) for name in ("ring", "ring by a tree")),
]


@pytest.mark.parametrize(("algorithm", "call"), CALLS)
@pytest.mark.by_default
def test_a_send_is_waited_for_only_after_its_receiver_was_heard_from(
    algorithm: str, call: Callable[[Collective, int, Tag], None]
) -> None:
    def program(transport: Transport) -> None:
        collective = ALGORITHMS[algorithm](transport)
        for number, numel in enumerate([*NUMELS, *NUMELS], 1):
            call(collective, numel, Tag(Kind.REDUCE_SCATTER, "bucket 0", number, number))

    for world_size in (2, 3, 4, 7)["tree" in algorithm :]:
        HearingLoopback(world_size).run(program)


@pytest.mark.parametrize("most_deferred", [0, 1])
def test_an_ack_is_waited_for_only_after_its_receiver_was_heard_from(
    most_deferred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger, "MOST_DEFERRED", most_deferred)

    def program(transport: Transport) -> None:
        for number in range(3):
            gather_states(Pairwise(transport), 2, Tag(Kind.EXCHANGE, "states", number))

    HearingLoopback(4).run(program)


def units_of_two_buckets(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))) for _ in range(3)))


def batches(width: int, ranks: int) -> Tensor:
    """Return two steps of a micro-batch for each rank."""
    return torch.arange(2.0 * ranks * width).view(2, ranks, 1, width) / width


def plain(width: int, ranks: int) -> nn.Sequential:
    model = units_of_two_buckets(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in batches(width, ranks):
        plain_step(model, optimizer, lambda model, batch: model(batch).sum(), step, ranks)
        optimizer.zero_grad()
    return model


def train(
    model: nn.Module, width: int, group: Transport | dist.ProcessGroup, rank: int, ranks: int, algorithm: Algorithm
) -> nn.Module:
    optimizer = ZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=3,
        process_group=group,
        collective=algorithm,
        bucket_cap_mb=width * width * 4 / 2**20,
        lr=1e-3,
    )
    assert len(optimizer._storage.layout.buckets) == 6
    for step in batches(width, ranks):
        model(step[rank]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "hierarchical"])
@pytest.mark.parametrize("small", [0, messenger.SMALL])
@pytest.mark.by_default
def test_a_reduction_does_not_wait_for_the_gather_before_it(
    algorithm: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a backward at stage 3 the next unit's gather is launched before the reductions of this unit, and waited for
    after them. All messages of more than ``small`` bytes are acknowledged."""
    monkeypatch.setattr(messenger, "SMALL", small)

    def program(transport: Transport) -> nn.Module:
        return train(models[transport.rank], 8, transport, transport.rank, 2, ALGORITHMS[algorithm])

    models = [units_of_two_buckets(8) for _ in range(2)]
    for model in Loopback[nn.Module](2, timeout=10.0).run(program):
        assert_same_model(model, plain(8, 2))


def trained_over_gloo(group: dist.ProcessGroup, rank: int) -> nn.Module:
    return train(units_of_two_buckets(LARGE), LARGE, group, rank, dist.get_world_size(group), Pairwise)


def test_neither_does_it_on_processes(gloo: GlooPool) -> None:
    """Large messages are always acknowledged."""
    assert LARGE * LARGE * 4 / 4 > messenger.SMALL
    for model in gloo.run(trained_over_gloo, ranks=range(4)):
        assert_same_model(model, plain(LARGE, 4))
