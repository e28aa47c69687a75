"""Ranks as threads with a clock of their own that moves only while all wait: a time limit takes no time.

rank 0   runs . waits until 60 ......
rank 1   runs ....... waits until 30      all ranks wait: the clock goes to 30, and the wait of rank 1 ends
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TypeVar

import pytest

from collectives import Loopback, PeerError, Transport
from collectives.backends.threads import Interference, ThreadBackend, _Transfer, _World
from collectives.links import control_plane, messenger

T = TypeVar("T")


class _Clock(threading.Condition):
    """A condition that all ranks share, and the time. Whoever waits looks again after each change."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.now, self.ranks = 0.0, ranks
        self._until: dict[int, float] = {}  # thread -> when its wait ends

    def notify_all(self) -> None:
        self._until.clear()
        super().notify_all()

    def pause(self, moment: float) -> None:
        """Wait for a change, or for the moment. The caller holds the lock."""
        self._until[threading.get_ident()] = moment
        if len(self._until) < self.ranks:
            self.wait()
            return
        self.now = min(self._until.values())
        self.notify_all()


class _ClockedWorld(_World):
    def __init__(self, ranks: int, interfere: Interference | None) -> None:
        super().__init__(interfere)
        self.clock = self._changed = _Clock(ranks)

    def complete(self, transfer: _Transfer, peer: int, key: tuple[int, int, int], timeout: float) -> None:
        clock = self.clock
        with clock:
            limit = clock.now + timeout
            while not transfer.done and (transfer.source is None or transfer.target is None):
                if key in self._closed_slots or peer in self._gone:
                    break
                if clock.now >= limit:
                    raise PeerError(f"time limit of {timeout} s passed")
                clock.pause(limit)
            super().complete(transfer, peer, key, timeout)


class Clocked(Loopback[T]):
    """A group of threads whose time limits are those of a virtual clock, `now`, by which the library measures, too."""

    def __init__(self, world_size: int, *, timeout: float = 60.0, interfere: Interference | None = None) -> None:
        super().__init__(world_size)
        world = self._world = self._clocked = _ClockedWorld(world_size, interfere)
        self.transports = [Transport(ThreadBackend(world, rank, world_size, timeout)) for rank in range(world_size)]

    @property
    def now(self) -> float:
        return self._clocked.clock.now

    def sleep(self, seconds: float) -> None:
        """Let this rank do nothing for some seconds."""
        clock = self._clocked.clock
        with clock:
            end = clock.now + seconds
            while clock.now < end:
                clock.pause(end)

    def run(self, program: Callable[[Transport], T], ranks: Sequence[int] | None = None) -> list[T]:
        def until_the_end(transport: Transport) -> T:
            clock = self._clocked.clock
            try:
                return program(transport)
            except BaseException as error:  # before the clock may move on
                self._clocked.mark_gone(transport.rank, f"{type(error).__name__}: {error}")
                raise
            finally:
                with clock:
                    clock.ranks -= 1
                    clock.notify_all()

        with pytest.MonkeyPatch.context() as patch:
            for module in (control_plane, messenger):
                patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
            return super().run(until_the_end, ranks)
