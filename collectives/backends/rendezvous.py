"""How the ranks of one host find each other, and build a `SharedMemoryBackend`.

Each rank listens at a random abstract address and sends it to the others through the transport that they have. It gives
the descriptor of its arena to every peer that knows its token and belongs to the same user. No name in a file system is
used, and the listener is closed when all ranks are connected.

Knows: kernels, users, addresses. Does not know: frames, collectives.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from ..messages import Kind, Tag
from ..transport import Transport
from .shared_memory import SPIN, Arena, PeerProcess, SharedMemoryBackend, Window, arena_bytes

PATIENCE = 60.0  # seconds for which a rank waits for another to connect
_PEER_CREDENTIALS = struct.Struct("iII")  # process, user, group
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<I{_TOKEN_BYTES}s")


@dataclass(frozen=True)
class RankInfo:
    """What a rank sends to the others about itself."""

    host: str  # `host_key`
    user: int
    address: str
    token: str
    problem: str  # why it cannot share memory; empty if it can

    @classmethod
    def unpack(cls, data: bytes) -> RankInfo:
        return cls(**json.loads(data))


class HostListener:
    """This rank's listener and arena, until its peers are connected."""

    def __init__(self, ranks: int) -> None:
        """``ranks``: the number of all ranks, each of which maps the others' arenas."""
        self.socket: socket.socket | None = None
        self.arena: Arena | None = None
        problem, address, host = "", secrets.token_hex(16), ""
        try:
            host = host_key()
            self.arena = Arena(arena_bytes(ranks))
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.socket.bind(b"\0zero-" + address.encode())
            self.socket.listen(4096)
        except (OSError, AttributeError, ValueError) as error:  # forbidden, or not Linux
            problem = f"{type(error).__name__}: {error}"
            self.close()
        self.info = RankInfo(host, _user(), address, secrets.token_hex(_TOKEN_BYTES), problem)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def host_key() -> str:
    """Return a key that is equal for processes which see each other's abstract sockets: it names the boot of the kernel
    and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except (FileNotFoundError, PermissionError):
        return secrets.token_hex(16)  # shared with no other process
    return f"{boot} {namespace}"


def machine_of(key: str) -> str:
    """Return the part of a `host_key` that names the boot of the kernel: containers of one machine have it in common,
    also if each has a network namespace of its own."""
    return key.partition(" ")[0]


def _user() -> int:
    """Return this process's user, as the kernel reports it to a peer."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def exchange_infos(transport: Transport, listener: HostListener) -> list[RankInfo]:
    """Return the `RankInfo` of every rank. Collective."""
    tag = Tag(Kind.EXCHANGE, "looking for ranks of the same host")
    return [RankInfo.unpack(data) for data in transport.exchange(json.dumps(asdict(listener.info)).encode(), tag)]


def join(transport: Transport, listener: HostListener, infos: Sequence[RankInfo]) -> SharedMemoryBackend | str:
    """Connect the ranks of ``transport``, which are on one host. If one of them cannot connect, return the reason on
    every rank. Collective. ``infos``: of these ranks."""
    problem, backend = _first_problem(infos), None
    if not problem:
        try:
            backend = _connect(transport, listener, infos)
        except (OSError, MemoryError) as error:
            problem = f"rank {transport.rank} could not connect: {type(error).__name__}: {error}"
    problems = transport.exchange(problem.encode(), Tag(Kind.EXCHANGE, "connecting the ranks of a host"))
    problem = next((text.decode(errors="replace") for text in problems if text), "")
    return problem if backend is None or problem else backend


def _first_problem(infos: Sequence[RankInfo]) -> str:
    for rank, info in enumerate(infos):
        if info.problem:
            return f"rank {rank} cannot share memory: {info.problem}"
        if info.user != infos[0].user:
            return f"rank {rank} is another user's process (user {info.user}, and {infos[0].user} on rank 0)"
    return ""


@dataclass(frozen=True)
class _Connection:
    """A connection to another rank. ``files``: a socket for descriptors. ``arena``: the descriptor of its arena."""

    connection: socket.socket
    files: socket.socket
    arena: int
    process: int  # its process id; 0 if it has none that this process can see


def _connect(transport: Transport, listener: HostListener, infos: Sequence[RankInfo]) -> SharedMemoryBackend:
    """Connect to each other rank. All ranks are connected before any step that depends on free memory: if that fails on
    one rank, no other rank waits for it here."""
    assert listener.socket is not None
    assert listener.arena is not None
    rank, spin = transport.rank, _spin(transport.world_size)
    patience = min(PATIENCE, transport.timeout / 2)  # so that the others still wait for this rank's report
    with ExitStack() as opened, closing(listener.socket):
        outgoing = {}
        for to in range(rank + 1, transport.world_size):
            connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.settimeout(patience)
            connection.connect(b"\0zero-" + infos[to].address.encode())
            process = _check_user(connection)  # before it gets a descriptor
            files, theirs = socket.socketpair()
            hello = _HELLO.pack(rank, bytes.fromhex(infos[to].token))
            with theirs:
                socket.send_fds(connection, [hello], [listener.arena.fd, theirs.fileno()])
            outgoing[to] = (connection, opened.enter_context(files), process)
        listener.socket.settimeout(patience)
        with ExitStack() as arenas:
            links = {}
            for _ in range(rank):
                source, link = _accept(listener, rank)
                for end in (link.connection, link.files):
                    opened.enter_context(end)
                arenas.callback(os.close, link.arena)
                links[source] = link
            for to, (connection, files, process) in outgoing.items():
                _, (arena,) = _receive(connection, 1)
                arenas.callback(os.close, arena)
                links[to] = _Connection(connection, files, arena, process)
            peers = list[PeerProcess | None]([None] * transport.world_size)
            for other, link in links.items():
                peers[other] = PeerProcess(link.connection, link.files, Window(link.arena), link.process, spin)
        opened.pop_all()
    return SharedMemoryBackend(rank, peers, listener.arena, transport.timeout)


def _spin(ranks: int) -> float:
    """Return the seconds for which a rank polls before it sleeps: 0 if ranks share cores."""
    return SPIN if ranks <= len(os.sched_getaffinity(0)) else 0.0


def _accept(listener: HostListener, rank: int) -> tuple[int, _Connection]:
    """Return the next lower rank that connects. A process that does not know the token is refused."""
    assert listener.socket is not None
    assert listener.arena is not None
    while True:
        connection, _ = listener.socket.accept()
        connection.settimeout(listener.socket.gettimeout())
        try:
            process = _check_user(connection)
            hello, (arena, files) = _receive(connection, 2)
        except OSError:
            connection.close()
            continue
        source, token = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (rank, b"")
        if secrets.compare_digest(token, bytes.fromhex(listener.info.token)) and source < rank:
            socket.send_fds(connection, [b"welcome"], [listener.arena.fd])
            return source, _Connection(connection, socket.socket(fileno=files), arena, process)
        for descriptor in (arena, files):
            os.close(descriptor)
        connection.close()


def _check_user(connection: socket.socket) -> int:
    """Return the peer's process id, as seen from here. Raise `PermissionError` if it is another user's."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process, user, _ = _PEER_CREDENTIALS.unpack(data)
    if user != _user():
        raise PermissionError(f"a process of user {user} answered")
    return int(process)


def _receive(connection: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    data, found, _, _ = socket.recv_fds(connection, _HELLO.size, descriptors)
    for fd in found:  # `recv_fds` takes flags, but does not pass them on
        os.set_inheritable(fd, False)
    if len(found) != descriptors:
        for fd in found:
            os.close(fd)
        raise PermissionError(f"{len(found)} descriptors came where {descriptors} were due")
    return data, found
