"""Without a header for each collective, ranks that part are still named in time, and a late rank changes nothing.

Collectives run on a stream of each rank, as on a GPU (`support.streamed`). `tests.ledger` draws random trainings.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives import AllToAll, Kind, MismatchError, PeerError, Tag, Transport
from collectives.algorithms.base import Several
from collectives.backends.gloo import GlooBackend, GroupsOfMesh
from collectives.launches.ledger import KEPT, Launches, Ledger, Verdict, compare, first_difference
from collectives.launches.sentinel import ANY, OUTSIDE, Post, Status, difference
from collectives.messages import describe
from collectives.watching import CHECK_EACH, watch
from zero.gradients.agreement import Agreement, Record
from zero.runtime.joining import Joining, UnitOrder

from ..ledger import DIVERGENCES, Case, run, run_late
from ..support.carried import CPU
from ..support.errors import assert_in_order
from ..support.late import folded_by_groups
from ..support.limits import BOUND, PATIENT
from ..support.rows import only
from ..support.streamed import StreamedLoopback, StreamedThread

CASE = Case("", 3, 3, 1, 2, 1, limit=0.3)
BOUNDS = [0, 2, 4, 6]


def gather(number: int, label: str = "unit") -> Tag:
    return Tag(Kind.ALL_GATHER, f"{label} {number}", 0, number)


@pytest.mark.law("errors")
@pytest.mark.parametrize("what", only(DIVERGENCES, "unit", "memory"))
def test_every_rank_names_the_one_that_parts_within_the_limit_and_two_seconds(what: str) -> None:
    run(replace(CASE, what=what))


def test_a_rank_that_is_late_by_three_limits_changes_no_bit() -> None:
    run_late(replace(CASE, what="late", limit=0.1, rounds=2))


def on_streams(size: int, program: Callable[[Transport], Any]) -> list[Any]:
    def watched(transport: Transport) -> Any:
        watch(transport, size, CPU)
        return program(transport)

    return StreamedLoopback[Any](size, limit=PATIENT).run(watched)


def launch(transport: Transport, tag: Tag) -> None:
    AllToAll(transport).all_gather(torch.zeros(6), BOUNDS, tag=tag).wait()


def test_no_collective_begins_behind_a_meeting_before_every_rank_is_at_the_gate() -> None:
    met, began = threading.Barrier(3), list[int]()

    def program(transport: Transport) -> int:
        launches = transport.launches
        assert launches is not None
        launch(transport, gather(1))
        transport.exchange(b"", Tag(Kind.EXCHANGE, "a step"))
        if transport.rank != 1:
            every.append(launches)
        met.wait()
        if transport.rank == 1:
            until = time.monotonic() + BOUND
            while time.monotonic() < until and len(waiting) < 2:
                waiting.update(each for each in every if each.inside is not None)
            began.extend(each.ledger.state[0] for each in every)
        launch(transport, gather(2))
        launch(transport, gather(3))
        return launches.ledger.state[0]

    every, waiting = list[Launches](), set[Launches]()
    assert on_streams(3, program) == [3, 3, 3]
    assert len(waiting) == 2, "both others were at the gate"
    assert began == [1, 1], "neither had launched behind it"


def test_each_collective_awaits_its_headers_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_EACH, "1")

    def program(transport: Transport) -> bool:
        launch(transport, gather(1))
        with pytest.raises(MismatchError, match=r"unit 2 .* but rank|but rank . is in unit 2 "):
            launch(transport, gather(2 + (transport.rank == 1)))
        return transport.launches is None

    assert all(on_streams(3, program))


@pytest.mark.parametrize(("without", "ranks"), [((0, 1), 2), ((1,), 2), ((), 1)], ids=str)
def test_so_it_does_on_every_rank_if_one_has_no_board_or_is_alone(
    without: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = StreamedThread.board
    monkeypatch.setattr(StreamedThread, "board", lambda self: None if self.rank in without else board(self))
    words = f"no board for the sentinels .rank {without[0]}: " if without else ""
    with pytest.warns(RuntimeWarning, match=words) if without else nullcontext():
        assert on_streams(ranks, lambda transport: transport.launches) == [None] * ranks


def test_a_sum_between_hosts_is_under_way_until_its_last_transfers_have_ended_and_holds_no_memory_then() -> None:
    def program(transport: Transport) -> bool:
        fold, launches = folded_by_groups(transport), transport.launches
        assert launches is not None
        tag = Tag(Kind.REDUCE_SCATTER, "bucket 0", 1)
        fold.reduce_scatter(torch.ones(8), [0, 2, 4, 6, 8], torch.empty(2), start=None, tag=tag).wait()
        under_way = launches.ledger._waited[-1][1].args[0]  # type: ignore[attr-defined]
        assert launches.ledger.oldest() == 0
        assert Several([SimpleNamespace(ended=lambda: True), under_way]).ended()
        assert not hasattr(under_way, "_operands")
        under_way._returned = mock.Mock(ended=lambda: False)
        return launches.ledger.oldest() == 1 and not Several([SimpleNamespace(ended=lambda: True), under_way]).ended()

    assert on_streams(4, program) == [True] * 4


def test_a_mesh_that_is_a_part_of_its_group_has_no_board() -> None:
    store = dist.HashStore()
    group = Namespace(get_group_store=lambda: store)
    for ranks, found in (((0, 2), None), ((0, 1, 2), store), (None, store)):
        of_mesh = None if ranks is None else GroupsOfMesh(ranks, {})
        with (
            mock.patch.multiple("collectives.backends.gloo.dist", get_rank=lambda _: 0, get_world_size=lambda _: 3),
            mock.patch.object(GlooBackend, "device_backend", return_value="gloo"),
        ):
            backend = GlooBackend(group, 1.0, of_mesh=of_mesh)  # type: ignore[arg-type]
        assert (backend.board() is None) == (found is None)


@pytest.mark.parametrize("other", [gather(3), None], ids=["other", "fewer"])
def test_ranks_that_launched_other_collectives_learn_at_the_next_meeting_which_is_the_first(other: Tag | None) -> None:
    def program(transport: Transport) -> str:
        assert transport.launches is not None
        launch(transport, gather(1))
        mine = other if transport.rank == 1 else gather(2)
        if mine is not None:
            transport.launches.ledger.add(mine)
        agreement = Agreement(transport, 3, UnitOrder(Joining()))

        def record() -> Record:
            assert transport.launches is not None
            return Record(3.0, "open", (), b"", b"", launched=transport.launches.ledger.state)

        with pytest.raises(MismatchError) as caught:
            agreement.agree("step()", 0, lambda: None, record, str)
        assert transport.broken
        return str(caught.value)

    for message in on_streams(3, program):
        assert "unit 2 [all_gather, round 0, index 2]" in message
        assert "(launch 2)" in message
        assert "rank 1 is in " + ("unit 3" if other else "nothing more") in message


def ledger_of(*numbers: int) -> Ledger:
    ledger = Ledger()
    for number in numbers:
        ledger.add(gather(number))
    return ledger


def test_a_history_finds_the_first_difference_among_the_last_launches() -> None:
    common = list(range(KEPT + 10))
    longer, other = ledger_of(*common, 1, 2, 3).history(), ledger_of(*common, 1, 7).history()
    assert len(longer) == KEPT
    assert first_difference(longer, other) == first_difference(other, longer) == KEPT + 12
    assert first_difference(longer, ledger_of(*common).history()) == 0
    assert first_difference(longer, ledger_of(1).history()) == 0, "that is not known any more"
    assert compare([longer, longer, other, other], 2) is None, "replicas may gather other units"
    found = compare([longer, longer, other, longer], 2)
    assert found is not None
    assert found.text.startswith(f"rank 2 is in {describe(gather(7))}, but rank 3 is in {describe(gather(2))} (launch ")


def test_a_launch_differs_by_its_bounds_and_its_dtype_too() -> None:
    def program(transport: Transport) -> list[tuple[int, int]]:
        assert transport.launches is not None
        found = []
        for bounds, dtype in ((BOUNDS, torch.float32), ([0, 1, 4, 6], torch.float32), (BOUNDS, torch.bfloat16)):
            transport.launches.ledger = Ledger()
            buffer = torch.zeros(6, dtype=dtype)
            AllToAll(transport).all_gather(buffer, bounds, tag=gather(1)).wait()
            found.append(transport.launches.ledger.state)
        return found

    first, *others = on_streams(3, program)
    assert others == [first] * 2
    assert len(set(first)) == 3


def status(ledger: Ledger, waits: int = 0, enters: int = OUTSIDE, round_: int = 0) -> Status:
    waited = ledger.launch(waits)
    since = (0, 0, 0) if waited is None else (waits, round_, waited.met)
    return Status(ledger.history(tags=False), "a place", ledger.met, enters, since)


def met(ledger: Ledger, *numbers: int) -> Ledger:
    ledger.met += 1
    for number in numbers:
        ledger.add(gather(number))
    return ledger


SAME, MORE = ledger_of(1, 2), ledger_of(1, 2, 3)
DIFFERENCES = {  # of two ranks: the launch, or 0
    "one is outside": (status(MORE, 3), status(SAME), 0),
    "both wait for the same": (status(MORE, 2), status(SAME, 2), 0),
    "one meets in vain": (status(MORE, 3), status(SAME, enters=0), 3),
    "one exchanges in vain": (status(MORE, 3), status(SAME, enters=ANY), 3),
    "one will catch up in the meeting": (status(MORE, 3, round_=2), status(SAME, enters=1), 0),
    "one has gone on since, from a meeting of both": (status(met(ledger_of(1, 2), 3), 3), status(SAME, enters=0), 0),
    "the meeting is behind what it waits for": (
        status(met(ledger_of(1, 2), 3), 3),
        status(met(ledger_of(1, 2)), enters=0),
        3,
    ),
    "others": (status(MORE, 2), status(ledger_of(1, 4)), 2),
    "others, and in vain": (status(MORE, 3), status(ledger_of(1, 4), enters=0), 2),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_only_ranks_that_wait_in_vain_or_launched_others_are_in_error(name: str) -> None:
    one, other, number = DIFFERENCES[name]
    assert difference(one, other) == difference(other, one) == number


class Group:
    """Sentinels of ranks on one store, which look when they are told to. ``seconds``: of their clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, timeout: float = 60.0) -> None:
        self.store, self.seconds, self.closed = dist.HashStore(), 0.0, list[int]()
        self.aborted = dict[int, str]()
        clock = SimpleNamespace(monotonic=lambda: self.seconds, sleep=lambda _: None)
        monkeypatch.setattr("collectives.launches.sentinel.time", clock)
        self.links = [
            Namespace(
                rank=rank,
                ranks=range(size),
                number=7,
                closed=lambda: self.closed,
                abort=lambda reason, rank=rank: self.aborted.update({rank: reason}),
                backend=SimpleNamespace(stall_limit=10.0, timeout=timeout, interrupt=lambda: None),
            )
            for rank in range(size)
        ]
        self.launches = [Launches(links, size) for links in self.links]
        self.posts = [Post(launches, self.store) for launches in self.launches]
        for post in self.posts:
            post.open()

    def look(self, seconds: float, *ranks: int) -> None:
        for _ in range(int(4 * seconds)):
            self.seconds += 0.25
            for rank in ranks:
                self.posts[rank].look()
        for post in self.posts:
            if post._closing is not None:
                post._closing.join(BOUND)

    def launch(self, rank: int, number: int, *, ended: bool = False) -> None:
        ledger = self.launches[rank].ledger
        ledger.awaited(ledger.add(gather(number)), lambda: ended)


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Group]:
    return partial(Group, monkeypatch)


def test_a_rank_that_is_silent_is_late_until_the_time_limit_of_the_group(group_of: Callable[..., Group]) -> None:
    group = group_of(3, timeout=30.0)
    for rank in (0, 2):
        group.launch(rank, 1)
    group.look(29.0, 0, 2)
    assert not group.aborted
    group.look(35.0, 0, 2)
    assert set(group.aborted) == {0, 2}
    said = "rank 1 has not come for … waits for it in unit 1 [all_gather, round 0, index 1]"
    assert_in_order(said, group.aborted[2])


def test_time_in_which_a_thread_holds_the_interpreter_is_no_wait(group_of: Callable[..., Group]) -> None:
    group = group_of(2)
    group.launch(0, 1)
    group.look(1.0, 0)
    group.seconds += 12.0  # the sentinel's thread cannot look either
    group.look(1.0, 0)
    assert group.store.get("zero 7 0") == b"-"
    group.look(8.0, 0)
    assert group.store.get("zero 7 0") != b"-"


@pytest.mark.parametrize("first", [0, 1])
def test_the_later_of_two_ranks_finds_the_difference_and_both_name_it(
    first: int, group_of: Callable[..., Group]
) -> None:
    group = group_of(2)
    group.launch(first, 1)
    group.look(20.0, first)
    assert not group.aborted
    group.launch(1 - first, 2)
    group.launch(1 - first, 3)
    group.look(12.0, 0, 1)
    for rank in (0, 1):
        error = group.launches[rank].take_verdict()
        assert isinstance(error, MismatchError)
        assert f"rank {first} is in unit 1 [" in str(error)
        assert f"rank {1 - first} is in unit 2 [" in str(error)


def test_a_rank_that_goes_on_names_nothing_later(group_of: Callable[..., Group]) -> None:
    """The other's counts are old: it has left the meeting, and its thread holds the interpreter since."""
    group = group_of(2)
    with group.launches[1].waiting(Tag(Kind.MEET, "step()"), meets=True):
        group.look(12.0, 1)
    group.launches[0].meet(Tag(Kind.MEET, "step()"), list)
    group.launch(0, 1)
    group.look(40.0, 0)
    assert not group.aborted


@pytest.mark.parametrize("holds_the_store", [False, True])
def test_a_rank_whose_connection_is_closed_is_lost_only_if_another_waits(
    holds_the_store: bool, group_of: Callable[..., Group]
) -> None:
    group = group_of(2)
    group.closed.append(1)
    if holds_the_store:
        calls = [f"{name}.side_effect" for name in ("set", "multi_get", "compare_set")]
        group.posts[0]._store = mock.Mock(**dict.fromkeys(calls, RuntimeError))
    group.look(30.0, 0)
    assert not group.aborted
    group.launch(0, 1)
    group.look(10.5, 0)
    assert not group.aborted or holds_the_store
    group.look(1.5, 0)
    assert "rank 1 is lost: its process has ended, or its connection is closed; rank 0 waits" in group.aborted[0]


def test_an_error_of_the_device_is_told_to_every_rank_that_waits(group_of: Callable[..., Group]) -> None:
    group = group_of(2)
    group.launches[1].ledger.awaited(1, mock.Mock(side_effect=RuntimeError("device-side assert")))
    group.launch(0, 1)
    group.look(12.0, 0, 1)
    assert set(group.aborted) == {0, 1}
    errors = [each.take_verdict() for each in group.launches]
    assert all(isinstance(error, PeerError) and "rank 1: its device failed" in str(error) for error in errors)


def test_a_verdict_is_raised_by_the_next_call_and_then_the_group_is_closed() -> None:
    def program(transport: Transport) -> list[str]:
        assert transport.launches is not None
        transport.launches.verdict = Verdict("rank 1 does not answer").error(f"rank {transport.rank}")
        transport.links.abort("rank 1 does not answer")
        found = []
        for _ in range(2):
            with pytest.raises(Exception, match="rank 1 does not answer") as caught:
                transport.check()
            found.append(type(caught.value).__name__)
        return found

    assert on_streams(2, program) == [["PeerError", "CollectiveError"]] * 2
