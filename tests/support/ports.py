"""A port for processes that are about to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give a port that the system gives to no other process inside the block, and on which a store may listen: both
    sockets say that they share the address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        yield probe.getsockname()[1]
