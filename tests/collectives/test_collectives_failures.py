"""Failures of collectives over the threads of one process: ranks that disagree, raise or never come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import (
    Algorithm,
    Chain,
    CollectiveError,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    PeerError,
    Ring,
    Shared,
    Tag,
    Transport,
)

from ..support.carried import (
    EVERY,
    PATIENT,
    SOON,
    between_hosts,
    each,
    reduction,
)

pytestmark = pytest.mark.contract

# -- mismatches --------------------------------------------------------------------------------------------------------

OTHER_TAGS = [
    Tag(Kind.ALL_GATHER, "the first", 3, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the second", 3, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 2, 4, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 3, 6, 5),
    Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 6),
]


@EVERY
@pytest.mark.parametrize("other", OTHER_TAGS)
def test_ranks_in_different_collectives_both_learn_of_both(algorithm: Algorithm, other: Tag) -> None:
    tags = [Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 5), other]

    def program(transport: Transport) -> None:
        collective, tag = algorithm(transport), tags[transport.rank]
        if tag.kind is Kind.ALL_GATHER:
            collective.all_gather(torch.ones(4), [0, 2, 4], tag=tag).wait()
        else:
            collective.reduce_scatter(torch.ones(4), [0, 2, 4], torch.empty(2), start=None, tag=tag).wait()

    begin = time.monotonic()
    errors = each(Loopback(2, timeout=PATIENT), program)
    assert time.monotonic() - begin < SOON
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError), error
        for who in (rank, 1 - rank):
            tag = tags[who]
            said = f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"
            assert f"rank {who} is in {said}" in str(error)


@EVERY
def test_ranks_with_different_sizes_both_learn_of_both(algorithm: Algorithm) -> None:
    def program(transport: Transport) -> None:
        size = 2 + transport.rank
        tag = reduction("bucket 7")
        algorithm(transport).reduce_scatter(
            torch.ones(2 * size), [0, size, 2 * size], torch.empty(size), start=None, tag=tag
        ).wait()

    first, second = each(Loopback(2, timeout=PATIENT), program)
    assert isinstance(first, MismatchError)
    assert isinstance(second, MismatchError)
    assert "bucket 7" in str(first)
    assert "(8 and 12 bytes)" in str(first)
    assert "(12 and 8 bytes)" in str(second)


@EVERY
@pytest.mark.parametrize("bounds", [[0, 0, 4], [0, 4, 4]])
def test_a_mismatch_is_found_where_slices_are_empty(algorithm: Algorithm, bounds: list[int]) -> None:
    def program(transport: Transport) -> None:
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank])
        tag = reduction(f"bucket {transport.rank}")
        algorithm(transport).reduce_scatter(torch.ones(4), bounds, out, start=None, tag=tag).wait()

    for error in each(Loopback(2, timeout=PATIENT), program):
        assert isinstance(error, MismatchError), error


def test_a_mismatch_of_one_rank_reaches_all() -> None:
    def program(transport: Transport) -> None:
        tag = Tag(Kind.EXCHANGE, "clip" if transport.rank == 2 else "step()")
        transport.exchange(b"", tag)

    errors = each(Loopback(4, timeout=PATIENT), program)
    assert all(isinstance(error, (MismatchError, PeerError)) for error in errors)
    assert all("clip [exchange" in str(error) and "step() [exchange" in str(error) for error in errors)


def test_a_mismatch_ends_the_waits_of_ranks_that_had_no_part_in_it() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 2:
            transport.irecv(torch.empty(1), 0, reduction("for later")).wait()
        other = 1 - transport.rank
        tag = reduction(f"bucket {transport.rank}")
        Chain([transport.irecv(torch.empty(1), other, tag), transport.isend(torch.ones(1), other, tag)]).wait()

    begin = time.monotonic()
    group = Loopback[None](3, timeout=PATIENT)
    *two, third = each(group, program)
    assert time.monotonic() - begin < SOON
    assert all(isinstance(error, MismatchError) for error in two)
    assert isinstance(third, PeerError)
    assert "rank 0 failed: rank 0 is in bucket 0" in str(third)
    for transport in group.transports:
        with pytest.raises(CollectiveError, match="this communicator is closed"):
            transport.fork()


# -- failures ----------------------------------------------------------------------------------------------------------


def _in_reduce_scatter(algorithm: Algorithm) -> Callable[[Transport], Any]:
    def wait(transport: Transport) -> None:
        bounds = [2 * rank for rank in range(transport.world_size + 1)]
        source, out = torch.ones(bounds[-1]), torch.empty(2)
        algorithm(transport).reduce_scatter(source, bounds, out, start=None, tag=reduction()).wait()

    return wait


def _in_all_gather(algorithm: Algorithm) -> Callable[[Transport], Any]:
    def wait(transport: Transport) -> None:
        bounds = range(transport.world_size + 1)
        tag = Tag(Kind.ALL_GATHER, "parameters")
        algorithm(transport).all_gather(torch.ones(transport.world_size), bounds, tag=tag).wait()

    return wait


WAITS: dict[str, Callable[[Transport], Any]] = {
    "pairwise reduce-scatter": _in_reduce_scatter(Pairwise),
    "pairwise all-gather": _in_all_gather(Pairwise),
    "ring reduce-scatter": _in_reduce_scatter(Ring),
    "ring all-gather": _in_all_gather(Ring),
    "shared reduce-scatter": _in_reduce_scatter(Shared),
    "shared all-gather": _in_all_gather(Shared),
    "hierarchical reduce-scatter": _in_reduce_scatter(between_hosts),
    "hierarchical all-gather": _in_all_gather(between_hosts),
    "exchange": lambda transport: transport.exchange(b"", Tag(Kind.EXCHANGE, "step()")),
    "meet": lambda transport: transport.meet(Tag(Kind.MEET, "step()"), lambda: None),
    "fork": lambda transport: transport.fork(),
}
waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())


@waits
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_abort_reaches_every_peer_with_its_reason(world_size: int, wait: Callable[[Transport], Any]) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.abort("the disk is full")
        else:
            wait(transport)

    begin = time.monotonic()
    group = Loopback[Any](world_size, timeout=PATIENT)
    errors = each(group, program)
    assert time.monotonic() - begin < SOON
    for rank in set(range(world_size)) - {1}:
        assert isinstance(errors[rank], PeerError), errors[rank]
        assert "rank 1 failed" in str(errors[rank])
        assert "the disk is full" in str(errors[rank])
    for transport in group.transports:
        for again in WAITS.values():
            with pytest.raises(CollectiveError, match=r"this communicator is closed.*the disk is full.*build a new"):
                again(transport)


def test_a_wait_that_failed_fails_again() -> None:
    def program(transport: Transport) -> list[str]:
        if transport.rank == 0:
            transport.abort("the disk is full")
            return []
        work = transport.irecv(torch.empty(1), 0, reduction())
        found = []
        for _ in range(2):
            with pytest.raises(CollectiveError) as caught:
                work.wait()
            found.append(str(caught.value))
        return found

    first, second = Loopback[list[str]](2, timeout=PATIENT).run(program)[1]
    assert "rank 0 failed: the disk is full" in first
    assert "closed since an earlier failure" in second


def test_a_reason_of_any_length_and_script_can_be_told() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.abort("a" + "é" * 5000)
        else:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "step()"))

    _, error = each(Loopback(2, timeout=PATIENT), program)
    assert isinstance(error, PeerError)
    assert "a" + "é" * 2000 in str(error)


@waits
def test_a_rank_that_raises_ends_the_waits_of_the_others(wait: Callable[[Transport], Any]) -> None:
    others: list[BaseException] = []

    def program(transport: Transport) -> None:
        if transport.rank == 2:
            raise ZeroDivisionError("in the user's model")
        try:
            wait(transport)
        except PeerError as error:
            others.append(error)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the user's model"):
        Loopback[None](3, timeout=PATIENT).run(program)
    assert time.monotonic() - begin < SOON
    assert len(others) == 2
    assert all("rank 2 left: ZeroDivisionError: in the user's model" in str(error) for error in others)


@waits
@pytest.mark.by_default("meet")
def test_a_rank_that_does_not_come_is_named_after_the_time_limit(wait: Callable[[Transport], Any]) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            wait(transport)

    begin = time.monotonic()
    error, _ = each(Loopback(2, timeout=0.2), program)
    assert 0.2 <= time.monotonic() - begin < SOON
    assert isinstance(error, PeerError)
    assert "rank 0, in " in str(error)
    assert re.search(r"no answer from rank 1 after \d+\.\d s", str(error))
