"""Memory that processes of a host share is freed with its last holder, or an error says that there is none left."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import Kind, Region, Tag, Transport
from collectives.backends import shared_memory
from collectives.backends.shared_memory import PAGE, Arena, Spans

from ..support.descriptors import listed, opened
from ..support.sockets import on_sockets

NOW = Tag(Kind.EXCHANGE, "now")


def pages_of(fd: int) -> int:
    """Return the number of allocated pages of a file."""
    return os.stat(fd).st_blocks * 512 // PAGE


def no_memory(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOMEM, "no memory")


@given(st.integers(0, 40), st.lists(st.integers(0, 12) | st.integers(-40, -1), max_size=60))
def test_spans_hand_out_every_page_once_and_first_fit(pages: int, events: list[int]) -> None:
    """A positive number takes that many pages; -n gives back the span taken n events ago."""
    spans, free = Spans(pages), set(range(pages))
    taken: list[range] = []
    for event in events:
        if event > 0:
            fits = [page for page in range(pages) if free.issuperset(range(page, page + event))]
            page = spans.take(event)
            assert page == (fits[0] if fits else None)
            if page is not None:
                taken.append(range(page, page + event))
                free.difference_update(taken[-1])
        elif event < 0 and taken:
            given_back = taken.pop(event % len(taken))
            free.update(given_back)
            spans.give(given_back.start, len(given_back))


def test_pages_may_be_given_back_while_others_are_taken() -> None:
    """A garbage collection, or another thread, may release regions at any moment."""
    spans = Spans(8)
    for page in range(8):
        assert spans.take(1) == page
    for page in (4, 6, 7):
        spans.give(page, 1)

    class Interrupted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for span in list.__iter__(self):
                spans.give(0, 1) if span == (6, 8) else None
                yield span

    assert spans.take(5) is None
    spans._free = Interrupted(spans._free)
    assert spans.take(2) == 6
    assert [spans.take(1) for _ in range(3)] == [0, 4, None]


def test_a_region_is_freed_with_its_last_holder() -> None:
    """Then there is room again. Without room there is an error with a remedy."""
    memory = Arena(4 * PAGE)
    tensor = torch.empty(0).set_(memory.allocate(2 * PAGE + 1), 0, (100,), (1,))
    assert tensor.data_ptr() % PAGE == 0
    assert memory.offset_of(tensor[7:]) == 28
    assert memory.offset_of(torch.empty(5)) is None
    array = tensor.fill_(1.0)[50:].view(5, 10).t().numpy()
    del tensor
    assert pages_of(memory.fd) == 3
    with pytest.raises(MemoryError, match=r"8192 bytes of memory .*collective='pairwise'"):
        memory.allocate(2 * PAGE)
    assert memory.allocate(PAGE).nbytes() == PAGE
    assert array.sum() == 50
    del array
    assert pages_of(memory.fd) == 0
    assert memory.allocate(4 * PAGE).nbytes() == 4 * PAGE


def test_pages_are_there_before_they_are_used_or_that_is_an_error_and_no_signal_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on an old kernel. An address space that is too small is an error, too."""
    before, memory = listed(), Arena(16 * PAGE)
    first = memory.allocate(5 * PAGE)
    assert pages_of(memory.fd) == 5
    monkeypatch.setattr(shared_memory, "_POPULATE_WRITE", 12345)
    second = memory.allocate(5 * PAGE)
    assert pages_of(memory.fd) == 10
    assert first.nbytes() == second.nbytes() == 5 * PAGE
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_make_pages", no_memory)
        with pytest.raises(MemoryError, match="give the ranks more memory, or choose collective='pairwise'"):
            memory.allocate(PAGE)
    assert memory.allocate(6 * PAGE).nbytes() == 6 * PAGE, "the pages were given back"
    del memory, first, second
    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(OSError, match="no memory"):
        Arena(PAGE)
    assert listed() <= before


def made(transport: Transport, size: int) -> Region:
    regions = transport.common([3, size])
    assert regions is not None
    return regions[1]


@given(st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=4))
def test_a_stray_write_is_private_found_by_its_page_and_undone(places: list[int]) -> None:
    """All ranks read what each writes in its own part."""
    size = 5 * PAGE + 1

    def program(transport: Transport) -> tuple[list[tuple[int, int]], bool, bool, list[tuple[int, int]]]:
        region, width = made(transport, size), size // 2
        region.own(transport.rank * width, (transport.rank + 1) * width).fill_(transport.rank + 1)
        transport.announce(NOW).wait()
        kept, whole = region.whole().clone(), region.whole()
        assert kept[[0, width - 1, width, -2, -1]].tolist() == [1, 1, 2, 2, 0]
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


def test_where_the_kernel_hides_its_pages_everything_may_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", no_memory)
    assert on_sockets(2, lambda transport: made(transport, PAGE + 7).written()) == [[(0, PAGE + 7)]] * 2


@pytest.mark.parametrize("step", ["file_of", "regions_of"])
def test_memory_in_common_is_for_all_or_for_none(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """If one rank gets no memory, no rank has any, nothing is left behind, and the ranks can still communicate."""
    before, first, call = listed(), threading.Lock(), getattr(shared_memory, step)

    def failing_once(*arguments: Any) -> Any:
        if first.acquire(blocking=False):
            for fd in arguments[:1]:
                if isinstance(fd, int):
                    os.close(fd)
            no_memory()
        return call(*arguments)

    def program(transport: Transport) -> tuple[bool, list[bytes], bool]:
        without = transport.common([PAGE]) is None
        said = transport.exchange(b"%d" % transport.rank, NOW)
        return without, said, transport.common([PAGE]) is not None

    monkeypatch.setattr(shared_memory, step, failing_once)
    assert on_sockets(3, program) == [(True, [b"0", b"1", b"2"], True)] * 3
    assert opened() <= before
