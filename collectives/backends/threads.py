"""Ranks as threads of one process: the backend of tests and of a single rank.

As on a real network nothing moves at once. A sender's tensor is read, and a receiver's is written, at the latest moment
that is allowed: when one of the two waits. So a tensor that is reused too early, or read before a wait, shows.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage

from ..backend import Backend, Pending
from ..messages import GoneError, PeerError
from ..transport import Transport

T = TypeVar("T")
Interference = Callable[[int, str, int], None]  # (rank, "send" | "recv" | "wait", peer): may sleep, may raise


class _Transfer:
    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.target: Tensor | None = None
        self.done = False


class _Side:
    """The sender's or the receiver's handle on a transfer."""

    def __init__(self, world: _World, transfer: _Transfer, rank: int, peer: int, slot: int) -> None:
        self._world, self._transfer, self._rank, self._peer, self._slot = world, transfer, rank, peer, slot

    def wait(self, timeout: float) -> None:
        self._world.interfere(self._rank, "wait", self._peer)
        self._world.complete(self._transfer, self._peer, (self._peer, self._rank, self._slot), timeout)


class _World:
    """The mailboxes that the threads share."""

    def __init__(self, interfere: Interference | None) -> None:
        self._changed = threading.Condition()
        self._sends: defaultdict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)
        self._recvs: defaultdict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)
        self._gone: dict[int, str] = {}
        self._closed_slots: set[tuple[int, int, int]] = set()  # sender, receiver, slot
        self.interfere: Interference = interfere or (lambda rank, event, peer: None)
        self._interrupted: set[int] = set()

    def post(self, key: tuple[int, int, int], tensor: Tensor, sending: bool) -> _Transfer:
        own, other = (self._sends, self._recvs) if sending else (self._recvs, self._sends)
        with self._changed:
            transfer = other[key].popleft() if other[key] else _Transfer()
            if sending:
                transfer.source = tensor
            else:
                transfer.target = tensor
            if transfer.source is None or transfer.target is None:
                own[key].append(transfer)
            self._changed.notify_all()
        return transfer

    def complete(self, transfer: _Transfer, peer: int, key: tuple[int, int, int], timeout: float) -> None:
        limit = time.monotonic() + timeout
        with self._changed:
            while not transfer.done and (transfer.source is None or transfer.target is None):
                if key in self._closed_slots:
                    raise GoneError("it gave up")
                if key[1] in self._interrupted:
                    raise PeerError("the wait was ended")
                if peer in self._gone:
                    raise PeerError(f"rank {peer} left: {self._gone[peer]}")
                if not self._changed.wait(limit - time.monotonic()) and time.monotonic() >= limit:
                    raise PeerError(f"time limit of {timeout} s passed")
            if transfer.source is not None and transfer.target is not None:
                if transfer.source.numel() != transfer.target.numel():
                    raise PeerError(f"{transfer.source.numel()} bytes came where {transfer.target.numel()} fit")
                transfer.target.copy_(transfer.source)
                transfer.done, transfer.source, transfer.target = True, None, None

    def close_slot(self, key: tuple[int, int, int]) -> None:
        with self._changed:
            self._closed_slots.add(key)
            self._changed.notify_all()

    def interrupt(self, rank: int) -> None:
        with self._changed:
            self._interrupted.add(rank)
            self._changed.notify_all()

    def mark_gone(self, rank: int, why: str) -> None:
        with self._changed:
            self._gone[rank] = why
            self._changed.notify_all()


class ThreadBackend(Backend):
    """One thread's access to the mailboxes."""

    name = "loopback"
    maps_memory = True

    def __init__(self, world: _World, rank: int, world_size: int, timeout: float) -> None:
        self._world, self.rank, self.world_size, self.timeout = world, rank, world_size, timeout

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        self._world.interfere(self.rank, "send", to)
        return _Side(self._world, self._world.post((self.rank, to, slot), tensor, True), self.rank, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        self._world.interfere(self.rank, "recv", source)
        return _Side(self._world, self._world.post((source, self.rank, slot), tensor, False), self.rank, source, slot)

    def allocate(self, nbytes: int) -> UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()

    def close_slot(self, to: int, slot: int) -> None:
        self._world.close_slot((self.rank, to, slot))

    def offset_of(self, tensor: Tensor) -> int | None:
        return tensor.data_ptr() if tensor.device.type == "cpu" else None

    def interrupt(self) -> None:
        self._world.interrupt(self.rank)

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return the elements at an address, as another process would see them: this does not keep them alive."""
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(offset), dtype=dtype)


class Loopback(Generic[T]):
    """A group of ranks that are threads of this process, for tests and for a single rank.

    Attributes:
        world_size: the number of ranks.
        transports: the `Transport` of each rank, in rank order.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, interfere: Interference | None = None) -> None:
        """``timeout``: the limit of each wait, in seconds; then `PeerError` is raised. ``interfere``: called as
        ``interfere(rank, event, peer)`` before each "send", "recv" and "wait"; it may sleep or raise."""
        self._world = _World(interfere)
        self.world_size = world_size
        self.transports = [
            Transport(ThreadBackend(self._world, rank, world_size, timeout)) for rank in range(world_size)
        ]

    def run(self, program: Callable[[Transport], T], ranks: Sequence[int] | None = None) -> list[T]:
        """Run ``program(transport)`` concurrently on ``ranks`` (default: all), and return their results in that order.

        If a rank raises, the waits of the others end with an error, and the first error is raised here. Each rank has
        the caller's number of intra-op threads.
        """
        intra_op_threads = torch.get_num_threads()
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        results: dict[int, T] = {}
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            torch.set_num_threads(intra_op_threads)  # MKL has one setting per thread, and results depend on it
            try:
                results[rank] = program(self.transports[rank])
            except BaseException as error:
                errors.append((rank, error))
                self._world.mark_gone(rank, f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = errors[0][1]
            errors.clear()
            try:
                raise first
            finally:
                del first  # no frame of its traceback holds it, so that nothing waits for a garbage collection
        return [results[rank] for rank in chosen]


def solo() -> Transport:
    """Return the transport of a group of one rank, which sends nothing."""
    return Loopback[None](1).transports[0]


def on_threads(world_size: int, program: Callable[[Transport], T], *, timeout: float = 30.0) -> list[T]:
    """Run ``program(transport)`` on each rank of a new `Loopback`, and return the results in rank order.

    Sets the number of intra-op threads to 1, for the caller, too. ``timeout``: the limit of each wait, in seconds.
    """
    torch.set_num_threads(1)
    return Loopback[T](world_size, timeout=timeout).run(program)
