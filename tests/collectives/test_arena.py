"""Memory that other processes can read: which pages are free, who frees them, and the errors when none are left."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import Transport, on_threads
from collectives.backends import arena
from collectives.backends.arena import PAGE, Arena, Spans, Window
from collectives.pool import Pool

from ..support.descriptors import opened
from ..support.sockets import mesh

CPU = torch.device("cpu")


def pages_of(path: Any) -> int:
    """Return the number of allocated pages of a file."""
    return os.stat(path).st_blocks * 512 // PAGE


# -- which pages are free ----------------------------------------------------------------------------------------------


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


def test_pages_may_be_given_back_while_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- regions -----------------------------------------------------------------------------------------------------------


def test_a_region_is_freed_with_its_last_holder() -> None:
    memory = Arena(64 * PAGE)
    storage = memory.allocate(3 * PAGE + 1)
    tensor = torch.empty(0).set_(storage, 0, (100,), (1,))
    assert tensor.data_ptr() % PAGE == 0
    assert memory.offset_of(tensor[7:]) == 28
    assert pages_of(memory.fd) == 4
    del storage
    view = tensor.fill_(1.0)[50:].view(5, 10).t()
    array = view.numpy()
    del tensor, view
    assert pages_of(memory.fd) == 4
    assert array.sum() == 50
    del array
    assert pages_of(memory.fd) == 0
    assert memory.offset_of(torch.empty(5)) is None


def test_a_region_outlives_its_arena_and_nothing_is_left_of_both() -> None:
    before = opened()
    memory = Arena(64 * PAGE)
    window = Window(memory.fd)
    storage = memory.allocate(PAGE)
    torch.empty(0).set_(storage, 0, (3,), (1,)).fill_(5.0)
    del memory
    assert window.view(0, 12, torch.float32).tolist() == [5.0] * 3
    del storage
    assert window.view(0, 12, torch.float32).tolist() == [0.0] * 3, "the pages are gone"
    del window
    assert opened() <= before


def test_a_window_cannot_be_written() -> None:
    memory = Arena(4 * PAGE)
    window = Window(memory.fd)
    address = hex(window.view(0, 1, torch.uint8).data_ptr())[2:]
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(address))
    assert line.split()[1] == "r--s"


def test_a_window_needs_no_silenced_warning() -> None:
    """To silence one changes the filters of all threads; another's warning would be lost."""
    memory = Arena(4 * PAGE)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = Window(memory.fd).view(0, 1, torch.uint8)
    finally:
        torch.set_warn_always(always)
    assert seen.tolist() == [0]


def test_a_child_frees_nothing_of_its_parent() -> None:
    memory = Arena(64 * PAGE)
    storage = memory.allocate(2 * PAGE)
    tensor = torch.empty(0).set_(storage, 0, (5,), (1,)).fill_(3.0)
    child = os.fork()
    if not child:
        try:
            del storage, tensor, memory
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.tolist() == [3.0] * 5
    assert pages_of(memory.fd) == 2


def test_memory_that_is_exhausted_is_an_error_with_a_remedy() -> None:
    memory = Arena(4 * PAGE)
    kept = memory.allocate(3 * PAGE)
    with pytest.raises(MemoryError, match=r"8192 bytes of memory .*collective='pairwise'"):
        memory.allocate(2 * PAGE)
    assert memory.allocate(PAGE).nbytes() == PAGE
    del kept
    assert memory.allocate(4 * PAGE).nbytes() == 4 * PAGE


def test_pages_that_cannot_be_made_are_an_error_and_no_signal_later(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Arena(4 * PAGE)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "_make_pages", fails)
        with pytest.raises(MemoryError, match="give the ranks more memory, or choose collective='pairwise'"):
            memory.allocate(PAGE)
    assert memory.allocate(4 * PAGE).nbytes() == 4 * PAGE, "the pages were given back"


def test_pages_are_there_before_they_are_used_also_on_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Arena(16 * PAGE)
    first = memory.allocate(5 * PAGE)
    assert pages_of(memory.fd) == 5
    monkeypatch.setattr(arena, "_POPULATE_WRITE", 12345)
    second = memory.allocate(5 * PAGE)
    assert pages_of(memory.fd) == 10
    assert first.nbytes() == second.nbytes() == 5 * PAGE


def test_the_arenas_of_all_ranks_of_a_large_host_find_room_in_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 29, "SC_PAGE_SIZE": PAGE}.__getitem__)  # 2 TiB
    for ranks in (1, 2, 7, 64, 300):
        assert ranks * arena.arena_bytes(ranks) <= 8 << 40
        assert arena.arena_bytes(ranks) % PAGE == 0
    assert arena.arena_bytes(2) == 4 << 40, "twice what there is, where that fits"


def test_nothing_takes_no_memory() -> None:
    (backend,) = mesh(1)
    transport = Transport(backend)
    for make in (transport.empty, transport.scratch):
        empty = make(0, torch.bfloat16, CPU)
        assert (empty.shape, empty.dtype) == ((0,), torch.bfloat16)
        assert transport.peers_can_read(empty)
    assert pages_of(backend._arena.fd) == 0


def test_a_pool_of_shared_memory_gives_back_what_it_drops() -> None:
    memory = Arena(1 << 24)
    pool = Pool(allocate=lambda nbytes, device: memory.allocate(nbytes))
    for numel in (1000, 3000, 9000, 27000):
        pool.take(numel, torch.float32, CPU).fill_(1.0)
        assert pages_of(memory.fd) == sum(-(-block.storage.nbytes() // PAGE) for block in pool._blocks)
    del pool
    assert pages_of(memory.fd) == 0


def test_an_address_space_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "no address space")

    monkeypatch.setattr(mmap, "mmap", fails)
    with pytest.raises(OSError, match="no address space"):
        Arena(PAGE)
    assert opened() <= before


def test_memory_of_another_arena_is_copied_to_where_peers_can_read_it() -> None:
    def program(_: Transport) -> tuple[list[float], bool]:
        first, second = (Transport(backend) for backend in mesh(2))
        theirs = second.scratch(5, torch.float32, CPU).fill_(2.0)
        copied = first.peer_readable(theirs)
        return copied.tolist(), first.peers_can_read(theirs) or not first.peers_can_read(copied)

    assert on_threads(1, program) == [([2.0] * 5, False)]
