"""Ranks of one host find each other and share memory, or say why not; what is chosen follows from the hosts."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives import Collective, Kind, Replicated, Tag, Transport, topology
from collectives.backends import gloo as gloo_backend
from collectives.backends import rendezvous
from collectives.backends.gloo import GlooBackend, connect
from collectives.backends.rendezvous import HostListener, RankInfo, exchange_infos, join
from collectives.backends.shared_memory import Arena, SharedMemoryBackend, Window
from collectives.topology import choose, fold, hierarchical, replicate, shared
from zero import ZeroOptimizer

from ..support.descriptors import listed, opened
from ..support.late import on_late_threads
from ..support.limits import BOUND
from ..support.pool import GlooPool
from ..support.sockets import Wire, on_hosts, on_wires, outcome, works


def automatic(transport: Transport) -> Collective:
    return choose(transport).collective


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 0], [0, 0, 1, 1], [2, 1, 0]], ids=str)
def test_what_is_chosen_follows_from_where_the_ranks_are(monkeypatch: pytest.MonkeyPatch, hosts: list[int]) -> None:
    on_hosts(monkeypatch, hosts)
    one_host, all_apart = len(set(hosts)) == 1, len(set(hosts)) == len(hosts)
    expected = "shared" if one_host else "pairwise" if all_apart else "hierarchical"
    assert on_wires(len(hosts), outcome(automatic)) == [expected] * len(hosts)
    assert on_wires(len(hosts), outcome(hierarchical)) == ["hierarchical"] * len(hosts)
    for found in on_wires(len(hosts), outcome(shared)):
        assert found == "shared" if one_host else "collective 'shared' is for ranks of one host" in found


def chosen(group: dist.ProcessGroup, rank: int, hosts: list[int], kinds: str, factor: int) -> tuple[str, str, bool]:
    """Return the name of the chosen algorithm, which works, the reason, and whether it is exact.

    NCCL is not available here: the choice is made to believe in it, and the algorithm runs over gloo.
    """
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
    for found in on_wires(len(hosts), outcome(fold)):
        assert found.startswith(f"collective 'fold': {UNORDERED[hosts]}")


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["neighbours", "others"])
def test_auto_warns_once_where_the_order_of_a_sum_is_not_that_of_the_ranks(
    hosts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where sums cannot go from host to host. The description names what was chosen, and what both ways cost."""
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
    """In a warning that names the remedy."""
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
    "another_kernel": (
        lambda patch: patch.delattr(os, "memfd_create"),
        "rank 0 cannot share memory: AttributeError",
    ),
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
    """By a warning of rank 0; an error on every rank if shared memory was asked for by name."""
    problem, words = PROBLEMS[name]
    with pytest.MonkeyPatch.context() as patch:
        problem(patch)
        with pytest.warns(UserWarning, match=f"the ranks talk over wire, not through shared memory: {words}"):
            assert on_wires(3, outcome(automatic), timeout=1.0) == ["pairwise"] * 3
    for make in (shared, hierarchical):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            problem(patch)
            warnings.simplefilter("error")
            found = on_wires(3, outcome(make), timeout=1.0)
        assert len(set(found)) == 1
        assert re.match(f"collective '{make.__name__}': {words}", found[0])


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
        return works(shared(Transport(backend))), [answer_of(stranger) for stranger in strangers]

    assert on_wires(2, program) == [("shared", []), ("shared", [(b"", [])] * 8)]
    assert opened() <= before
