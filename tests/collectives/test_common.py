"""Memory that all ranks of a host share: writes for all ranks, writes by mistake, and hosts without such memory."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError, Kind, Region, Shared, Tag, Transport, on_threads
from collectives.backends.arena import PAGE
from zero import ZeroOptimizer

from ..support.descriptors import opened
from ..support.models import build, odd_batches, odd_loss
from ..support.sockets import meet, on_sockets
from .test_arena import pages_of

host_module = sys.modules["collectives.backends.shared_memory"]
SOON = 10.0
NOW = Tag(Kind.EXCHANGE, "now")


def made(transport: Transport, *sizes: int) -> list[Region]:
    regions = transport.common(sizes)
    assert regions is not None
    return list(regions)


def filled(region: Region, transport: Transport, size: int) -> None:
    """Let every rank write its number plus one into its part."""
    width = size // transport.world_size
    region.own(transport.rank * width, (transport.rank + 1) * width).fill_(transport.rank + 1)
    transport.announce(NOW).wait()


def test_what_each_rank_writes_in_its_own_part_all_ranks_read() -> None:
    def program(transport: Transport) -> list[list[int]]:
        small, large = made(transport, 3, 3 * PAGE)
        filled(large, transport, 3 * PAGE)
        filled(small, transport, 3)
        return [small.whole().tolist(), large.whole()[:: PAGE - 1].tolist()]

    assert on_sockets(3, program) == [[[1, 2, 3], [1, 1, 2, 3]]] * 3


@given(st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=4))
def test_a_stray_write_reaches_nobody_else_and_is_found_by_its_page_and_forgotten(places: list[int]) -> None:
    size = 5 * PAGE + 1

    def program(transport: Transport) -> tuple[list[tuple[int, int]], bool, bool, list[tuple[int, int]]]:
        (region,) = made(transport, size)
        filled(region, transport, size - 1)
        kept, whole = region.whole().clone(), region.whole()
        transport.announce(NOW).wait()
        if transport.rank == 0:
            whole[places] = 77
        transport.announce(NOW).wait()
        written, others = region.written(), bool((region.whole() == kept).all())
        region.refresh()
        return written, others, bool((region.whole() == kept).all()), region.written()

    pages = sorted({place // PAGE for place in places})
    first, second = on_sockets(2, program)
    assert first == ([(page * PAGE, min((page + 1) * PAGE, size)) for page in pages], False, True, [])
    assert second == ([], True, True, [])


def test_where_the_kernel_does_not_tell_everything_may_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> bytes:
        raise PermissionError(errno.EPERM, "pagemap")

    def program(transport: Transport) -> list[tuple[int, int]]:
        (region,) = made(transport, PAGE + 7)
        return region.written()

    monkeypatch.setattr(os, "pread", forbidden)
    assert on_sockets(2, program) == [[(0, PAGE + 7)]] * 2


def on_one_thread(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails for the first thread that calls it."""
    first = threading.Lock()

    def wrapped(*arguments: Any) -> Any:
        if first.acquire(blocking=False):
            for fd in arguments[:1]:
                if isinstance(fd, int):
                    os.close(fd)
            raise OSError(errno.ENOMEM, "no memory")
        return call(*arguments)

    return wrapped


@pytest.mark.parametrize("step", ["file_of", "regions_of"])
@pytest.mark.by_default("file_of")
def test_memory_in_common_is_for_all_or_for_none(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """If one rank gets no memory, no rank has any, nothing is left behind, and the ranks can still communicate."""
    before = opened()
    monkeypatch.setattr(host_module, step, on_one_thread(getattr(host_module, step)))

    def program(transport: Transport) -> tuple[bool, list[bytes], bool]:
        without = transport.common([PAGE]) is None
        said = transport.exchange(b"%d" % transport.rank, NOW)
        return without, said, transport.common([PAGE]) is not None

    assert on_sockets(3, program) == [(True, [b"0", b"1", b"2"], True)] * 3
    assert opened() <= before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_elsewhere_or_failed_is_named_at_once(rank: int) -> None:
    """A rank that waits for a descriptor receives nothing else; so the ranks agree before."""

    def program(transport: Transport, other: Callable[[], Any]) -> str:
        begin = time.monotonic()
        try:
            other() if transport.rank == rank else transport.common([PAGE])
        except CollectiveError as error:
            assert time.monotonic() - begin < SOON
            return str(error)
        return "nothing"

    def elsewhere(transport: Transport) -> str:
        return program(transport, lambda: transport.exchange(b"", Tag(Kind.EXCHANGE, "counting sheep")))

    def failed(transport: Transport) -> str:
        return program(transport, lambda: transport.abort("no wool"))

    for said in on_sockets(2, elsewhere):
        assert "counting sheep" in said
        assert "making memory for all ranks" in said
    assert f"rank {rank} failed: no wool" in on_sockets(2, failed)[1 - rank]


def test_parts_of_the_ranks_have_memory_of_their_own() -> None:
    def program(transport: Transport) -> list[int]:
        part = transport.split([r for r in range(5) if r % 2 == transport.rank % 2])
        (region,) = made(part, 6 * PAGE)
        width = 6 * PAGE // part.world_size
        region.own(part.rank * width, (part.rank + 1) * width).fill_(transport.rank + 1)
        transport.announce(NOW).wait()
        return region.whole()[::width].tolist()

    assert on_sockets(5, program) == [[1, 3, 5], [2, 4], [1, 3, 5], [2, 4], [1, 3, 5]]


def test_there_is_none_where_some_part_has_none_and_none_of_no_bytes() -> None:
    def program(transport: Transport) -> tuple[bool, bool]:
        part = transport.split([r for r in range(3) if (r == 2) == (transport.rank == 2)], may_have_common=False)
        return part.common([PAGE]) is None, transport.common([0, 0]) is None

    assert on_sockets(3, program) == [(True, True)] * 3


def test_a_region_outlives_what_it_was_made_by() -> None:
    def program(transport: Transport) -> torch.Tensor:
        (region,) = made(transport, 2 * PAGE)
        filled(region, transport, 2 * PAGE)
        whole = region.whole()
        transport.announce(NOW).wait()
        return whole

    for whole in on_sockets(2, program):
        assert whole[::PAGE].tolist() == [1, 2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_optimizer_holds_no_page_of_shared_memory(stage: int) -> None:
    models = [build(rank) for rank in range(2)]

    def program(transport: Transport) -> tuple[bool, int]:
        backend = meet(transport)
        optimizer = ZeroOptimizer(
            models[transport.rank],
            torch.optim.AdamW,
            stage=stage,
            process_group=transport,
            collective=lambda _: Shared(Transport(backend)),
        )
        odd_loss(models[transport.rank], odd_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()  # the tensor in p.grad belongs to the user
        used = pages_of(backend._arena.fd) > 0
        optimizer.close()
        transport.announce(NOW).wait()
        return used, pages_of(backend._arena.fd)

    assert on_threads(2, program, timeout=20) == [(True, 0)] * 2
