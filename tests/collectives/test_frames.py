"""Frames between ranks of one host: order, full sockets, time limits, and peers that end or give up."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import CollectiveError, Kind, PeerError, Tag, Transport
from collectives.backends.arena import Arena, Window
from collectives.backends.shared_memory import INLINE, PeerProcess, SharedMemoryBackend

from ..support.sockets import ARENA, leave, mesh, on_sockets

SOON = 5.0  # seconds in which an error must come that a message brings, rather than a time limit
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


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([4, 128, INLINE, INLINE + 4, 3 * INLINE]), st.booleans()),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_messages_of_a_slot_are_in_order_whatever_is_read_first(messages: list[Any], order: Any) -> None:
    """Small messages are in frames, large ones in the sender's memory; either side uses tensors or bytes."""
    first, second = mesh(2)
    expected: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    sends = []
    for number, (slot, size, as_bytes) in enumerate(messages):
        data = numbered(number, size)
        expected[slot].append(data)
        sends.append(first.send_bytes(data, 1, slot) if as_bytes else first.send(as_tensor(data), 1, slot))
    slots = [slot for slot, _, _ in messages]
    order.shuffle(slots)
    for slot in slots:
        data = expected[slot].pop(0)
        target = torch.empty(len(data), dtype=torch.uint8)
        if order.random() < 0.5:
            assert second.recv_bytes(len(data), 0, slot).wait(1.0) == data
        else:
            second.recv(target, 0, slot).wait(1.0)
            assert target.numpy().tobytes() == data
    for send in sends:
        send.wait(1.0)


def test_a_large_message_is_under_way_until_it_was_read() -> None:
    first, second = mesh(2)
    send = first.send(torch.ones(INLINE + 1, dtype=torch.uint8), 1, 0)
    with pytest.raises(PeerError, match=r"time limit of 0\.01 s"):
        send.wait(0.01)
    target = torch.empty(INLINE + 1, dtype=torch.uint8)
    second.recv(target, 0, 0).wait(1.0)
    send.wait(1.0)
    assert bool((target == 1).all())


def test_a_message_of_another_size_is_an_error() -> None:
    first, second = mesh(2)
    for size in (8, 2 * INLINE):
        first.send(torch.ones(size, dtype=torch.uint8), 1, 0)
        with pytest.raises(PeerError, match=f"{size} bytes came where 5 were expected"):
            second.recv(torch.empty(5, dtype=torch.uint8), 0, 0).wait(1.0)
        first.send(torch.ones(size, dtype=torch.uint8), 1, 0)
        with pytest.raises(PeerError, match=f"{size} bytes came where 5 were expected"):
            second.recv_bytes(5, 0, 0).wait(1.0)


def test_a_failure_is_told_to_all_though_one_of_them_reads_nothing_and_its_socket_is_full() -> None:
    first, _, third = transports = [Transport(backend) for backend in mesh(3)]
    backend = transports[0].backend
    assert isinstance(backend, SharedMemoryBackend)
    with suppress(PeerError):
        for _ in range(MANY):
            backend.send_bytes(b"x" * INLINE, 1, 99, patience=0.0)
    begin = time.monotonic()
    assert first.abort("the disk is full") == [1]
    with pytest.raises(CollectiveError, match="rank 0 failed: the disk is full"):
        third.exchange(b"", TAG)
    assert time.monotonic() - begin < SOON


def test_full_sockets_in_both_directions_do_not_deadlock() -> None:
    """Each rank sends a thousand messages, far more than a socket buffers, before it reads one."""
    count, size = 1000, INLINE

    def program(transport: Transport) -> bool:
        backend = transport.backend
        for number in range(count):
            for to in transport.peers():
                backend.send(as_tensor(numbered(number, size)), to, number % 3)
        found = [
            backend.recv_bytes(size, source, number % 3).wait(10.0) == numbered(number, size)  # type: ignore[attr-defined]
            for number in range(count)
            for source in transport.peers()
        ]
        return all(found)

    assert on_sockets(3, program) == [True] * 3


def test_a_full_socket_has_a_time_limit() -> None:
    first, _second = mesh(2, timeout=0.2)
    with pytest.raises(PeerError, match=r"time limit of 0\.2 s"):
        send_much(first)


def test_a_third_rank_that_has_left_does_not_disturb_a_full_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rank had finished; the two others had not."""
    first, second, third = mesh(3)
    full = threading.Event()
    make_room = SharedMemoryBackend._make_room

    def noticed(self: SharedMemoryBackend, *arguments: Any) -> None:
        full.set()
        make_room(self, *arguments)

    monkeypatch.setattr(SharedMemoryBackend, "_make_room", noticed)
    third.send_bytes(b"the last", 0, 0)
    leave(third)

    def read() -> None:
        full.wait(SOON)
        for _ in range(MANY):
            second.recv_bytes(INLINE, 0, 0).wait(SOON)

    reader = threading.Thread(target=read)
    reader.start()
    send_much(first)
    reader.join()
    assert full.is_set()
    assert first.recv_bytes(8, 2, 0).wait(1.0) == b"the last"
    with pytest.raises(PeerError, match="its process ended"):
        first.recv_bytes(8, 2, 0).wait(1.0)


# -- peers that end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unread", [0, 1], ids=["it had read all", "it had not read all"])
def test_what_a_rank_sent_before_it_left_is_read_and_then_its_end(unread: int) -> None:
    first, second = mesh(2)
    for _ in range(unread):
        first.send_bytes(b"never read", 1, 0)
    second.send_bytes(b"one", 0, 0)
    second.send_bytes(b"two", 0, 0)
    leave(second)
    assert [first.recv_bytes(3, 1, 0).wait(1.0) for _ in range(2)] == [b"one", b"two"]
    for _ in range(2):
        with pytest.raises(PeerError, match="its process ended"):
            first.recv_bytes(3, 1, 0).wait(1.0)
    with pytest.raises(PeerError, match="its process ended"):
        first.send_bytes(b"x", 1, 0)


HOLDER = "import os, sys, time; os.fork() or time.sleep(60); print(os.getpid(), flush=True); sys.stdin.read()"
"""A process whose child keeps its socket open; the child ends at the end of the standard input."""


def with_a_socket_that_outlives_its_process(check: Callable[[SharedMemoryBackend], None], fill: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], pass_fds=[theirs.fileno()], **pipes) as process:
        theirs.close()
        assert process.stdout is not None
        process.stdout.readline()
        arena = Arena(ARENA)
        backend = SharedMemoryBackend(
            0, [None, PeerProcess(ours, socket.socket(), Window(arena.fd), process.pid, 0.0)], arena, 60.0
        )
        timer = threading.Timer(0.2 if fill else 0.0, process.kill)
        timer.start()
        begin = time.monotonic()
        check(backend)
        assert time.monotonic() - begin < SOON
        timer.join()


def test_a_rank_that_died_is_noticed_though_a_child_of_it_keeps_its_socket_open() -> None:
    def check(backend: SharedMemoryBackend) -> None:
        with pytest.raises(PeerError, match="its process ended"):
            backend.recv_bytes(1, 1, 0).wait(60.0)

    with_a_socket_that_outlives_its_process(check, fill=False)


def test_so_it_is_where_its_socket_is_full() -> None:
    def check(backend: SharedMemoryBackend) -> None:
        with pytest.raises(PeerError, match="its process ended"):
            send_much(backend)

    with_a_socket_that_outlives_its_process(check, fill=True)


# -- peers that give up ------------------------------------------------------------------------------------------------


def expose(transport: Transport) -> Any:
    return transport.expose(transport.scratch(5, torch.float32, torch.device("cpu")), [(1, 0, 5)], TAG)


def send(transport: Transport) -> Any:
    return transport.isend(torch.ones(INLINE), 1, TAG)


@pytest.mark.parametrize("give", [expose, send])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_who_waits_for_a_reader_learns_why_it_gave_up(give: Callable[[Transport], Any], leaves: bool) -> None:
    """The reader has sent all its messages, and fails while it reads."""
    backends = mesh(2, timeout=60.0)
    first, second = map(Transport, backends)
    work = give(first)
    second.isend(torch.ones(1), 0, TAG)
    second.abort("the disk is full")
    if leaves:
        leave(backends[1])
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 0, in bucket 3: rank 1 failed: the disk is full"):
        work.wait()
    assert time.monotonic() - begin < SOON
    assert first.broken


@pytest.mark.parametrize("give", [expose, send])
@pytest.mark.parametrize("why", ["the disk is full", ""])
def test_an_error_of_sending_names_the_rank_and_the_collective(give: Callable[[Transport], Any], why: str) -> None:
    backends = mesh(2)
    first, second = map(Transport, backends)
    if why:
        second.abort(why)
    leave(backends[1])
    with pytest.raises(PeerError, match=rf"rank 0, in bucket 3: .*rank 1 .*{why or 'its process ended'}"):
        give(first)
    with pytest.raises(CollectiveError, match="this communicator is closed since an earlier failure"):
        give(first)


def test_a_loan_cannot_be_given_back_to_a_rank_that_is_gone() -> None:
    backends = mesh(2)
    first, second = map(Transport, backends)
    expose(first)
    mapped = second.map_buffers([(0, 5)], torch.float32, TAG)
    mapped.wait()
    leave(backends[0])
    with pytest.raises(PeerError, match=r"rank 1, in bucket 3: .*rank 0 .*its process ended"):
        mapped.release()
