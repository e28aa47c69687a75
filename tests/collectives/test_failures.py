"""A rank that disagrees, aborts or fails at any step is named by all at once, and no rank waits for a lost send.

Each send, receive and wait of a rank is a step at which it may fail.

If a receiver is killed before it has received, gloo may drop the send without an error, and the wait lasts until the
time limit, half an hour by default. A receive from a rank that is gone does report an error. So a rank waits for a send
only after it has heard from the receiver since that one posted the receive: by a message of the same collective, or an
ack.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import collectives
from collectives import (
    ALGORITHMS,
    Algorithm,
    Collective,
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    PeerError,
    Replicated,
    Shared,
    Tag,
    Transport,
    broadcast,
    transport,
)
from collectives.backend import Pending
from collectives.backends.threads import Interference, ThreadBackend, _Transfer, _World
from collectives.links import control_plane, messenger
from collectives.links.control_plane import MESH_RANKS
from collectives.links.messenger import SMALL
from collectives.named import Needs
from zero.core.layout import EvenCuts
from zero.state.gather import gather_to

from ..dials.loops import steps
from ..dials.record import config_with
from ..kills import LABEL, Case, by_tree, halves, launch, run
from ..support.carried import FEWER, FP32, FP64, built, each, hosts_of, jitter
from ..support.late import LateLoopback, Threads
from ..support.limits import PATIENT, at_once
from ..support.machine.run import Played, play
from ..support.machine.run import run as run_program
from ..support.rows import only, rows

T = TypeVar("T")


class _Clock(threading.Condition):
    """A condition that all ranks share, and the time, which moves only while all wait: a time limit takes no time.

    rank 0   runs . waits until 60 ......
    rank 1   runs ....... waits until 30      all ranks wait: the clock goes to 30, and the wait of rank 1 ends
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.now, self.ranks = 0.0, ranks
        self._until: dict[int, float] = {}  # thread -> when its wait ends

    def notify_all(self) -> None:
        self._until.clear()
        super().notify_all()

    def pause(self, moment: float) -> None:
        """Wait for a change, or for the moment. The caller holds the lock."""
        self._until[threading.get_ident()] = moment
        if len(self._until) < self.ranks:
            self.wait()
            return
        self.now = min(self._until.values())
        self.notify_all()


class _ClockedWorld(_World):
    def __init__(self, ranks: int, interfere: Interference | None) -> None:
        super().__init__(interfere)
        self.clock = self._changed = _Clock(ranks)

    def complete(self, transfer: _Transfer, peer: int, key: tuple[int, int, int], timeout: float) -> None:
        clock = self.clock
        with clock:
            limit = clock.now + timeout
            while not transfer.done and (transfer.source is None or transfer.target is None):
                if key in self._closed_slots or peer in self._gone:
                    break
                if clock.now >= limit:
                    raise PeerError(f"time limit of {timeout} s passed")
                clock.pause(limit)
            super().complete(transfer, peer, key, timeout)


class Clocked(Loopback[T]):
    """A group of threads whose time limits are those of a virtual clock, `now`, by which the library measures, too."""

    def __init__(self, world_size: int, *, timeout: float = 60.0, interfere: Interference | None = None) -> None:
        super().__init__(world_size)
        world = self._world = self._clocked = _ClockedWorld(world_size, interfere)
        self.transports = [Transport(ThreadBackend(world, rank, world_size, timeout)) for rank in range(world_size)]

    @property
    def now(self) -> float:
        return self._clocked.clock.now

    def sleep(self, seconds: float) -> None:
        """Let this rank do nothing for some seconds."""
        clock = self._clocked.clock
        with clock:
            end = clock.now + seconds
            while clock.now < end:
                clock.pause(end)

    def run(self, program: Callable[[Transport], T], ranks: Sequence[int] | None = None) -> list[T]:
        def until_the_end(transport: Transport) -> T:
            clock = self._clocked.clock
            try:
                return program(transport)
            except BaseException as error:  # before the clock may move on
                self._clocked.mark_gone(transport.rank, f"{type(error).__name__}: {error}")
                raise
            finally:
                with clock:
                    clock.ranks -= 1
                    clock.notify_all()

        with pytest.MonkeyPatch.context() as patch:
            for module in (control_plane, messenger):
                patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
            return super().run(until_the_end, ranks)


PART = 1 << 13  # the least elements of a part here, so that large messages are sent in several
NUMELS = [0, 12, messenger.SMALL, 4 * messenger.SMALL + 4]  # some slices are empty, small, large and acknowledged
OF_A_BACKEND = [name for name, row in ALGORITHMS.items() if row.needs is Needs.PROCESS_GROUP]
BUILT: dict[str, Algorithm] = {
    **{name: built(name) for name in ALGORITHMS if name not in OF_A_BACKEND},
    "hierarchical": lambda t: Hierarchical(t, halves(t.world_size)),
    "tree": lambda t: Pairwise(by_tree(t)),
}
WHATS = ("reduce_scatter", "all_gather", "broadcast", "exchange", "meet")
ROWS = [f"{algorithm} {what}" for algorithm in BUILT for what in WHATS]


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LEAST", PART)
        patch.setattr(transport, "CHUNK", 4 * PART)
        patch.setattr(broadcast, "CHUNK", 4 * PART)
        yield


def enter(collective: Collective, tag: Tag, bounds: Sequence[int] = (0, 2, 4), dtype: torch.dtype = FP32) -> None:
    t, whole = collective.transport, torch.ones(bounds[-1], dtype=dtype)
    if tag.kind is Kind.EXCHANGE:
        t.exchange(b"", tag)
    elif tag.kind is Kind.ALL_GATHER:
        collective.all_gather(whole, bounds, tag=tag).wait()
    else:
        out = torch.empty(bounds[t.rank + 1] - bounds[t.rank])
        collective.reduce_scatter(whole, bounds, out, start=None, tag=tag).wait()


FIRST = Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 5)
SECOND = Tag(Kind.REDUCE_SCATTER, "the second", 3, 4, 5)
OTHERS: dict[str, tuple[Any, ...]] = {  # the tag of rank 1, the bounds of each rank, the dtype of rank 1
    "kind": (Tag(Kind.ALL_GATHER, "the first", 3, 4, 5),),
    "label": (SECOND,),
    "label, rank 0 has nothing": (SECOND, (0, 0, 4), (0, 0, 4)),
    "label, rank 1 has nothing": (SECOND, (0, 4, 4), (0, 4, 4)),
    "round": (Tag(Kind.REDUCE_SCATTER, "the first", 2, 4, 5),),
    "index": (Tag(Kind.REDUCE_SCATTER, "the first", 3, 6, 5),),
    "digest": (Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 6),),
    "size": (FIRST, (0, 2, 4), (0, 3, 6)),
}
MIXED: dict[str, tuple[Any, ...]] = {  # bytes that a collective of the backend would mix
    "exchange": (Tag(Kind.EXCHANGE, "consolidate"),),
    "cut": (FIRST, (0, 2, 4), (0, 1, 4)),
    "dtype": (FIRST, (0, 2, 4), (0, 2, 4), FP64),
}


@pytest.mark.parametrize("name", rows(["pairwise", "ring", "shared", "hierarchical", "native"], ["all_to_all"]))
def test_ranks_in_different_collectives_both_learn_of_both(name: str) -> None:
    build = built(name)
    for difference, (tag, *more) in (OTHERS | MIXED if name in OF_A_BACKEND else OTHERS).items():
        first, second, *dtype = more or [(0, 2, 4)] * 2
        given = (FIRST, first), (tag, second, *dtype)
        make: Any = LateLoopback if name in OF_A_BACKEND else Loopback
        with at_once():
            errors = each(make(2, timeout=PATIENT), lambda t, given=given: enter(build(t), *given[t.rank]))
        for rank, error in enumerate(errors):
            assert isinstance(error, MismatchError), (difference, error)
            for number, own in enumerate((FIRST, tag)):
                said = f"{own.label} [{own.kind.name.lower()}, round {own.round}, index {own.index}]"
                assert f"rank {number} is in {said}" in str(error), difference
            if difference == "size" and name not in OF_A_BACKEND:
                assert ("(8 and 12 bytes)", "(12 and 8 bytes)")[rank] in str(error)


WAITS: dict[str, Callable[[Transport], Any]] = {
    "reduce_scatter": lambda t: enter(Shared(t), FIRST, range(0, 2 * t.world_size + 1, 2)),
    "exchange": lambda t: t.exchange(b"", Tag(Kind.EXCHANGE, "step()")),
    "meet": lambda t: t.meet(Tag(Kind.MEET, "step()"), lambda: None),
    "fork": lambda t: t.fork(),
}


@pytest.mark.law("errors")
@pytest.mark.parametrize("wait", WAITS)
def test_an_abort_reaches_every_peer_with_its_reason(wait: str) -> None:
    reason = "a" + "é" * 5000

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.abort(reason)
        else:
            WAITS[wait](transport)

    group = Loopback[Any](3, timeout=PATIENT)
    with at_once():
        errors = each(group, program)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerError), errors[rank]
        assert "rank 1 failed" in str(errors[rank])
        assert reason[:2000] in str(errors[rank])
    for closed_by, again in itertools.product(group.transports, WAITS.values()):
        with pytest.raises(CollectiveError, match=r"this communicator is closed.*build a new") as closed:
            again(closed_by)
        assert reason[:2000] in str(closed.value)


BEGINNING = [
    *("pairwise all_gather", "pairwise meet", "ring all_gather", "ring exchange", "hierarchical all_gather"),
    *("shared all_gather", "shared meet", "tree exchange", "tree meet"),
]


@pytest.mark.parametrize("row", only(ROWS, *BEGINNING))
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
        collective = BUILT[algorithm](transport)
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


def test_every_other_process_names_the_one_that_is_gone_and_the_collective() -> None:
    run(Case("pairwise", "all_gather", 3, 2))


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


def on_hearing_threads(world_size: int, program: Callable[[Transport], None]) -> None:
    Threads[None](world_size, lambda world, rank: HearingBackend(world, rank, world_size), HearingWorld()).run(program)


@pytest.mark.parametrize(
    "row",
    only(
        [row for row in ROWS if not row.startswith("shared")],
        *("pairwise exchange", "pairwise meet", "ring reduce_scatter", "hierarchical all_gather", "tree meet"),
    ),
)
def test_a_send_is_waited_for_only_after_its_receiver_was_heard_from(row: str) -> None:
    algorithm, what = row.split()

    def program(transport: Transport) -> None:
        collective = BUILT[algorithm](transport)
        for number, numel in enumerate([*NUMELS, *NUMELS], 1):
            launch(collective, what, number, numel)()

    for world_size in (2, 3, 4, 7)[algorithm == "tree" :]:
        on_hearing_threads(world_size, program)


@pytest.mark.parametrize("most_deferred", [0, 1])
def test_an_ack_is_waited_for_only_after_its_receiver_was_heard_from(
    most_deferred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger, "MOST_DEFERRED", most_deferred)

    def program(transport: Transport) -> None:
        replicated = Replicated(transport, Pairwise(transport.split([transport.rank])))
        for number, numel in enumerate([2, *NUMELS], 1):
            cuts = EvenCuts(numel * transport.world_size, transport.world_size, 1)
            gather_to(torch.ones(numel), cuts, transport, [0], Tag(Kind.EXCHANGE, "states", number))
            tag, out = Tag(Kind.REDUCE_SCATTER, "bucket 0", number), torch.empty(numel)
            replicated.reduce_scatter(torch.ones(numel), [0, numel], out, start=None, tag=tag).wait()

    on_hearing_threads(4, program)


@pytest.mark.parametrize("algorithm", rows(["pairwise"], ["ring", "hierarchical"]))
def test_a_reduction_does_not_wait_for_the_gather_before_it(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At stage 3 the next unit's gather is launched before this unit's reductions, and waited for after them."""
    config = config_with({"stage": 3, "world_size": 2, "collective": BUILT[algorithm]})
    for small in (0, messenger.SMALL):
        monkeypatch.setattr(messenger, "SMALL", small)
        found = Clocked[Any](2).run(lambda transport: play(config, steps(3), transport))
        if algorithm != "ring":
            run_program(config, *steps(3), backend=Played(found))


TELLING = Tag(Kind.EXCHANGE, "telling")
LIMIT = 100.0  # virtual seconds
THREE_HOSTS = [[0, 1, 2], [3, 4], [5], [6]]


@given(data=st.data())
@FEWER
def test_every_rank_has_every_message(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 7))
    hosts = data.draw(hosts_of(world_size))
    lengths = st.sampled_from([0, 1, 300, SMALL // 2, SMALL, SMALL + 1, 3 * SMALL])
    plan = data.draw(st.lists(st.lists(lengths, min_size=world_size, max_size=world_size), min_size=1, max_size=3))
    seed = data.draw(st.none() | st.integers(0, 1000), "delays")

    def program(transport: Transport) -> None:
        transport.route(hosts)
        for number, sizes in enumerate(plan):
            messages = [bytes([rank]) * size for rank, size in enumerate(sizes)]
            tag = Tag(Kind.EXCHANGE, "telling", number)
            assert transport.exchange(messages[transport.rank], tag) == messages

    Loopback[None](world_size, interfere=None if seed is None else jitter(seed)).run(program)


def test_many_ranks_find_their_hosts_when_a_collective_is_built() -> None:
    def program(transport: Transport) -> bool:
        return collectives.build(transport, Pairwise).collective.transport.is_routed

    assert Loopback[bool](MESH_RANKS).run(program) == [False] * MESH_RANKS
    assert Loopback[bool](MESH_RANKS + 1).run(program) == [True] * (MESH_RANKS + 1)


@pytest.mark.parametrize("late", [{4: 60, 5: 120, 6: 180}, {0: 60, 1: 130}, {3: 60, 4: 120}], ids=str)
def test_ranks_that_come_one_after_another_are_all_waited_for(late: dict[int, float]) -> None:
    """Each within the time limit after the one before, and together far beyond it: a rank that waits says so."""
    group = Clocked[list[bytes]](7, timeout=LIMIT)

    def program(transport: Transport) -> list[bytes]:
        transport.route([[0, 1, 2], [3, 4, 5, 6]])
        group.sleep(late.get(transport.rank, 0.0))
        return transport.exchange(bytes([transport.rank]), TELLING)

    assert group.run(program) == [[bytes([rank]) for rank in range(7)]] * 7
    assert group.now == max(late.values())


@pytest.mark.parametrize("row", [*((silent, None) for silent in range(7)), (5, 0), (5, 3)], ids=str)
def test_a_rank_that_is_silent_is_named_by_all(row: tuple[int, int | None]) -> None:
    """A rank that came late is not taken for the silent one."""
    silent, late = row
    hosts = THREE_HOSTS if late is None else [[0, 1, 2], [3, 4, 5, 6]]
    group = Clocked[None](7, timeout=LIMIT)
    given_up: list[float] = []

    def program(transport: Transport) -> None:
        transport.route(hosts)
        if transport.rank == silent:
            group.sleep(100 * LIMIT)
            return
        group.sleep(0.75 * LIMIT * (transport.rank == late))
        with pytest.raises(CollectiveError, match=rf"(no answer from rank|rank) {silent} (after|failed)"):
            transport.exchange(b"", TELLING)
        given_up.append(group.now)

    group.run(program)
    assert len(given_up) == 6
    assert min(given_up) >= LIMIT
    assert max(given_up) <= 3 * LIMIT
