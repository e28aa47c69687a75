"""Without a header for each collective, ranks that part are still named in time, and a late rank changes nothing.

Collectives run on a stream of each rank, as on a GPU (`support.streamed`). `tests.ledger` draws random trainings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from collectives import ALGORITHMS, Kind, MismatchError, PeerError, Tag, Transport
from collectives.algorithms.base import Several
from collectives.backends import store_board
from collectives.backends.threads import ThreadBackend
from collectives.launches.at_exit import LEFT, Caller, SlowError
from collectives.launches.board import MemoryBoard
from collectives.launches.gate import Launches, Ranks
from collectives.launches.ledger import KEPT, History, Ledger
from collectives.launches.sentinel import Post
from collectives.launches.verdict import Line, Verdict, compare, first_difference, judge
from collectives.topology import _fold_by_nccl
from collectives.watching import CHECK_EACH, watch
from zero.gradients.agreement import Agreement, Record
from zero.runtime.joining import Joining
from zero.runtime.unit_order import UnitOrder

from ..ledger import DIVERGENCES, Case, on_threads, run, run_late
from ..support.carried import CPU, equal_hosts
from ..support.limits import BOUND, PATIENT
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, run_rank
from ..support.programs import compare as compare_programs
from ..support.rows import only
from ..support.streamed import StreamedLoopback

LIMIT = 0.3
CASE = Case("", 3, 3, 1, 2, 1, limit=LIMIT)
BOUNDS = [0, 2, 4, 6]


def gather(number: int, label: str = "unit") -> Tag:
    return Tag(Kind.ALL_GATHER, f"{label} {number}", 0, number)


# -- trainings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", only(DIVERGENCES, "unit", "memory"))
def test_every_rank_names_the_one_that_parts_within_the_limit_and_two_seconds(what: str) -> None:
    run(replace(CASE, what=what))


def test_a_rank_that_is_late_by_three_limits_changes_no_bit() -> None:
    run_late(replace(CASE, what="late", limit=0.1, rounds=2))


STEPS = (
    Step((Round(), Round()), clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round())),
    Step((Round(), Round(sync=False)), clear="zeros"),
)
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))  # ranks without a backward catch up
BY_NAME = Program(3, 0, bucket_cap_mb=0.001, collective="all_to_all", steps=STEPS + FEWER)
PROGRAMS = {
    "stage 0": BY_NAME,
    "stage 2": replace(BY_NAME, stage=2),
    "stage 3": replace(BY_NAME, stage=3, steps=STEPS),
    "stage 3, kept by 2": Program(4, 3, reshard=2, steps=STEPS[1:]),
    "stage 1, replicas of 2": Program(4, 1, sharding_factor=2, steps=STEPS[:2]),
    "stage 2, replicas of 1": Program(3, 2, sharding_factor=1, steps=STEPS[:2] + FEWER),
    "stage 3, replicas of 3": Program(6, 3, "sgd momentum", sharding_factor=3, steps=STEPS[:1]),
}


@pytest.mark.parametrize("name", only(PROGRAMS, "stage 0", "stage 2, replicas of 1", "stage 3, kept by 2"))
def test_training_has_the_bits_of_the_plain_loop(name: str) -> None:
    program = PROGRAMS[name]
    loopback: StreamedLoopback[Any] = StreamedLoopback(program.world_size, limit=PATIENT)

    def run(transport: Transport) -> Any:
        result = run_rank(program, transport)
        assert loopback._world.board._numbers == {}, "no sentinel asked"
        assert loopback._world.board._values, "but each has a place on the board"
        return result

    with (
        mock.patch("collectives.topology._all_have_nccl", return_value=program.collective == "auto"),
        mock.patch("collectives.topology.ThreadBackend", type(None)),  # threads pass for processes
    ):
        results = loopback.run(run)
    for backend in loopback.backends:
        backend.end()
    assert_same_states(results[0][3], compare_programs(program, results).optimizer.state_dict())


# -- the gate ----------------------------------------------------------------------------------------------------------


def on_streams(size: int, program: Callable[[Transport], Any], limit: float = PATIENT) -> list[Any]:
    loopback: StreamedLoopback[Any] = StreamedLoopback(size, limit=limit)

    def watched(transport: Transport) -> Any:
        watch(transport, size, CPU)
        return program(transport)

    try:
        return loopback.run(watched)
    finally:
        for backend in loopback.backends:
            backend.end()


def launch(transport: Transport, tag: Tag) -> None:
    ALGORITHMS["all_to_all"](transport).all_gather(torch.zeros(6), BOUNDS, tag=tag).wait()


def test_no_collective_begins_behind_a_meeting_before_every_rank_is_at_the_gate() -> None:
    """Else a kernel would wait for a late rank, and end the process after the time limit of its own collectives."""
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
                waiting.update(each for each in every if each.place())
            began.extend(each.ledger.state[0] for each in every)
        launch(transport, gather(2))
        launch(transport, gather(3))
        return launches.ledger.state[0]

    every, waiting = list[Launches](), set[Launches]()
    assert on_streams(3, program) == [3, 3, 3]
    assert len(waiting) == 2, "both others were at the gate"
    assert began == [1, 1], "neither had launched behind it"


def test_only_the_gate_and_the_first_reduction_of_a_round_send_headers() -> None:
    def program(transport: Transport) -> list[int]:
        collective, sent = ALGORITHMS["all_to_all"](transport), list[int]()
        assert transport.launches is not None

        def headers(call: Callable[[], Any]) -> None:
            before = transport.traffic.messages
            call()
            sent.append((transport.traffic.messages - before) // 2)

        def reduce(index: int) -> None:
            tag = Tag(Kind.REDUCE_SCATTER, f"bucket {index}", 1, index)
            collective.reduce_scatter(torch.ones(6), BOUNDS, torch.empty(2), start=None, tag=tag).wait()

        headers(lambda: launch(transport, gather(1)))
        headers(lambda: launch(transport, gather(2)))
        headers(lambda: reduce(0))
        headers(lambda: reduce(1))
        transport.exchange(b"", Tag(Kind.EXCHANGE, "a step"))
        with transport.launches.behind_a_meeting():
            headers(lambda: launch(transport, gather(3)))
        headers(lambda: launch(transport, gather(4)))
        return sent

    assert on_streams(3, program) == [[1, 0, 1, 0, 0, 1]] * 3


def test_each_collective_awaits_its_headers_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_EACH, "1")

    def program(transport: Transport) -> bool:
        launch(transport, gather(1))
        with pytest.raises(MismatchError, match=r"unit 2 .* but rank|but rank . is in unit 2 "):
            launch(transport, gather(2 + (transport.rank == 1)))
        return transport.launches is None

    assert all(on_streams(3, program))


@pytest.mark.parametrize("without", [(0, 1), (1,)], ids=str)
def test_so_it_does_on_every_rank_if_one_has_no_board(without: tuple[int, ...], monkeypatch: Any) -> None:
    board = ThreadBackend.board
    found = lambda self, exchange: None if self.rank in without else board(self, exchange)  # noqa: E731
    monkeypatch.setattr(ThreadBackend, "board", found)
    with pytest.warns(RuntimeWarning, match=f"no board for the sentinels .rank {without[0]} has none"):
        assert on_streams(2, lambda transport: transport.launches) == [None, None]


def test_a_sum_between_hosts_is_under_way_until_its_last_transfers_have_ended_and_holds_no_memory_then() -> None:
    def program(transport: Transport) -> bool:
        fold, launches = _fold_by_nccl(transport, equal_hosts(transport), CPU), transport.launches
        assert launches is not None
        tag = Tag(Kind.REDUCE_SCATTER, "bucket 0", 1)
        fold.reduce_scatter(torch.ones(8), [0, 2, 4, 6, 8], torch.empty(2), start=None, tag=tag).wait()
        under_way = launches.ledger._waited[-1][1].args[0]  # type: ignore[attr-defined]
        assert launches.ledger.oldest() == 0
        assert not hasattr(under_way, "_operands")
        under_way._returned = mock.Mock(ended=lambda: False)
        return launches.ledger.oldest() == 1

    assert on_streams(4, program) == [True] * 4


def test_a_store_with_another_secret_is_not_the_board() -> None:
    """Another job, or another container, may answer at the address."""
    store, told = store_board._held()
    assert store_board._connected(told) is not None
    store.set(store_board.SECRET, "another")
    assert store_board._connected(told) is None


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [gather(3), None], ids=["other", "fewer"])
def test_ranks_that_launched_other_collectives_learn_at_the_next_meeting_which_is_the_first(other: Tag | None) -> None:
    """The bytes of both fit, so no rank waits for another: the sentinels see nothing."""

    def program(transport: Transport) -> str:
        assert transport.launches is not None
        launch(transport, gather(1))
        mine = other if transport.rank == 1 else gather(2)
        if other is not None or transport.rank != 1:
            transport.launches.ledger.add(mine or gather(2))
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
        assert "(launch 2 of each)" in message
        assert "rank 1 is in " + ("unit 3" if other else "nothing more") in message


def ledger_of(*numbers: int) -> Ledger:
    ledger = Ledger()
    for number in numbers:
        ledger.add(gather(number))
    return ledger


def test_a_history_finds_the_first_difference_among_the_last_launches() -> None:
    common = list(range(KEPT + 10))
    longer, other = ledger_of(*common, 1, 2, 3).history(), ledger_of(*common, 1, 7).history()
    for history in (longer, other):
        assert History.unpack(history.pack()).launches == list(history.launches)
        assert History.unpack(history.pack(tags=False), tags=False).count == history.count
    assert first_difference({0: longer, 1: other, 2: ledger_of(*common).history()}) == (0, 1, KEPT + 12)
    assert first_difference({0: longer, 1: ledger_of(*common).history()}) is None
    assert first_difference({0: longer, 1: ledger_of(1).history()}) is None, "that is not known any more"
    assert compare([longer, longer, other, other], 2) is None, "replicas may gather other units"


def test_a_launch_differs_by_its_bounds_and_its_dtype_too() -> None:
    def program(transport: Transport) -> list[tuple[int, int]]:
        assert transport.launches is not None
        found = []
        for bounds, dtype in ((BOUNDS, torch.float32), ([0, 1, 4, 6], torch.float32), (BOUNDS, torch.bfloat16)):
            transport.launches.ledger = Ledger()
            buffer = torch.zeros(6, dtype=dtype)
            ALGORITHMS["all_to_all"](transport).all_gather(buffer, bounds, tag=gather(1)).wait()
            found.append(transport.launches.ledger.state)
        return found

    first, *others = on_streams(3, program)
    assert others == [first] * 2
    assert len(set(first)) == 3


# -- the sentinel ------------------------------------------------------------------------------------------------------


def line(ledger: Ledger, waits: int = 0, inside: str = "", stuck: float = 20.0) -> Line:
    return Line(1, ledger.history().pack(tags=False).hex(), waits, inside, stuck)


SAME, MORE = ledger_of(1, 2), ledger_of(1, 2, 3)
VERDICTS = {  # by rank; the words of the verdict, or nothing
    "late": ([line(MORE, 3), line(SAME), line(MORE, 3)], ""),
    "late, and others meet": ([line(SAME, 0, "step()"), line(SAME), line(SAME, 0, "step()")], ""),
    "busy": ([line(MORE, 2), line(SAME, 2), line(MORE, 2)], ""),
    "one meets in vain": ([line(MORE, 3), line(SAME, 0, "step()"), line(MORE, 3)], "rank 0 is in unit 3"),
    "but not for long": ([line(MORE, 3), line(SAME, 0, "step()", 1.0), line(MORE, 3)], ""),
    "one waits for a late one": ([line(MORE, 3), line(SAME, 0, "step()"), line(SAME)], ""),
    "others": ([line(SAME), line(ledger_of(1, 4), 0, "", 0.0), line(SAME)], "rank 0 is in unit 2"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_only_ranks_that_wait_in_vain_or_launched_others_are_in_error(name: str) -> None:
    lines, said = VERDICTS[name]
    tags = {0: MORE, 1: ledger_of(1, 4), 2: MORE} if name == "others" else dict.fromkeys(range(3), MORE)
    found = judge(dict(enumerate(lines)), 3, 10.0, lambda rank: tags[rank].history())
    assert (found.text if found else "")[: len(said)] == said
    assert bool(found) == bool(said)


class SlowBoard(MemoryBoard):
    """A board of which some reads do not return at once, or never again."""

    def __init__(self, holder: int | None = None) -> None:
        super().__init__()
        self.holder, self.go, self.cut = holder, threading.Event(), False
        self.go.set()

    def read(self, names: Sequence[str]) -> list[bytes]:
        self.go.wait(PATIENT)
        if self.cut:
            raise ConnectionError("the store is gone")
        return super().read(names)


def test_a_board_that_is_slow_once_ends_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.launches.sentinel.CALL", 0.05)
    monkeypatch.setattr("collectives.launches.sentinel.MemoryBoard", type(None))  # else its calls have no limit
    board, aborted = SlowBoard(0), list[str]()
    launches = Launches(Ranks(1, 2, 2, 7, 0.2, 60.0), board, lambda: aborted.append, lambda: None)
    post = Post(launches)
    post.open()
    board.write("7/line 0", b"")
    board.go.clear()
    assert post.look()
    board.go.set()
    board.swap("7/question", b"0", b"1 0")
    until = time.monotonic() + BOUND
    while not board.count("7/answers 1", 0) and time.monotonic() < until:
        assert post.look()
    assert Line.unpack(board.read(["7/line 1"])[0]).answers == 1
    assert not aborted
    board.cut = True
    with launches.waiting(gather(5)):
        while not aborted and time.monotonic() < until + BOUND:
            post.look()
    assert "rank 0 does not answer" in aborted[0], "it holds the board"


def test_an_error_of_the_device_is_told_to_every_rank() -> None:
    board, aborted = MemoryBoard(), list[str]()

    def fails() -> bool:
        raise RuntimeError("device-side assert")

    every = [Launches(Ranks(rank, 2, 2, 7, 0.2, 60.0), board, lambda: aborted.append, lambda: None) for rank in (0, 1)]
    posts = [Post(each) for each in every]
    for post in posts:
        post.open()
    every[1].ledger.awaited(1, fails)
    for post in posts[::-1]:
        post.look()
    LEFT.finish()
    assert len(aborted) == 2
    errors = [each.take_verdict() for each in every]
    assert all(isinstance(error, PeerError) and "rank 1: its device failed" in str(error) for error in errors)


def test_transfers_that_are_under_way_together_have_ended_when_all_have() -> None:
    ended, pending = (SimpleNamespace(ended=lambda value=value: value) for value in (True, False))
    assert Several([ended, ended]).ended()
    assert not Several([ended, pending]).ended()


def test_a_call_that_does_not_return_makes_others_slow_and_not_the_caller() -> None:
    caller, go = Caller(), threading.Event()
    with pytest.raises(SlowError):
        caller.call(0.01, lambda: go.wait(PATIENT))
    with pytest.raises(SlowError, match="earlier"):
        caller.call(PATIENT, lambda: 1)
    go.set()
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        try:
            assert caller.call(PATIENT, lambda: 2) == 2
            break
        except SlowError:
            continue


def test_a_verdict_is_raised_by_the_next_call_and_then_the_group_is_closed() -> None:
    def program(transport: Transport) -> list[str]:
        assert transport.launches is not None
        transport.launches.found(Verdict("rank 1 does not answer"))
        transport.links.abort("rank 1 does not answer")
        found = []
        for _ in range(2):
            with pytest.raises(Exception, match="rank 1 does not answer") as caught:
                transport.check()
            found.append(type(caught.value).__name__)
        return found

    assert on_streams(2, program) == [["PeerError", "CollectiveError"]] * 2


def test_there_is_no_sentinel_for_one_rank_nor_on_the_host() -> None:
    assert on_streams(1, lambda transport: transport.launches) == [None]
    _, seen = on_threads(replace(CASE, what="", ranks=1, victim=0))
    assert seen[0] is not None
    assert not seen[0].error
