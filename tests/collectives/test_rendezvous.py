"""How ranks of one host connect and share memory, and what they use if they cannot."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Collective, CollectiveError, Kind, Tag, Transport, topology
from collectives.backends import rendezvous
from collectives.backends.arena import Arena, Window
from collectives.backends.rendezvous import HostListener, RankInfo, exchange_infos, join
from collectives.backends.shared_memory import SharedMemoryBackend
from collectives.topology import choose, hierarchical, shared

from ..support.descriptors import opened
from ..support.sockets import on_sockets, on_wires
from ..support.warned import own

SOON = 10.0
FORBIDDEN = OSError(errno.EPERM, "forbidden")


def works(collective: Collective) -> str:
    """Return the name of an algorithm, after a check of its results."""
    t = collective.transport
    bounds = [3 * rank for rank in range(t.world_size + 1)]
    whole = torch.zeros(bounds[-1])
    own = whole[bounds[t.rank] : bounds[t.rank + 1]]
    source = torch.full((bounds[-1],), 1.0 + t.rank)
    collective.reduce_scatter(source, bounds, own, start=None, tag=Tag(Kind.REDUCE_SCATTER, "sum", 1)).wait()
    collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
    assert whole.tolist() == [sum(range(1, t.world_size + 1))] * bounds[-1]
    return collective.name


def automatic(transport: Transport) -> Collective:
    return choose(transport).collective


def outcome(make: Callable[[Transport], Collective]) -> Callable[[Transport], str]:
    """Return the name of the chosen algorithm, or the error."""

    def program(transport: Transport) -> str:
        try:
            return works(make(transport))
        except CollectiveError as error:
            return str(error)

    return program


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int], containers: Sequence[int] = ()) -> None:
    """Pretend that rank r is on host ``hosts[r]``, or in a container of its own there."""
    names = (
        [f"machine{host} 1" for host in hosts]
        if not containers
        else [f"machine{host} {container}" for host, container in zip(hosts, containers, strict=True)]
    )

    def infos(transport: Transport, listener: HostListener) -> list[RankInfo]:
        found = exchange_infos(transport, listener)
        return [replace(info, host=name) for info, name in zip(found, names, strict=True)]

    monkeypatch.setattr(topology, "exchange_infos", infos)


def once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return a function that fails the first time that any thread calls it."""
    first = threading.Lock()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if first.acquire(blocking=False):
            raise error
        return call(*arguments, **named)

    return wrapped


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 0], [0, 0, 1, 1], [2, 1, 0]])
def test_what_is_chosen_follows_from_where_the_ranks_are(monkeypatch: pytest.MonkeyPatch, hosts: list[int]) -> None:
    on_hosts(monkeypatch, hosts)
    one_host, all_apart = len(set(hosts)) == 1, len(set(hosts)) == len(hosts)
    expected = "shared" if one_host else "pairwise" if all_apart else "hierarchical"
    assert on_wires(len(hosts), outcome(automatic)) == [expected] * len(hosts)
    assert on_wires(len(hosts), outcome(hierarchical)) == ["hierarchical"] * len(hosts)
    for found in on_wires(len(hosts), outcome(shared)):
        assert found == "shared" if one_host else "collective 'shared' is for ranks of one host" in found


def forbid_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise FORBIDDEN

    monkeypatch.setattr(os, "memfd_create", forbidden)


def forbid_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "Arena", once(Arena, FORBIDDEN))


def another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")


def no_address_space_for_one_rank_s_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "Window", once(Window, OSError(errno.ENOMEM, "no address space")))


def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([7, 8, 8])
    monkeypatch.setattr(rendezvous, "_user", lambda: next(users))


PROBLEMS = [
    (forbid_everywhere, "rank 0 cannot share memory: PermissionError: .*forbidden"),
    (forbid_on_one_rank, r"rank \d cannot share memory: PermissionError: .*forbidden"),
    (another_kernel, "rank 0 cannot share memory: AttributeError"),
    (no_address_space_for_one_rank_s_windows, r"rank \d could not connect: OSError: .*no address space"),
    (another_user, r"rank \d is another user's process \(user \d, and \d on rank 0\)"),
]


@pytest.mark.parametrize(("problem", "words"), PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
def test_ranks_that_cannot_share_memory_talk_and_rank_0_says_why(
    monkeypatch: pytest.MonkeyPatch, problem: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    begin = time.monotonic()
    problem(monkeypatch)
    with pytest.warns(UserWarning, match=f"the ranks talk over wire, not through shared memory: {words}") as warned:
        assert on_wires(3, outcome(automatic), timeout=60.0) == ["pairwise"] * 3
    said = [str(warning.message) for warning in own(warned)]
    assert len(said) == 1, said
    assert time.monotonic() - begin < SOON


@pytest.mark.parametrize(("problem", "words"), PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("make", [shared, hierarchical])
def test_who_asked_for_shared_memory_by_name_is_told(
    monkeypatch: pytest.MonkeyPatch,
    problem: Callable[[pytest.MonkeyPatch], None],
    words: str,
    make: Callable[[Transport], Collective],
) -> None:
    problem(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = on_wires(3, outcome(make), timeout=60.0)
    assert found[0].startswith(f"collective '{make.__name__}': rank ")
    assert len(set(found)) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found[0])


def test_one_host_whose_ranks_cannot_share_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, [0, 0, 1, 1])
    forbid_on_one_rank(monkeypatch)
    with pytest.warns(UserWarning, match="not through shared memory"):
        assert on_wires(4, outcome(automatic)) == ["pairwise"] * 4


# -- foreign processes -------------------------------------------------------------------------------------------------


def knock(info: RankInfo, data: bytes | None, files: list[int]) -> socket.socket:
    """Connect as a process that found the address, but does not know the token."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(SOON)
    connection.connect(b"\0zero-" + info.address.encode())
    if data is None:
        connection.shutdown(socket.SHUT_WR)
    else:
        socket.send_fds(connection, [data], files)
    return connection


def test_a_stranger_is_turned_away_and_the_ranks_connect() -> None:
    """It has a wrong token or message, no memory, unreadable memory, a token of a higher rank, or sends nothing."""
    before = opened()

    def program(transport: Transport) -> tuple[str, list[tuple[bytes, list[int]]]]:
        listener, strangers = HostListener(2), []
        infos = exchange_infos(transport, listener)
        arena, other = Arena(1 << 20), Arena(1 << 20)
        empty = os.memfd_create("empty")
        if transport.rank == 1:
            hello = rendezvous._HELLO.pack(0, bytes(16))
            higher = rendezvous._HELLO.pack(1, bytes.fromhex(listener.info.token))
            attempts = [
                (hello, [arena.fd, other.fd]),
                (hello, [empty, empty]),
                (hello, [arena.fd]),
                (hello, []),
                (higher, [arena.fd, other.fd]),
                (b"GET /", [arena.fd, other.fd]),
                (b"GET /", []),
                (None, []),
            ]
            strangers = [knock(listener.info, data, files) for data, files in attempts]
        transport.exchange(b"", Tag(Kind.EXCHANGE, "strangers first"))
        backend = join(transport, listener, infos)
        os.close(empty)
        assert isinstance(backend, SharedMemoryBackend), backend
        answers = []
        for stranger in strangers:
            try:
                answers.append(socket.recv_fds(stranger, 100, 2)[:2])
            except ConnectionResetError:
                answers.append((b"", []))
            stranger.close()
        return works(shared(Transport(backend))), answers

    (_, none), (name, answers) = on_wires(2, program)
    assert (none, name) == ([], "shared")
    assert answers == [(b"", [])] * 8
    assert opened() <= before


def test_a_rank_that_cannot_tell_its_host_is_not_taken_for_one_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens when a process has no descriptor left."""
    stat, fail = os.stat, once(lambda: None, OSError(errno.EMFILE, "too many open files"))

    def of_the_namespace(path: Any, **named: Any) -> os.stat_result:
        if path == "/proc/self/ns/net":
            fail()
        return stat(path, **named)

    monkeypatch.setattr(os, "stat", of_the_namespace)
    with pytest.warns(UserWarning, match=r"cannot share memory: OSError: .*too many open files"):
        assert on_wires(3, outcome(automatic)) == ["pairwise"] * 3


@pytest.mark.full
def test_a_process_of_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the user of a process: no rank has to trust it, or to give it anything."""
    user, given = os.geteuid(), list[Any]()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(socket, "send_fds", lambda *what: given.append(what))
    with pytest.raises(CollectiveError, match=r"could not connect: .*(process of user|timed out|Broken pipe|reset)"):
        on_wires(2, shared, timeout=3.0)
    assert given == []


# -- nothing is left behind --------------------------------------------------------------------------------------------


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:zero")


def listening(address: str) -> bool:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if address in line]
    return any(int(flags, 16) & 0x10000 for _, _, _, flags, *_ in lines)


@pytest.mark.full
def test_the_door_is_shut_when_all_are_in_and_nothing_is_left_of_a_group() -> None:
    before, mapped_before = opened(), mapped()

    def program(transport: Transport) -> tuple[str, bool, bool]:
        listener = HostListener(transport.world_size)
        listened = listening(listener.info.address)
        backend = join(transport, listener, exchange_infos(transport, listener))
        assert isinstance(backend, SharedMemoryBackend)
        works(shared(Transport(backend)))
        return listener.info.address, listened, listening(listener.info.address)

    for world_size in (1, 2, 5):
        for address, listened, still_listens in on_wires(world_size, program):
            assert (listened, still_listens) == (True, False)
            assert address not in Path("/proc/net/unix").read_text()
        assert opened() <= before
    assert mapped() <= mapped_before


@pytest.mark.full
def test_no_program_that_a_rank_starts_inherits_a_descriptor() -> None:
    before = opened()

    def program(transport: Transport) -> list[str]:
        collective = shared(transport)
        assert collective.transport.common([1]) is not None
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all have theirs"))
        found = [fd for fd, _, _ in opened() - before]
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all have looked"))
        inherited = [fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)]
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all have asked"))
        return inherited

    assert on_wires(2, program) == [[], []]


def test_several_groups_of_the_same_ranks_do_not_meet_each_other() -> None:
    def program(transport: Transport) -> list[str]:
        algorithms = [automatic(transport.fork()) for _ in range(3)]
        return [works(algorithm) for algorithm in reversed(algorithms)]

    assert on_wires(3, program) == [["shared"] * 3] * 3


def test_a_part_of_a_group_has_memory_of_its_own() -> None:
    def program(transport: Transport) -> str:
        ranks = [1, 3] if transport.rank in (1, 3) else [2, 0]
        return works(automatic(transport.split(ranks)))

    assert on_wires(4, program) == ["shared"] * 4


def test_sockets_serve_groups_of_every_size() -> None:
    for world_size in range(1, 9):
        assert on_sockets(world_size, lambda transport: works(shared(transport))) == ["shared"] * world_size


NOT_LINUX = """
import mmap, os, select, socket, torch
for module, names in (
    (os, "memfd_create MFD_CLOEXEC pidfd_open posix_fallocate sched_getaffinity"),
    (socket, "MSG_DONTWAIT MSG_NOSIGNAL SOCK_SEQPACKET SO_PEERCRED AF_UNIX"),
    (mmap, "MADV_DONTNEED MADV_REMOVE MAP_PRIVATE PROT_READ PROT_WRITE"),
    (select, "poll"),
):
    for name in names.split():
        delattr(module, name)
import zero
from collectives.backends.rendezvous import HostListener
print(HostListener(2).info.problem)
"""


@pytest.mark.full
def test_elsewhere_than_on_linux_everything_imports_and_a_rank_says_that_it_cannot_share_memory() -> None:
    command = [sys.executable, "-c", NOT_LINUX]
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert "AttributeError" in found.stdout, found.stderr
