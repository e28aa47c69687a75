"""Ranks of one host find each other and share memory, or say why not; an end is an error in time."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Algorithm,
    Collective,
    CollectiveError,
    Kind,
    PeerError,
    Region,
    Replicated,
    Tag,
    Transport,
    topology,
)
from collectives.backends import gloo as gloo_backend
from collectives.backends import rendezvous, shared_memory
from collectives.backends.gloo import GlooBackend, connect
from collectives.backends.rendezvous import HostListener, RankInfo, exchange_infos, join
from collectives.backends.shared_memory import INLINE, PAGE, Arena, PeerProcess, SharedMemoryBackend, Spans, Window
from collectives.topology import by_name, choose, replicate
from zero import ZeroOptimizer

from ..support.carried import CPU
from ..support.descriptors import listed, opened
from ..support.late import on_late_threads
from ..support.limits import BOUND, PATIENT, at_once
from ..support.pool import GlooPool
from ..support.sockets import ARENA, Wire, leave, mesh, on_hosts, on_sockets, on_wires, outcome, works

MANY = 300  # messages, more than a socket buffers
TAG = Tag(Kind.REDUCE_SCATTER, "bucket 3", 7, 3)


def numbered(number: int, size: int) -> bytes:
    return number.to_bytes(4, "little") * -(-size // 4)


def send_much(backend: SharedMemoryBackend) -> None:
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


@given(st.lists(st.integers(1, 9), max_size=20), st.randoms(use_true_random=False))
def test_pages_are_held_once_and_all_are_there_again_when_they_are_free(sizes: list[int], random: Any) -> None:
    spans, pages, held = Spans(40), set[int](), list[tuple[int, int]]()
    for size in sizes:
        begin = spans.take(size)
        if begin is None:
            held.sort(key=lambda _: random.random())
            for part in held[len(held) // 2 :]:
                spans.give(*part)
                pages -= set(range(part[0], sum(part)))
            del held[len(held) // 2 :]
        else:
            assert pages.isdisjoint(range(begin, begin + size))
            pages |= set(range(begin, begin + size))
            held.append((begin, size))
    held.sort(key=lambda _: random.random())
    for part in held:
        spans.give(*part)
    assert spans.take(40) == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), SIZES, st.booleans(), st.booleans()), max_size=30),
    st.booleans(),
    st.randoms(),
)
def test_messages_of_a_slot_are_in_order_whatever_is_read_first(
    messages: list[tuple[int, int, bool, bool]], begun: bool, order: Any
) -> None:
    """Small messages are in frames, large ones in the sender's memory. ``begun``: receives begin in their order."""
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
    def program(transport: Transport) -> bool:
        backend = transport.backend
        for number, to in itertools.product(range(MANY), transport.peers()):
            backend.send(as_tensor(numbered(number, INLINE)), to, number % 3)
        return all(
            backend.recv_bytes(INLINE, source, number % 3).wait(PATIENT) == numbered(number, INLINE)
            for number, source in itertools.product(range(MANY), transport.peers())
        )

    assert on_sockets(3, program) == [True] * 3
    first, _second = mesh(2, timeout=0.1)
    with pytest.raises(PeerError, match=r"time limit of 0\.1 s"):
        send_much(first)


def test_a_third_rank_that_has_left_does_not_disturb_a_full_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = mesh(3, timeout=PATIENT)
    make_room = SharedMemoryBackend._make_room
    reader = threading.Thread(target=lambda: [second.recv_bytes(INLINE, 0, 0).wait(BOUND) for _ in range(MANY)])

    def noticed(self: SharedMemoryBackend, *arguments: Any) -> None:
        if reader.ident is None:
            reader.start()
        make_room(self, *arguments)

    monkeypatch.setattr(SharedMemoryBackend, "_make_room", noticed)
    third.send_bytes(b"the last", 0, 0)
    leave(third)
    send_much(first)
    reader.join()
    assert first.recv_bytes(8, 2, 0).wait(BOUND) == b"the last"
    with pytest.raises(PeerError, match="its process ended"):
        first.recv_bytes(8, 2, 0).wait(BOUND)


HOLDER = "import os, sys; os.fork(); print('here', flush=True); sys.stdin.read()"
"""A process whose child keeps its socket open; both end at the end of the standard input."""


@pytest.mark.parametrize("full", [False, True], ids=["its socket is empty", "its socket is full"])
def test_a_death_is_noticed_though_a_child_keeps_the_socket_open(full: bool) -> None:
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


def expose(transport: Transport) -> Any:
    tensor = transport.scratch(5, torch.float32, CPU)
    assert transport.peers_can_read(tensor)
    return transport.expose(tensor, [(1, 0, 5)], TAG)


def send(transport: Transport) -> Any:
    return transport.isend(torch.ones(INLINE), 1, TAG)


@pytest.mark.parametrize("give", [expose, send])
def test_an_error_of_sending_names_the_rank_the_collective_and_the_reason(give: Callable[[Transport], Any]) -> None:
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


NOW = Tag(Kind.EXCHANGE, "now")


def pages_of(fd: int) -> int:
    return os.stat(fd).st_blocks * 512 // PAGE


def no_memory(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOMEM, "no memory")


def test_a_region_is_freed_with_its_last_holder() -> None:
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


def automatic(transport: Transport) -> Collective:
    return choose(transport).collective


def named(name: str) -> Algorithm:
    return lambda transport: by_name(transport, name).collective


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 0], [0, 0, 1, 1], [2, 1, 0]], ids=str)
def test_what_is_chosen_follows_from_where_the_ranks_are(monkeypatch: pytest.MonkeyPatch, hosts: list[int]) -> None:
    on_hosts(monkeypatch, hosts)
    one_host, all_apart = len(set(hosts)) == 1, len(set(hosts)) == len(hosts)
    expected = "shared" if one_host else "pairwise" if all_apart else "hierarchical"
    assert on_wires(len(hosts), outcome(automatic)) == [expected] * len(hosts)
    assert on_wires(len(hosts), outcome(named("hierarchical"))) == ["hierarchical"] * len(hosts)
    for found in on_wires(len(hosts), outcome(named("shared"))):
        assert found == "shared" if one_host else "collective 'shared' is for ranks of one host" in found


def chosen(group: dist.ProcessGroup, rank: int, hosts: list[int], kinds: str, factor: int) -> tuple[str, str, bool]:
    """Return the name of the chosen algorithm, which works, the reason, and whether it is exact, with gloo for NCCL."""
    device = torch.device({"g": "cuda", "c": "cpu"}[kinds[rank]])
    with pytest.MonkeyPatch.context() as patch:
        names = {"cuda": ("nccl", "nccl2", "nccl-legacy", "nccl")[rank], "cpu": "gloo"}
        patch.setattr(GlooBackend, "device_backend", lambda _, device: names[device.type])
        for connect_them in ("_connect_owners", "_connect_all"):
            patch.setattr(topology, connect_them, lambda *_: None)  # there is no such device
        on_hosts(patch, [0] * len(hosts) if hosts[0] < 0 else hosts, hosts if hosts[0] < 0 else ())
        transport = connect(group).fork()
        choice = replicate(transport, factor, "auto", device) if factor else choose(transport, device)
    collective = choice.collective
    inner = collective.inner if isinstance(collective, Replicated) else collective
    return works(inner), choice.reason, collective.exact


UNORDERED = {  # hosts -> why sums cannot go from host to host
    (0, 1, 0, 1): "ranks of a host are not neighbours in the group's order: [0, 2], [1, 3]; number the ranks",
    (0, 0, 1): "hosts have different numbers of ranks: [0, 1], [2]; number the ranks host by host, as many on",
}


@pytest.mark.parametrize("hosts", UNORDERED, ids=str)
def test_a_fold_over_ranks_that_are_not_numbered_host_by_host_is_an_error_that_says_how(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hosts(monkeypatch, hosts)
    for found in on_wires(len(hosts), outcome(named("fold"))):
        assert found.startswith(f"collective 'fold': {UNORDERED[hosts]}")


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["neighbours", "others"])
def test_auto_warns_once_where_the_order_of_a_sum_is_not_that_of_the_ranks(
    hosts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "_all_have_nccl", lambda *_: True)
    monkeypatch.setattr(topology, "ThreadBackend", Wire)  # threads pass for processes
    monkeypatch.setattr(topology, "_hosts_of", lambda _: hosts)

    def program(transport: Transport) -> str:
        return str(ZeroOptimizer(torch.nn.Linear(4, 4), stage=2, process_group=transport).describe())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        described = on_late_threads(4, program)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    folds = hosts[0] == [0, 1]
    assert len(said) == (0 if folds else 1)
    assert all("in NCCL's order" in line and "number the ranks host by host" in line for line in said)
    for text in described:
        assert f"collective {'fold' if folds else 'native'} (4 ranks are on 2 hosts, with NCCL" in text
        assert "'fold' sends every sum 1.5 times in the accumulator's dtype (0.5 more in each further" in text
        assert "'native' 1.5 times in the wire's dtype, in NCCL's order" in text


def test_where_torch_hides_a_time_limit_it_is_torchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_backend, "_backends", lambda group: {"cuda": "nccl", "cpu": "gloo"})
    assert gloo_backend.timeout_of(mock.Mock(spec=[])) == gloo_backend.DEFAULT_TIMEOUT


TWICE = "3 ranks are on 2 hosts, with NCCL: between hosts 'fold' sends every sum 1.5 times"
NCCL = {  # hosts, negative ones are containers of one; GPU or CPU of each rank; ranks of a replica -> name, reason
    ((0, 0, 0), "ggg", 0): ("all_to_all", "all 3 ranks are on one host, with NCCL"),
    ((-1, -2, -3), "ggg", 0): ("all_to_all", "all 3 ranks are on one host, with NCCL"),
    ((-1, -2, -3), "ccc", 0): ("pairwise", "each of the 3 ranks has its own host"),
    ((0, 0, 1, 1), "gggg", 0): ("fold", TWICE.replace("3", "4")),
    ((0, 1, 2), "ggg", 0): ("all_to_all", "all 3 ranks have a host each, with NCCL"),
    ((0, 1, 0), "ggg", 0): ("native", TWICE),
    ((0, 0, 0), "gcg", 0): ("shared", "all 3 ranks are on one host"),
    ((0, 0, 1, 1), "gggg", 2): ("all_to_all", "2 replicas of 2; with NCCL, each on one host"),
    ((0, 1, 0, 1), "gggg", 2): ("native", "2 replicas of 2; with NCCL, some on several hosts: let sharding_factor="),
    ((0, 0, 0, 1), "gggg", 1): ("pairwise", "4 replicas of 1; with NCCL, each on one host"),
}


@pytest.mark.parametrize("case", NCCL, ids=str)
def test_nccl_is_used_where_all_tensors_are_on_its_gpus(gloo: GlooPool, case: Any) -> None:
    for name, why, exact in gloo.run(chosen, *case, ranks=range(len(case[0]))):
        assert name == NCCL[case][0]
        assert why.startswith(NCCL[case][1])
        assert exact == (name != "native")


def test_rank_0_says_why_nccl_cannot_serve_replicas() -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Wire, "device_backend", lambda *_: "nccl")
        made = on_wires(2, lambda transport: replicate(transport, 1, "auto", torch.device("cuda")))
    assert all("2 replicas of 1; through the host's memory" in choice.reason for choice in made)
    assert ["leave sharding_factor= away" in str(warning.message) for warning in caught] == [True]


def once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return a function that fails the first time that any thread calls it."""
    first = threading.Lock()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if first.acquire(blocking=False):
            raise error
        return call(*arguments, **named)

    return wrapped


def no_descriptor_left(patch: pytest.MonkeyPatch) -> None:
    """A rank that cannot tell its host is not taken for one of another."""
    stat, fail = os.stat, once(lambda: None, OSError(errno.EMFILE, "too many open files"))
    patch.setattr(os, "stat", lambda path, **named: (path == "/proc/self/ns/net" and fail()) or stat(path, **named))


def another_user_to_the_kernel(patch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    patch.setattr(os, "geteuid", lambda: user + 1)
    patch.setattr(socket, "send_fds", lambda *_: pytest.fail("a rank gave something to another user"))


def fails(name: str, call: Any, error: Exception) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(rendezvous, name, once(call, error))


PROBLEMS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "forbidden": (
        fails("Arena", Arena, OSError(errno.EPERM, "forbidden")),
        r"rank \d cannot share memory: PermissionError: .*forbidden",
    ),
    "another_kernel": (lambda patch: patch.delattr(os, "memfd_create"), "rank 0 cannot share memory: AttributeError"),
    "no_address_space": (
        fails("Window", Window, OSError(errno.ENOMEM, "no address space")),
        r"rank \d could not connect: OSError: .*no address space",
    ),
    "another_user": (
        lambda patch: patch.setattr(rendezvous, "_user", iter([7, 8, 8]).__next__),
        r"rank \d is another user's process \(user \d, and \d on rank 0\)",
    ),
    "another_user_to_the_kernel": (
        another_user_to_the_kernel,
        r"rank \d could not connect: .*(process of user|timed out|Broken pipe|reset|refused)",
    ),
    "no_descriptor_left": (no_descriptor_left, r"rank \d cannot share memory: OSError: .*too many open files"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_that_cannot_share_memory_talk_and_rank_0_says_why(name: str) -> None:
    problem, words = PROBLEMS[name]
    with pytest.MonkeyPatch.context() as patch:
        problem(patch)
        with pytest.warns(UserWarning, match=f"the ranks talk over wire, not through shared memory: {words}"):
            assert on_wires(3, outcome(automatic), timeout=1.0) == ["pairwise"] * 3
    for asked in ("shared", "hierarchical"):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            problem(patch)
            warnings.simplefilter("error")
            found = on_wires(3, outcome(named(asked)), timeout=1.0)
        assert len(set(found)) == 1
        assert re.match(f"collective '{asked}': {words}", found[0])


def knock(info: RankInfo, data: bytes | None, files: list[int]) -> socket.socket:
    """Connect as a process that found the address, but does not know the token."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(BOUND)
    connection.connect(b"\0zero-" + info.address.encode())
    if data is None:
        connection.shutdown(socket.SHUT_WR)
    else:
        socket.send_fds(connection, [data], files)
    return connection


def answer_of(stranger: socket.socket) -> tuple[bytes, list[int]]:
    with stranger, suppress(ConnectionResetError):
        return socket.recv_fds(stranger, 100, 2)[:2]
    return b"", []


def test_a_stranger_is_turned_away_and_the_ranks_connect() -> None:
    """It has a wrong token or message, no memory, unreadable memory, a token of a higher rank, or sends nothing."""
    before = listed()

    def program(transport: Transport) -> tuple[str, list[tuple[bytes, list[int]]]]:
        listener, strangers = HostListener(2), []
        infos = exchange_infos(transport, listener)
        arenas, empty = [Arena(1 << 20) for _ in range(2)], os.memfd_create("empty")
        if transport.rank == 1:
            memory = [arena.fd for arena in arenas]
            hello = rendezvous._HELLO.pack(0, bytes(16))
            higher = rendezvous._HELLO.pack(1, bytes.fromhex(listener.info.token))
            hellos = [(hello, files) for files in (memory, [empty, empty], memory[:1], [])]
            others = [(higher, memory), (b"GET /", memory), (b"GET /", []), (None, [])]
            strangers = [knock(listener.info, data, files) for data, files in (*hellos, *others)]
        transport.exchange(b"", Tag(Kind.EXCHANGE, "strangers first"))
        backend = join(transport, listener, infos)
        os.close(empty)
        assert isinstance(backend, SharedMemoryBackend), backend
        return works(named("shared")(Transport(backend))), [answer_of(stranger) for stranger in strangers]

    assert on_wires(2, program) == [("shared", []), ("shared", [(b"", [])] * 8)]
    assert opened() <= before
