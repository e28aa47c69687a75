"""Ranks whose collectives run on a stream, as on a GPU: a thread of each rank executes them one after the other.

    launch     the collective is put into the rank's queue, and the host goes on
    stream     waits until every rank has sent its part of the collective with the same number, whatever it is
    wait       the host waits for the stream, since its next operation on the CPU reads the result
    abort      ends what the stream executes, and all that is queued; a host that waits gets an error

Ranks that launch different collectives mix their bytes if the sizes fit, and wait for ever otherwise, as with NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import Transport
from collectives.backend import Pending
from collectives.backends.gloo import GlooBackend
from collectives.backends.threads import ThreadBackend, _World
from collectives.messages import PeerError

from .late import MAKING, NOTHING, OF_TWO, Combined, Exchanging, Parts, Sizes, Threads

T = TypeVar("T")
PAUSE = 0.001  # seconds between two looks for another rank's part


class Mail:
    """Where ranks leave parts for each other. ``find`` returns None if nothing is there yet."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, key: str, data: bytes) -> None:
        self._store.set(key, data)

    def find(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None


class Launched:
    def __init__(self, run: Callable[[], bool]) -> None:
        self._run, self._done, self._ok = run, threading.Event(), False

    def execute(self, *, aborted: bool) -> None:
        self._ok = not aborted and self._run()
        self._done.set()

    def ended(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float) -> None:
        self._done.wait()  # without a limit, as for a device
        if not self._ok:
            raise PeerError("the collectives of this device were aborted")


class Stream:
    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._launched, self._numbers = list[Launched](), Counter[str]()
        self._aborted = threading.Event()
        threading.Thread(target=self._execute, daemon=True).start()

    def _execute(self) -> None:
        while (launched := self._queue.get()) is not None:
            launched.execute(aborted=self._aborted.is_set())

    def launch(self, among: str, parts: Parts, sizes: Sizes, finish: Callable[[list[bytes]], object]) -> Pending:
        """``among``: two ranks that pass a tensor on, which count their own launches; empty: all ranks. ``sizes``: in
        bytes."""
        number = f"{among} {self._numbers[among]}"
        self._numbers[among] += 1

        def run() -> bool:
            for to, part in parts.items():
                self._mail.leave(f"{number} {self._rank} {to}", part.view(torch.uint8).numpy().tobytes())
            arrived = [self._from(f"{number} {source} {self._rank}", size) for source, size in sizes.items()]
            if None in arrived:
                return False
            finish([data for data in arrived if data is not None])
            return True

        launched = Launched(run)
        self._launched.append(launched)
        self._queue.put(launched)
        return launched

    def _from(self, key: str, size: int) -> bytes | None:
        while not self._aborted.is_set():
            data = self._mail.find(key)
            if data is not None and len(data) == size:
                return data
            time.sleep(PAUSE)
        return None

    def abort(self) -> bool:
        under_way = not all(launched.ended() for launched in self._launched)
        self._aborted.set()
        return under_way

    def end(self) -> None:
        self._aborted.set()
        self._queue.put(None)


class _Streamed(Exchanging):
    stream: Stream

    def stays_on(self, device: torch.device) -> bool:
        return True

    def exchange(
        self, name: str, out: Tensor, source: Tensor, parts: Parts, sizes: Sizes, combined: Combined = torch.cat
    ) -> Pending:
        def finish(arrived: list[bytes]) -> None:
            found = [torch.frombuffer(bytearray(data), dtype=out.dtype) if data else out[:0] for data in arrived]
            if out.numel():
                out.copy_(combined(found))

        nbytes = {rank: size * out.itemsize for rank, size in sizes.items()}
        if name.startswith(OF_TWO):
            pair = [self.rank, *parts] if parts else [*sizes, self.rank]
            return self.stream.launch(str(pair), parts, nbytes, finish)
        everyone = range(self.world_size)
        parts = {rank: parts.get(rank, NOTHING) for rank in everyone}
        return self.stream.launch("", parts, {rank: nbytes.get(rank, 0) for rank in everyone}, finish)

    def abort_collectives(self) -> bool:
        return self.stream.abort()


class StreamedThread(_Streamed, ThreadBackend):
    has_parts = True

    def __init__(self, world: _World, rank: int, world_size: int, timeout: float, mail: Mail, limit: float) -> None:
        ThreadBackend.__init__(self, world, rank, world_size, timeout)
        self.stream, self.stall_limit = Stream(mail, rank), limit
        self._parts = list[StreamedThread]()

    def part(self, parts: Sequence[Sequence[int]]) -> StreamedThread:
        mine = tuple(next(ranks for ranks in parts if self.rank in ranks))
        with MAKING:
            made = vars(self._world).setdefault("parts", {}).setdefault(mine, (_World(None), Mail(dist.HashStore())))
        part = StreamedThread(made[0], mine.index(self.rank), len(mine), self.timeout, made[1], self.stall_limit)
        self._parts.append(part)
        return part

    def board(self) -> dist.Store:
        with MAKING:
            store: dist.Store = vars(self._world).setdefault("store", dist.HashStore())
        return store

    def is_closed(self, rank: int) -> bool:
        return rank in vars(self._world).setdefault("ended", set())

    def end(self) -> None:
        self.stream.end()
        for part in self._parts:
            part.end()


class StreamedGloo(_Streamed, GlooBackend):
    def __init__(self, group: dist.ProcessGroup, timeout: float, mail: Mail, limit: float) -> None:
        GlooBackend.__init__(self, group, timeout)
        self.stream, self.stall_limit = Stream(mail, self.rank), limit


class StreamedLoopback(Threads[T]):
    """A group of threads with streams. ``limit``: seconds before a sentinel asks why a rank waits."""

    def __init__(self, world_size: int, *, limit: float, timeout: float = 30.0) -> None:
        mail = Mail(dist.HashStore())
        super().__init__(world_size, lambda world, rank: StreamedThread(world, rank, world_size, timeout, mail, limit))

    def run(self, program: Callable[[Transport], T], ranks: Sequence[int] | None = None) -> list[T]:
        try:
            return super().run(program, ranks)
        finally:
            for backend in self.backends:
                backend.end()
