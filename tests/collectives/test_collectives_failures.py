"""A rank that disagrees, aborts or raises ends every wait of every other rank at once, by its name and reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from collectives import (
    Algorithm,
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

from ..support.carried import EVERY, between_hosts, each, reduction
from ..support.limits import PATIENT, at_once


def reduce_or_gather(
    algorithm: Algorithm, tag: Tag, transport: Transport, bounds: Sequence[int] = (), numel: int = 2
) -> None:
    """Reduce or gather slices, which have ``bounds`` or as many elements each."""
    bounds = bounds or [numel * rank for rank in range(transport.world_size + 1)]
    collective, whole = algorithm(transport), torch.ones(bounds[-1])
    if tag.kind is Kind.ALL_GATHER:
        collective.all_gather(whole, bounds, tag=tag).wait()
    else:
        out = torch.empty(bounds[transport.rank + 1] - bounds[transport.rank])
        collective.reduce_scatter(whole, bounds, out, start=None, tag=tag).wait()


WAITS: dict[str, Callable[[Transport], Any]] = {
    f"{algorithm.__name__} {kind.name}": partial(reduce_or_gather, algorithm, Tag(kind, "bucket 0"))
    for algorithm in (Pairwise, Ring, Shared, between_hosts)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
}
WAITS |= {
    "exchange": lambda transport: transport.exchange(b"", Tag(Kind.EXCHANGE, "step()")),
    "meet": lambda transport: transport.meet(Tag(Kind.MEET, "step()"), lambda: None),
    "fork": lambda transport: transport.fork(),
}
waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())

FIRST = Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 5)
OTHERS = {
    "kind": Tag(Kind.ALL_GATHER, "the first", 3, 4, 5),
    "label": Tag(Kind.REDUCE_SCATTER, "the second", 3, 4, 5),
    "round": Tag(Kind.REDUCE_SCATTER, "the first", 2, 4, 5),
    "index": Tag(Kind.REDUCE_SCATTER, "the first", 3, 6, 5),
    "digest": Tag(Kind.REDUCE_SCATTER, "the first", 3, 4, 6),
}


@EVERY
def test_ranks_in_different_collectives_both_learn_of_both(algorithm: Algorithm) -> None:
    """Or with different sizes."""
    for difference, other in OTHERS.items():
        tags = FIRST, other
        with at_once():
            errors = each(
                Loopback(2, timeout=PATIENT), lambda t, tags=tags: reduce_or_gather(algorithm, tags[t.rank], t)
            )
        for error in errors:
            assert isinstance(error, MismatchError), (difference, error)
            for rank, tag in enumerate(tags):
                said = f"{tag.label} [{tag.kind.name.lower()}, round {tag.round}, index {tag.index}]"
                assert f"rank {rank} is in {said}" in str(error), difference
    first, second = each(
        Loopback(2, timeout=PATIENT), lambda t: reduce_or_gather(algorithm, FIRST, t, numel=2 + t.rank)
    )
    assert "(8 and 12 bytes)" in str(first)
    assert "(12 and 8 bytes)" in str(second)


@EVERY
def test_a_mismatch_is_found_where_slices_are_empty(algorithm: Algorithm) -> None:
    for bounds in ([0, 0, 4], [0, 4, 4]):
        for error in each(
            Loopback(2, timeout=PATIENT),
            lambda t, bounds=bounds: reduce_or_gather(algorithm, reduction(f"bucket {t.rank}"), t, bounds),
        ):
            assert isinstance(error, MismatchError), error


@pytest.mark.law("errors")
@waits
def test_an_abort_reaches_every_peer_with_its_reason(wait: Callable[[Transport], Any]) -> None:
    """Of any length and script. Every later call names it, too."""
    for world_size, reason in ((2, "a" + "é" * 5000), (4, "the disk is full")):

        def program(transport: Transport, reason: str = reason) -> None:
            if transport.rank == 1:
                transport.abort(reason)
            else:
                wait(transport)

        group = Loopback[Any](world_size, timeout=PATIENT)
        with at_once():
            errors = each(group, program)
        for rank in set(range(world_size)) - {1}:
            assert isinstance(errors[rank], PeerError), errors[rank]
            assert "rank 1 failed" in str(errors[rank])
            assert reason[:2000] in str(errors[rank])
        for transport in group.transports:
            for again in WAITS.values():
                with pytest.raises(CollectiveError, match=r"this communicator is closed.*build a new") as closed:
                    again(transport)
                assert reason[:2000] in str(closed.value)


def test_a_wait_that_failed_fails_again() -> None:
    first, second = Loopback[None](2, timeout=PATIENT).transports
    work = second.irecv(torch.empty(1), 0, reduction())
    first.abort("the disk is full")
    with pytest.raises(CollectiveError, match="rank 0 failed: the disk is full"):
        work.wait()
    with pytest.raises(CollectiveError, match="closed since an earlier failure"):
        work.wait()
