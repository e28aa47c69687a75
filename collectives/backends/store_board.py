"""A board of processes: a store of torch's that rank 0 holds, beside that of the process group.

Rank 0 sends its addresses through the messages that the ranks have. A rank connects to the first that answers with the
secret of this board. The optimizers of a process group share it.

Knows: addresses, a store. Does not know: what is written.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from .rendezvous import host_key

SECONDS = timedelta(seconds=5)  # for a connection, and for what is read
SECRET = "secret"


class StoreBoard:
    """A board over a store. See `collectives.launches.board`."""

    holder: int | None = 0

    def __init__(self, store: TCPStore) -> None:
        self._store: Any = store  # torch's annotations know no bytes

    def read(self, names: Sequence[str]) -> list[bytes]:
        with _lost():
            return [bytes(value) for value in self._store.multi_get(list(names))]

    def write(self, name: str, value: bytes) -> None:
        with _lost():
            self._store.set(name, value)

    def swap(self, name: str, expected: bytes, value: bytes) -> bytes:
        with _lost():
            return bytes(self._store.compare_set(name, expected, value))

    def count(self, name: str, more: int) -> int:
        with _lost():
            return int(self._store.add(name, more))


@contextmanager
def _lost() -> Iterator[None]:
    """Tell a connection that is lost for good from a store that is slow."""
    try:
        yield
    except DistNetworkError as error:
        raise ConnectionError(" ".join(str(error).split())) from error


def _held() -> tuple[TCPStore, bytes]:
    """Make the store, and return it with what other ranks need."""
    store, secret = TCPStore("localhost", 0, None, True, SECONDS, False), secrets.token_hex(16)
    store.set(SECRET, secret)
    names = [socket.gethostname()]
    with suppress(OSError):
        names += [str(found[4][0]) for found in socket.getaddrinfo(names[0], None, type=socket.SOCK_STREAM)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: the address from which this host would
        names.append(probe.getsockname()[0])
    if os.environ.get("RANK") == "0" and "MASTER_ADDR" in os.environ:
        names.append(os.environ["MASTER_ADDR"])
    told = {"host": host_key(), "names": list(dict.fromkeys(names)), "port": store.port, "secret": secret}
    return store, json.dumps(told).encode()


def _connected(told: bytes) -> TCPStore | None:
    if not told:
        return None
    where = json.loads(told)
    for name in ["127.0.0.1"] if where["host"] == host_key() else where["names"]:
        with suppress(RuntimeError):  # torch's errors of networks
            store = TCPStore(name, where["port"], None, False, SECONDS, False)
            if store.get(SECRET) == where["secret"].encode():
                return store
    return None


class _Boards:
    """The boards of this process, by process group."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[ProcessGroup, StoreBoard | None] = weakref.WeakKeyDictionary()

    def of(self, group: ProcessGroup, rank: int, exchange: Callable[[bytes], list[bytes]]) -> StoreBoard | None:
        """Return the board of a process group; None if this rank cannot reach it. Collective."""
        if group not in self._made:
            store, told = None, b""
            if rank == 0:
                with suppress(RuntimeError):
                    store, told = _held()
            told = exchange(told)[0]
            store = store or _connected(told)
            self._made[group] = None if store is None else StoreBoard(store)
        return self._made[group]


BOARDS = _Boards()
