"""A rank that fails at any step of any collective: every other rank names it and its reason, before the time limit.

Each send, receive and wait of a rank is a step at which it may fail. Ranks are threads; `test_deaths` has processes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import (
    Chain,
    Collective,
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Ring,
    Shared,
    Tag,
    Transport,
    Work,
    broadcast,
    transport,
)

from ..kills import LABEL, by_tree, halves, launch
from ..support.carried import FEWER, SOON, reduction

NUMELS = [0, 12, 1 << 17]
PART = 1 << 13  # the least elements of a part here, so that the last of these is sent in several, and acknowledged
LIMIT = 5.0
LINES = 84  # of the code of `Interrupting.functions`, and a few more
TAG = Tag(Kind.EXCHANGE, "many bytes")
ALGORITHMS: dict[str, Callable[[Transport], Collective]] = {
    "pairwise": Pairwise,
    "ring": Ring,
    "shared": Shared,
    "hierarchical": lambda t: Hierarchical(t, halves(t.world_size)),
    "tree": lambda t: Pairwise(by_tree(t)),
}


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LEAST", PART)
        patch.setattr(transport, "CHUNK", 4 * PART)
        patch.setattr(broadcast, "CHUNK", 4 * PART)
        yield


class Failing:
    """A backend that raises in one rank at one of its steps."""

    def __init__(self, victim: int, step: int) -> None:
        self.victim, self.steps, self.armed = victim, step, False

    def __call__(self, rank: int, event: str, peer: int) -> None:
        if self.armed and rank == self.victim:
            self.steps -= 1
            if self.steps == -1:
                raise ZeroDivisionError


def until_one_fails(collective: Collective, what: str, numel: int) -> str:
    """Enter the same kind of collective again and again; return the error that ends this."""
    number = 0
    while True:
        number += 1
        try:
            launch(collective, what, number, numel)()
        except CollectiveError as error:
            return str(error)


@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "broadcast", "exchange", "meet"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    world_size=st.integers(2, 4),
    victim=st.integers(0, 3),
    step=st.integers(0, 80),
    leaves=st.booleans(),
    numel=st.sampled_from(NUMELS),
)
@FEWER
def test_a_rank_that_fails_at_any_step_is_named_by_all_at_once(
    algorithm: str, what: str, world_size: int, victim: int, step: int, leaves: bool, numel: int
) -> None:
    if algorithm == "tree":
        world_size += 2
    victim %= world_size
    failing = Failing(victim, step)
    errors: dict[int, str] = {}

    def program(transport: Transport) -> None:
        collective = ALGORITHMS[algorithm](transport)
        ready.wait()
        failing.armed = True
        try:
            errors[transport.rank] = until_one_fails(collective, what, numel)
        except ZeroDivisionError:
            collective.transport.abort("the disk is full")
            if leaves:
                raise

    ready = threading.Barrier(world_size)
    begin = time.monotonic()
    group = Loopback[None](world_size, timeout=LIMIT, interfere=failing)
    try:
        group.run(program)
    except ZeroDivisionError:
        assert leaves
    assert time.monotonic() - begin < SOON
    assert set(errors) == set(range(world_size)) - {victim}
    for rank, error in errors.items():
        assert error.startswith(f"rank {rank}, in {LABEL}: rank {victim} failed: "), error
        assert "the disk is full" in error or "ZeroDivisionError" in error


class Interrupting:
    """Raises `KeyboardInterrupt` at one of the lines that a thread runs in the code that requests and reads parts."""

    functions = ("post_remaining", "_post", "recv", "wait", "acknowledge", "wait_ack")

    def __init__(self, line: int) -> None:
        self.line, self.reached = line, False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.endswith("messenger.py") and frame.f_code.co_name in self.functions:
            self.line -= event == "line"
            if self.line < 0 and not self.reached:
                self.reached = True
                sys.settrace(None)
                raise KeyboardInterrupt
            return self
        return None


@pytest.mark.parametrize("line", range(LINES))
def test_an_interrupt_while_parts_are_asked_for_ends_the_group_or_loses_nothing(line: int) -> None:
    numel = 3 * PART  # two parts
    interrupting = Interrupting(line)

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.isend(torch.full((numel,), 3.0), 0, TAG).wait()
            assert transport.exchange(b"1", TAG) == [b"0", b"1"]
            return
        found = torch.full((numel,), -7.0)
        works: Sequence[Work] = ()
        before = sys.gettrace()
        sys.settrace(interrupting)
        try:
            works = transport.irecv_chunks(found, 1, TAG)
            Chain(works).wait()
        except KeyboardInterrupt:
            assert transport.broken or works or not transport._messenger.states[1].expected, "begun, and forgotten"
            if transport.broken or not works:
                raise ZeroDivisionError from None
            Chain(works).wait()
        finally:
            sys.settrace(before)
        assert torch.equal(found, torch.full((numel,), 3.0))
        assert transport.exchange(b"0", TAG) == [b"0", b"1"], "each message has had one ack"

    group, begin = Loopback[None](2, timeout=LIMIT), time.monotonic()
    try:
        group.run(program)
    except (ZeroDivisionError, CollectiveError):
        assert interrupting.reached
    assert time.monotonic() - begin < LIMIT
    assert interrupting.reached or line > 30, "there are so many lines at least"


def test_after_a_failure_nothing_more_is_asked_for() -> None:
    """A request that no rank answers would keep its memory as long as the group exists."""

    def program(transport: Transport) -> list[bool]:
        if transport.rank == 1:
            return []
        parts = transport._messenger.recv([torch.empty(1 << 17, dtype=torch.uint8)] * 3, 1, TAG)
        transport.abort("the disk is full")
        with pytest.raises(CollectiveError, match="the disk is full"):
            Chain(parts).wait()
        return [part.payload is None for part in parts]

    assert Loopback[list[bool]](2, timeout=LIMIT).run(program) == [[False, True, True], []]


@given(order=st.permutations(range(6)), length=st.integers(3, 6))
@FEWER
def test_whoever_waits_for_a_rank_that_waits_for_another_names_the_last(order: Sequence[int], length: int) -> None:
    """In a row of ranks each waits for the one before; the first one exits."""
    row = order[:length]
    errors: dict[int, str] = {}

    def program(transport: Transport) -> None:
        place = row.index(transport.rank) if transport.rank in row else 0
        if place == 0:
            raise ZeroDivisionError
        try:
            transport.irecv(torch.empty(1), row[place - 1], reduction(f"wait {place}")).wait()
        except CollectiveError as error:
            errors[place] = str(error)

    with pytest.raises(ZeroDivisionError):
        Loopback[None](6, timeout=LIMIT).run(program)
    first, second = row[0], row[1]
    witness = f"rank {second}, in wait 1: no answer from rank {first} after "
    assert errors[1].startswith(witness)
    for place in range(2, length):
        assert errors[place].startswith(f"rank {row[place]}, in wait {place}: rank {first} failed: {witness}")


def test_what_a_rank_said_before_it_left_is_heard_by_one_who_asks_later() -> None:
    gone = threading.Event()
    errors: list[Any] = []

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.abort("the disk is full")
            raise ZeroDivisionError
        gone.wait()
        try:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "step()"))
        except CollectiveError as error:
            errors.append(str(error))

    group = Loopback[None](2, timeout=LIMIT)
    mark_gone = group._world.mark_gone
    group._world.mark_gone = lambda rank, why: (mark_gone(rank, why), gone.set())[0]  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        group.run(program)
    assert errors == ["rank 0, in step(): rank 1 failed: the disk is full"]
