"""A rank that ends as soon as its call has returned is not needed any more: every other rank's call returns, too.

Over gloo, a message leaves its sender when the receive for it was posted. If the sender is gone before, the message is
lost. So a rank returns when every message that it has sent was asked for. Inside a host nothing is lost: what a rank
has sent lies in the receiver's socket.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Collective, Kind, Loopback, Tag, Transport
from collectives.backends.threads import ThreadBackend, _Transfer, _World
from zero import ShardedAverage, ZeroOptimizer

from ..kills import Group, enter, halves
from .test_lost_sends import ALGORITHMS, CALLS, NUMELS, catch_up, exchange, meet

Call = Callable[[Collective, int, Tag], None]


class _EndingWorld(_World):
    """Mailboxes of ranks of which one ends as early as it can.

    No rank of another host asks for a message of ``leaver`` while that one can go on. So it is as far ahead as its
    calls allow when it ends. What it has sent, and no other host has asked for by then, is lost.
    """

    def __init__(self, leaver: int, hosts: Sequence[Sequence[int]]) -> None:
        super().__init__(None)
        self._leaver = leaver
        self._host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self._awaited: _Transfer | None = None  # by the leaver
        self._ended = False

    def are_apart(self, rank: int, other: int) -> bool:
        return self._host[rank] != self._host[other]

    def _leaver_is_blocked(self) -> bool:
        awaited = self._awaited
        return awaited is not None and not awaited.done and (awaited.source is None or awaited.target is None)

    def post(self, key: tuple[int, int, int], tensor: Tensor, sending: bool) -> _Transfer:
        sender, receiver, _ = key
        runs = threading.current_thread().name == f"rank {receiver}"  # else the transport is being made
        if not sending and runs and sender == self._leaver and self.are_apart(sender, receiver):
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._leaver_is_blocked())
        return super().post(key, tensor, sending)

    def complete(self, transfer: _Transfer, peer: int, key: tuple[int, int, int], timeout: float) -> None:
        if threading.current_thread().name != f"rank {self._leaver}":
            super().complete(transfer, peer, key, timeout)
            return
        with self._changed:
            self._awaited = transfer
            self._changed.notify_all()
        super().complete(transfer, peer, key, timeout)
        self._awaited = None

    def end(self, rank: int) -> None:
        """Drop what a rank has sent and no other host has asked for."""
        with self._changed:
            for (sender, receiver, _), transfers in self._sends.items():
                if sender == rank and self.are_apart(sender, receiver):
                    transfers.clear()
            self._gone[rank] = "it has ended"
            self._ended |= rank == self._leaver
            self._changed.notify_all()


class _EndingBackend(ThreadBackend):
    def __init__(self, world: _EndingWorld, rank: int, world_size: int) -> None:
        super().__init__(world, rank, world_size, 10.0)
        self._ending_world = world

    def needs_posted_recv(self, source: int) -> bool:
        return self._ending_world.are_apart(source, self.rank)


class EndingLoopback(Loopback[None]):
    """A group of threads that end when their program returns. ``hosts``: the ranks of each; None: one a host."""

    def __init__(self, world_size: int, leaver: int, hosts: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(world_size)
        self._world: _EndingWorld = _EndingWorld(leaver, hosts or [[rank] for rank in range(world_size)])
        self.transports = [Transport(_EndingBackend(self._world, rank, world_size)) for rank in range(world_size)]

    def until_all_end(self, program: Callable[[Transport], object]) -> None:
        def body(transport: Transport) -> None:
            threading.current_thread().name = f"rank {transport.rank}"
            program(transport)
            self._world.end(transport.rank)

        self.run(body)


ON_HOSTS = [
    *((name, call, True) for name, call in CALLS if name == "hierarchical"),
    *(("pairwise", call, True) for call in (exchange, meet)),
    *((name, catch_up, True) for name in ("ring", "ring by a tree")),
]


@pytest.mark.parametrize(
    ("algorithm", "call", "on_hosts"),
    [*((name, call, False) for name, call in CALLS if name != "hierarchical"), *ON_HOSTS],
)
@pytest.mark.by_default(
    "pairwise-exchange-False", "pairwise-meet-True", "tree-meet-False", "ring by a tree-catch_up-True"
)
def test_no_rank_needs_one_whose_call_has_returned(algorithm: str, call: Call, on_hosts: bool) -> None:
    for world_size in (2, 3, 4, 7)["tree" in algorithm :]:
        for leaver in range(world_size):
            for number, numel in enumerate(NUMELS, 1):

                def program(transport: Transport, number: int = number, numel: int = numel) -> None:
                    collective = ALGORITHMS[algorithm](transport)
                    call(collective, numel, Tag(Kind.REDUCE_SCATTER, "bucket 0", number, number))

                hosts = halves(world_size) if on_hosts else None
                EndingLoopback(world_size, leaver, hosts).until_all_end(program)


# -- the calls of an optimizer -----------------------------------------------------------------------------------------


class Training:
    """An optimizer after a step on one rank, with gradients for the next."""

    def __init__(self, transport: Transport | None, stage: int, collective: str = "pairwise") -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)))
        self.optimizer = ZeroOptimizer(
            self.model, stage=stage, process_group=transport, collective=collective, bucket_cap_mb=1e-5, lr=0.1
        )
        self.average = ShardedAverage(self.optimizer)
        self.backward()
        self.optimizer.step()
        self.average.update_parameters()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        inputs: Tensor = torch.ones(2, 3)
        self.model(inputs).square().sum().backward()


def stepped(training: Training) -> None:
    training.backward()
    training.optimizer.step()


def clipped(training: Training) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(1.0)


def read(training: Training) -> None:
    training.backward()
    training.optimizer.full_grad(next(training.model.parameters()))


def gathered(training: Training, *, write: bool = False) -> None:
    with training.optimizer.gathered(write=write):
        pass


def joined(training: Training) -> None:
    with training.optimizer.join():
        if training.optimizer.rank:
            stepped(training)


LAST: dict[str, Callable[[Training], object]] = {
    "the constructor": lambda training: None,
    "backward": Training.backward,
    "step": stepped,
    "clip_grad_norm_": clipped,
    "full_grad": read,
    "full_master": lambda training: training.optimizer.full_master(next(training.model.parameters())),
    "gathered": gathered,
    "gathered(write=True)": lambda training: gathered(training, write=True),
    "broadcast_buffers": lambda training: training.optimizer.broadcast_buffers(),
    "check_replicas": lambda training: training.optimizer.check_replicas(),
    "consolidate_state_dict(0)": lambda training: training.optimizer.consolidate_state_dict(0),
    "consolidate_state_dict(None)": lambda training: training.optimizer.consolidate_state_dict(None),
    "gather(0)": lambda training: training.average.gather(0),
    "gather(None)": lambda training: training.average.gather(None),
    "sum_over_ranks": lambda training: training.optimizer.sum_over_ranks(1),
    "join": joined,
    "close": lambda training: training.optimizer.close(),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("last", LAST)
@pytest.mark.by_default("step-3", "gather(0)-3", "consolidate_state_dict(0)-3", "check_replicas-1")
def test_a_rank_may_end_when_its_last_call_has_returned(last: str, stage: int) -> None:
    for leaver in range(3):
        EndingLoopback(3, leaver).until_all_end(lambda transport: LAST[last](Training(transport, stage)))


def ends_at_once(rank: int, port: int, pipe: Connection, collective: str, last: str, how: str) -> None:
    enter(rank, 3, port, 60.0)
    training = Training(None, 3, collective)
    try:
        LAST[last](training)
    except Exception as error:
        pipe.send(str(error))
    else:
        pipe.send("returned")
    if how == "destroy_process_group":
        dist.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize("how", ["os._exit", "destroy_process_group"])
@pytest.mark.parametrize(
    ("collective", "last"), [("pairwise", "step"), ("pairwise", "consolidate_state_dict(0)"), ("shared", "step")]
)
@pytest.mark.full
def test_processes_may_end_at_once_too(collective: str, last: str, how: str) -> None:
    for _ in range(3):
        group = Group(ends_at_once, 3, collective, last, how)
        try:
            assert [group.hear(rank) for rank in range(3)] == ["returned"] * 3
        finally:
            group.end()
