"""Ranks of one host: frames keep their order, an end is an error in time, and memory is freed with its last holder."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import CollectiveError, Kind, PeerError, Region, Tag, Transport
from collectives.backends import shared_memory
from collectives.backends.shared_memory import INLINE, PAGE, Arena, PeerProcess, SharedMemoryBackend, Spans, Window

from ..support.carried import CPU
from ..support.descriptors import listed, opened
from ..support.limits import BOUND, PATIENT, at_once
from ..support.sockets import ARENA, leave, mesh, on_sockets

MANY = 300  # messages, more than a socket buffers
TAG = Tag(Kind.REDUCE_SCATTER, "bucket 3", 7, 3)


def numbered(number: int, size: int) -> bytes:
    return number.to_bytes(4, "little") * -(-size // 4)


def send_much(backend: SharedMemoryBackend) -> None:
    """Send more to rank 1 than its socket buffers."""
    for _ in range(MANY):
        backend.send_bytes(b"x" * INLINE, 1, 0)


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def begin_to_receive(backend: SharedMemoryBackend, slot: int, size: int, as_bytes: bool) -> Callable[[], bytes]:
    """Begin a receive from rank 0. Return the function that waits for it."""
    if as_bytes:
        pending = backend.recv_bytes(size, 0, slot)
        return lambda: pending.wait(BOUND)
    target = torch.empty(size, dtype=torch.uint8)
    begun = backend.recv(target, 0, slot)
    return lambda: (begun.wait(BOUND), target.numpy().tobytes())[1]


SIZES = st.sampled_from([4, 128, INLINE, INLINE + 4, 3 * INLINE])


@given(
    st.lists(st.tuples(st.integers(0, 2), SIZES, st.booleans(), st.booleans()), max_size=30),
    st.booleans(),
    st.randoms(),
)
def test_messages_of_a_slot_are_in_order_whatever_is_read_first(
    messages: list[tuple[int, int, bool, bool]], begun: bool, order: Any
) -> None:
    """Small messages are in frames, large ones in the sender's memory; either side uses tensors or bytes. ``begun``:
    receives begin in the order of the messages, and are waited for in any."""
    first, second = mesh(2)
    sends, expected = [], list[tuple[int, bytes, bool]]()
    for number, (slot, size, sent_as_bytes, as_bytes) in enumerate(messages):
        data = numbered(number, size)
        expected.append((slot, data, as_bytes))
        sends.append(first.send_bytes(data, 1, slot) if sent_as_bytes else first.send(as_tensor(data), 1, slot))
    if begun:
        waits = [(begin_to_receive(second, slot, len(data), how), data) for slot, data, how in expected]
        order.shuffle(waits)
        assert all(wait() == data for wait, data in waits)
    slots = [] if begun else [slot for slot, _, _ in expected]
    order.shuffle(slots)
    for slot in slots:
        mine = next(each for each in expected if each[0] == slot)
        expected.remove(mine)
        assert begin_to_receive(second, slot, len(mine[1]), mine[2])() == mine[1]
    for send in sends:
        send.wait(BOUND)


def test_a_large_message_is_under_way_until_it_was_read_and_one_of_another_size_is_an_error() -> None:
    first, second = mesh(2)
    send = first.send(torch.ones(INLINE + 1, dtype=torch.uint8), 1, 0)
    with pytest.raises(PeerError, match=r"time limit of 0\.01 s"):
        send.wait(0.01)
    assert begin_to_receive(second, 0, INLINE + 1, False)() == bytes([1]) * (INLINE + 1)
    send.wait(BOUND)
    for size, as_bytes in itertools.product((8, 2 * INLINE), (False, True)):
        first.send(torch.ones(size, dtype=torch.uint8), 1, 0)
        with pytest.raises(PeerError, match=f"{size} bytes came where 5 were expected"):
            begin_to_receive(second, 0, 5, as_bytes)()


def test_full_sockets_in_both_directions_do_not_deadlock() -> None:
    """Each rank sends far more messages than a socket buffers, before it reads one."""

    def program(transport: Transport) -> bool:
        backend = transport.backend
        for number, to in itertools.product(range(MANY), transport.peers()):
            backend.send(as_tensor(numbered(number, INLINE)), to, number % 3)
        return all(
            backend.recv_bytes(INLINE, source, number % 3).wait(PATIENT) == numbered(number, INLINE)
            for number, source in itertools.product(range(MANY), transport.peers())
        )

    assert on_sockets(3, program) == [True] * 3


def test_a_full_socket_has_a_time_limit() -> None:
    first, _second = mesh(2, timeout=0.1)
    with pytest.raises(PeerError, match=r"time limit of 0\.1 s"):
        send_much(first)


def test_a_third_rank_that_has_left_does_not_disturb_a_full_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rank had finished; the two others had not."""
    first, second, third = mesh(3, timeout=PATIENT)
    full = threading.Event()
    make_room = SharedMemoryBackend._make_room

    def noticed(self: SharedMemoryBackend, *arguments: Any) -> None:
        full.set()
        make_room(self, *arguments)

    def read() -> None:
        full.wait(BOUND)
        for _ in range(MANY):
            second.recv_bytes(INLINE, 0, 0).wait(BOUND)

    monkeypatch.setattr(SharedMemoryBackend, "_make_room", noticed)
    third.send_bytes(b"the last", 0, 0)
    leave(third)
    reader = threading.Thread(target=read)
    reader.start()
    send_much(first)
    reader.join()
    assert full.is_set()
    assert first.recv_bytes(8, 2, 0).wait(BOUND) == b"the last"
    with pytest.raises(PeerError, match="its process ended"):
        first.recv_bytes(8, 2, 0).wait(BOUND)


HOLDER = "import os, sys; os.fork(); print('here', flush=True); sys.stdin.read()"
"""A process whose child keeps its socket open; both end at the end of the standard input."""


@pytest.mark.parametrize("full", [False, True], ids=["its socket is empty", "its socket is full"])
def test_a_death_is_noticed_though_a_child_keeps_the_socket_open(full: bool) -> None:
    """While this process waits for a message, or for room."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], pass_fds=[theirs.fileno()], **pipes) as process:
        theirs.close()
        assert process.stdout is not None
        process.stdout.readline()
        arena = Arena(ARENA)
        peer = PeerProcess(ours, socket.socket(), Window(arena.fd), process.pid, 0.0)
        backend = SharedMemoryBackend(0, [None, peer], arena, PATIENT)
        threading.Timer(0.01, process.kill).start()
        with at_once(), pytest.raises(PeerError, match="its process ended"):
            send_much(backend) if full else backend.recv_bytes(1, 1, 0).wait(PATIENT)


def test_a_peer_that_the_garbage_collector_finds_warns_of_no_open_socket() -> None:
    arena = Arena(ARENA)
    (ours, theirs), (files, other) = socket.socketpair(), socket.socketpair()
    peer: Any = PeerProcess(ours, files, Window(arena.fd), 0, 0.0)
    peer.cycle, open_ends = peer, (ours.fileno(), files.fileno())
    del peer, ours, files
    with warnings.catch_warnings(record=True) as seen, theirs, other:
        warnings.simplefilter("always")
        gc.collect()
        assert not [each for each in seen for fd in open_ends if f"fd={fd}," in str(each.message)]
        assert theirs.recv(1) == other.recv(1) == b""


def expose(transport: Transport) -> Any:
    tensor = transport.scratch(5, torch.float32, CPU)
    assert transport.peers_can_read(tensor)
    return transport.expose(tensor, [(1, 0, 5)], TAG)


def send(transport: Transport) -> Any:
    return transport.isend(torch.ones(INLINE), 1, TAG)


@pytest.mark.parametrize("give", [expose, send])
def test_an_error_of_sending_names_the_rank_the_collective_and_the_reason(give: Callable[[Transport], Any]) -> None:
    """The reader has sent all its messages, and fails while it reads; perhaps it leaves. Or it was gone before."""
    for aborts, leaves, before in ((True, False, False), (True, True, False), (True, True, True), (False, True, True)):
        backends = mesh(2, timeout=PATIENT)
        first, second = map(Transport, backends)
        work = None if before else give(first)
        second.isend(torch.ones(1), 0, TAG)
        if aborts:
            second.abort("the disk is full")
        if leaves:
            leave(backends[1])
        why = "rank 1 failed: the disk is full" if aborts else "rank 1 .*its process ended"
        with at_once(), pytest.raises(PeerError, match=rf"rank 0, in bucket 3: .*{why}"):
            give(first) if work is None else work.wait()
        assert first.broken
        with pytest.raises(CollectiveError, match="this communicator is closed since an earlier failure"):
            give(first)


# -- memory of a host --------------------------------------------------------------------------------------------------

NOW = Tag(Kind.EXCHANGE, "now")


def pages_of(fd: int) -> int:
    """Return the number of allocated pages of a file."""
    return os.stat(fd).st_blocks * 512 // PAGE


def no_memory(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOMEM, "no memory")


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
