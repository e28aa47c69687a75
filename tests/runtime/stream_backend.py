"""Ranks as threads whose collectives run on a stream of their own, as NCCL's do, and are checked by `stream_checker`.

    launch    the collective's stream waits for the current one, then reads the input and writes the output
    wait      the current stream waits for the collective

Messages are staged through the host, by the current stream. All transfers finish at the wait, as in `late.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from collectives import Transport
from collectives.backend import Pending, PendingBytes
from collectives.backends.threads import _World

from ..support.late import OF_TWO, Combined, LateBackend, Parts, Sizes, Threads, _NoStreams
from .stream_checker import Clock, Event, Stream, here, is_on, off

T = TypeVar("T")


class _OnStream:
    """The work of a collective: a wait is one of the current stream."""

    def __init__(self, work: Pending, end: Clock) -> None:
        self._work, self._end = work, end

    def wait(self, timeout: float | None = None) -> None:
        here().current().wait_clock(self._end)
        with off():
            self._work.wait(30.0 if timeout is None else timeout)


class _Streams(_NoStreams):
    def awaited(self, device: torch.device) -> Any:
        return Event(dict(here().current().clock), device)


class _Received:
    def __init__(self, work: Pending, tensor: Tensor, operator: str) -> None:
        self._work, self._tensor, self._operator = work, tensor, operator

    def wait(self, timeout: float) -> None:
        here().note(self._tensor, here().current(), self._operator, writes=True)
        with off():
            self._work.wait(timeout)


class StreamBackend(LateBackend):
    """Messages and collectives of one rank. Its thread must be inside its `StreamChecker`."""

    maps_memory = False  # device memory, which no other rank reads

    def __init__(self, world: _World, rank: int, world_size: int, timeout: float) -> None:
        super().__init__(world, rank, world_size, timeout)
        self._streams: dict[str, Stream] = {}

    def stays_on(self, device: torch.device) -> bool:
        return True

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        if is_on():
            here().note(tensor, here().current(), f"send to rank {to}", writes=False)
        with off():
            return super().send(tensor, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        with off():
            work = super().recv(tensor, source, slot)
        return _Received(work, tensor, f"receive from rank {source}") if is_on() else work

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        with off():  # the host's memory
            return super().send_bytes(data, to, slot, patience)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        with off():
            return super().recv_bytes(size, source, slot)

    def exchange(
        self, name: str, out: Tensor, source: Tensor, parts: Parts, sizes: Sizes, combined: Combined = torch.cat
    ) -> Pending:
        """Note the accesses of a collective, or of a transfer between two ranks. Each kind has a stream."""
        with off():
            made: Any = super().exchange(name, out, source, parts, sizes, combined)
        kind = name if name.startswith(OF_TWO) else "collectives"
        if kind not in self._streams:
            self._streams[kind] = here().stream(f"of {kind}, rank {self.rank}")
        stream = self._streams[kind]
        stream.wait_stream(here().current())
        here().note(source, stream, kind, writes=False)
        here().note(out, stream, kind, writes=True)
        made._work, made._under_way = _OnStream(made._work, dict(stream.clock)), _Streams()
        pending: Pending = made
        return pending


def on_streams(world_size: int, program: Callable[[Transport], T]) -> list[T]:
    torch.set_num_threads(1)
    return Threads[T](world_size, lambda world, rank: StreamBackend(world, rank, world_size, 30.0)).run(program)
