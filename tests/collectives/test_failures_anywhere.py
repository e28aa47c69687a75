"""A rank that fails at any step is named by all at once, and no rank waits for a send that may be lost with it.

Each send, receive and wait of a rank is a step at which it may fail. Ranks are threads; `test_deaths` has processes.

If a receiver is killed before it has received, gloo may drop the send without an error, and the wait lasts until the
time limit, half an hour by default. A receive from a rank that is gone does report an error. So a rank waits for a send
only after it has heard from the receiver since that one posted the receive: by a message of the same collective, or an
ack.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Collective,
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Replicated,
    Ring,
    Shared,
    Tag,
    Transport,
    broadcast,
    transport,
)
from collectives.backend import Pending
from collectives.backends.threads import ThreadBackend, _World
from collectives.links import messenger
from collectives.messages import GoneError
from zero.core.layout import EvenCuts
from zero.state.gather import gather_to

from ..kills import LABEL, by_tree, halves, launch
from ..support.carried import CPU, FEWER, FP32, folded, reduction
from ..support.limits import BOUND
from ..support.programs import Program, compare, run_rank
from ..support.rows import only, rows
from ..support.sockets import meet, routed
from .clock import Clocked

PART = 1 << 13  # the least elements of a part here, so that large messages are sent in several
NUMELS = [0, 12, messenger.SMALL, 4 * messenger.SMALL + 4]  # some slices are empty, small, large and acknowledged
ALGORITHMS: dict[str, Callable[[Transport], Collective]] = {
    "pairwise": Pairwise,
    "ring": Ring,
    "shared": Shared,
    "hierarchical": lambda t: Hierarchical(t, halves(t.world_size)),
    "fold": folded,
    "tree": lambda t: Pairwise(by_tree(t)),
}
WHATS = ("reduce_scatter", "all_gather", "broadcast", "exchange", "meet")
ROWS = [f"{algorithm} {what}" for algorithm in ALGORITHMS for what in WHATS]


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LEAST", PART)
        patch.setattr(transport, "CHUNK", 4 * PART)
        patch.setattr(broadcast, "CHUNK", 4 * PART)
        yield


FIRST = [
    *("pairwise all_gather", "pairwise meet", "ring all_gather", "ring exchange", "hierarchical all_gather"),
    *("shared all_gather", "shared meet", "tree exchange", "tree meet"),
]


@pytest.mark.parametrize("row", only(ROWS, *FIRST))
@given(
    world_size=st.integers(2, 4),
    victim=st.integers(0, 3),
    step=st.integers(0, 80),
    leaves=st.booleans(),
    numel=st.sampled_from(NUMELS),
)
@FEWER
def test_a_rank_that_fails_at_any_step_is_named_at_once(
    row: str, world_size: int, victim: int, step: int, leaves: bool, numel: int
) -> None:
    algorithm, what = row.split()
    if algorithm == "tree":
        world_size += 2
    victim %= world_size
    ready, armed = threading.Barrier(world_size), threading.Event()
    steps, errors = itertools.count(), dict[int, str]()

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed.is_set() and rank == victim and next(steps) == step:
            raise ZeroDivisionError

    def program(transport: Transport) -> None:
        collective = ALGORITHMS[algorithm](transport)
        ready.wait()
        armed.set()
        try:
            for number in itertools.count(1):
                launch(collective, what, number, numel)()
        except CollectiveError as error:
            errors[transport.rank] = str(error)
        except ZeroDivisionError:
            collective.transport.abort("the disk is full")
            if leaves:
                raise

    group = Clocked[None](world_size, interfere=interfere)
    try:
        group.run(program)
    except ZeroDivisionError:
        assert leaves
    assert group.now < 1.0, "a time limit ended it, not a message"
    assert set(errors) == set(range(world_size)) - {victim}
    for rank, error in errors.items():
        assert error.startswith(f"rank {rank}, in {LABEL}: rank {victim} failed: "), error
        assert "the disk is full" in error or "ZeroDivisionError" in error


READERS: dict[str, Callable[[Transport], Transport]] = {
    "threads": lambda t: t,
    "a host": lambda t: Transport(meet(t)),
    "a host of two": lambda t: routed(t, [[0, 1], [2]]),
}


@pytest.mark.parametrize("place", READERS)
def test_a_rank_whose_memory_is_read_learns_that_the_reader_failed(place: str) -> None:
    kept = list[Transport]()  # else the end of a connection would tell it

    def program(transport: Transport) -> None:
        t = READERS[place](transport)
        kept.append(t)
        if t.rank == 0:
            exposed = t.expose(t.scratch(4, FP32, CPU), [(1, 0, 4)], reduction())
            with pytest.raises(CollectiveError, match="rank 1 failed: the disk is full") as caught:
                exposed.wait()
            assert isinstance(caught.value.__cause__, GoneError), "a time limit ended it, not a message"
        elif t.rank == 1:
            t.map_buffers([(0, 4)], FP32, reduction()).wait()
            t.abort("the disk is full")

    Loopback[None](3, timeout=BOUND).run(program)


class HearingWorld(_World):
    """Mailboxes that number sends and receives in the order in which the threads post them."""

    def __init__(self) -> None:
        super().__init__(None)
        self._numbers = itertools.count(1)

    def post(self, key: tuple[int, int, int], tensor: Tensor, sending: bool) -> Any:
        with self._changed:
            transfer = super().post(key, tensor, sending)
            setattr(transfer, "sent" if sending else "posted", next(self._numbers))
            return transfer


class HearingBackend(ThreadBackend):
    """Ranks as threads. The wait for a send checks that its receiver has been heard from.

    ``heard``: by rank, the number of the last send that was heard of.
    """

    def __init__(self, world: _World, rank: int, world_size: int) -> None:
        super().__init__(world, rank, world_size, timeout=30.0)
        self.heard = defaultdict[int, int](int)

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        side: Any = super().send(tensor, to, slot)
        transfer = side._transfer

        def wait(timeout: float) -> None:
            posted = getattr(transfer, "posted", None)
            assert posted is not None, f"rank {to} has not posted a receive for this send"
            assert posted < self.heard[to], f"rank {to} was not heard from since it posted the receive"
            side.wait(timeout)

        return SimpleNamespace(wait=wait)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        side: Any = super().recv(tensor, source, slot)
        transfer = side._transfer

        def wait(timeout: float) -> None:
            side.wait(timeout)
            self.heard[source] = max(self.heard[source], transfer.sent)

        return SimpleNamespace(wait=wait)


class HearingLoopback(Loopback[None]):
    """A group of threads with `HearingBackend`."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        world = self._world = HearingWorld()  # the transports of `Loopback` already listen in the world that it made
        self.transports = [Transport(HearingBackend(world, rank, world_size)) for rank in range(world_size)]


@pytest.mark.parametrize(
    "row",
    only(
        [row for row in ROWS if not row.startswith("shared")],
        "pairwise exchange",
        "pairwise meet",
        "ring reduce_scatter",
        "hierarchical all_gather",
        "tree meet",
    ),
)
def test_a_send_is_waited_for_only_after_its_receiver_was_heard_from(row: str) -> None:
    algorithm, what = row.split()

    def program(transport: Transport) -> None:
        collective = ALGORITHMS[algorithm](transport)
        for number, numel in enumerate([*NUMELS, *NUMELS], 1):
            launch(collective, what, number, numel)()

    for world_size in (2, 3, 4, 7)[algorithm == "tree" :]:
        HearingLoopback(world_size).run(program)


@pytest.mark.parametrize("most_deferred", [0, 1])
def test_an_ack_is_waited_for_only_after_its_receiver_was_heard_from(
    most_deferred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When states are gathered, and when a sum goes through replicas."""
    monkeypatch.setattr(messenger, "MOST_DEFERRED", most_deferred)

    def program(transport: Transport) -> None:
        replicated = Replicated(transport, Pairwise(transport.split([transport.rank])))
        for number, numel in enumerate([2, *NUMELS], 1):
            cuts = EvenCuts(numel * transport.world_size, transport.world_size, 1)
            gather_to(torch.ones(numel), cuts, transport, [0], Tag(Kind.EXCHANGE, "states", number))
            tag, out = Tag(Kind.REDUCE_SCATTER, "bucket 0", number), torch.empty(numel)
            replicated.reduce_scatter(torch.ones(numel), [0, numel], out, start=None, tag=tag).wait()

    HearingLoopback(4).run(program)


@pytest.mark.parametrize("algorithm", rows(["pairwise"], ["ring", "hierarchical"]))
def test_a_reduction_does_not_wait_for_the_gather_before_it(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward at stage 3 the next unit's gather is launched before the reductions of this unit, and waited for
    after them: also where all messages are large, and so acknowledged. Units have several buckets."""
    program: Any = Program(2, 3, collective=ALGORITHMS[algorithm])  # type: ignore[arg-type]
    for small in (0, messenger.SMALL):
        monkeypatch.setattr(messenger, "SMALL", small)
        found = Clocked[Any](2).run(lambda transport: run_rank(program, transport))
        if algorithm != "ring":
            compare(program, found)
