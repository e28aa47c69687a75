"""Ranks whose collectives run on a stream, as on a GPU: a thread of each rank executes them one after the other.

    launch     the collective is put into the rank's queue, and the host goes on
    stream     waits until every rank has sent its part of the collective with the same number, whatever it is
    wait       the host waits for the stream, since its next operation on the CPU reads the result
    abort      ends what the stream executes, and all that is queued; a host that waits gets an error

Ranks that launch different collectives mix their bytes if the sizes fit, and wait for ever otherwise, as with NCCL.

Knows: bytes, and a place where ranks leave them for each other. Does not know: algorithms, the library's ledger.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import Loopback, Transport
from collectives.backend import Backend, Pending
from collectives.backends.gloo import GlooBackend
from collectives.backends.threads import ThreadBackend, _World
from collectives.messages import PeerError

from .carried import plain_sum

T = TypeVar("T")
_MAKING = threading.Lock()  # of parts
PAUSE = 0.001  # seconds between two looks for another rank's part


class Mail(Protocol):
    """Where ranks leave parts for each other. ``find`` returns None if nothing is there yet."""

    def leave(self, key: str, data: bytes) -> None: ...

    def find(self, key: str) -> bytes | None: ...


class ThreadMail:
    def __init__(self) -> None:
        self._left: dict[str, bytes] = {}

    def leave(self, key: str, data: bytes) -> None:
        self._left[key] = data

    def find(self, key: str) -> bytes | None:
        return self._left.get(key)


class StoreMail:
    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, key: str, data: bytes) -> None:
        self._store.set(key, data)

    def find(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None


class Launched:
    """A collective on the stream."""

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
    """The stream of one rank, and what it needs for collectives."""

    def __init__(self, mail: Mail, rank: int, size: int) -> None:
        self._mail, self._rank, self._size = mail, rank, size
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._launched, self._numbers = list[Launched](), Counter[str]()
        self._aborted = threading.Event()
        threading.Thread(target=self._execute, daemon=True).start()

    def _execute(self) -> None:
        while (launched := self._queue.get()) is not None:
            launched.execute(aborted=self._aborted.is_set())

    def launch(
        self, parts: Sequence[Tensor], sizes: Sequence[int], finish: Callable[[list[Tensor]], object]
    ) -> Pending:
        """``parts``: bytes for each rank; ``sizes``: of what each sends here."""
        return self.launch_among("", dict(enumerate(parts)), dict(enumerate(sizes)), finish)

    def launch_among(
        self, pair: str, parts: dict[int, Tensor], sizes: dict[int, int], finish: Callable[[list[Tensor]], object]
    ) -> Pending:
        """``pair``: two ranks that pass a tensor on, which counts their own launches; empty: all ranks."""
        number = f"{pair} {self._numbers[pair]}"
        self._numbers[pair] += 1

        def run() -> bool:
            for to, part in parts.items():
                self._mail.leave(f"{number} {self._rank} {to}", part.numpy().tobytes())
            arrived = []
            for source, size in sizes.items():
                data = self._from(f"{number} {source} {self._rank}", size)
                if data is None:
                    return False
                arrived.append(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())
            finish(arrived)
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


class _Streamed(Backend):
    """Collectives of a backend on a stream."""

    has_collectives = True
    stream: Stream

    def stays_on(self, device: torch.device) -> bool:
        return True

    def all_to_all(self, out: Tensor, source: Tensor, splits: tuple[list[int], list[int]] | None) -> Pending:
        arriving, leaving = splits or ([source.numel() // self.world_size] * self.world_size,) * 2
        return self.stream.launch(torch.split(source, leaving), arriving, lambda arrived: out.copy_(torch.cat(arrived)))

    def all_gather(self, out: Tensor, source: Tensor) -> Pending:
        sizes = [source.numel()] * self.world_size
        return self.stream.launch([source] * self.world_size, sizes, lambda found: out.copy_(torch.cat(found)))

    def reduce_scatter(self, out: Tensor, source: Tensor) -> Pending:
        def finish(arrived: list[Tensor]) -> None:
            out.copy_(plain_sum(None, [part.view(out.dtype) for part in arrived], out.dtype))

        parts = [part.view(torch.uint8) for part in source.chunk(self.world_size)]
        return self.stream.launch(parts, [out.nbytes] * self.world_size, finish)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        nothing = tensor[:0]
        parts = [tensor if self.rank == source else nothing] * self.world_size
        sizes = [tensor.numel() if rank == source else 0 for rank in range(self.world_size)]
        return self.stream.launch(parts, sizes, lambda arrived: tensor.copy_(arrived[source]))

    def pass_to(self, tensor: Tensor, to: int) -> Pending:
        return self.stream.launch_among(f"{self.rank} {to}", {to: tensor.view(torch.uint8)}, {}, lambda _: None)

    def take_from(self, tensor: Tensor, source: int) -> Pending:
        into = tensor.view(torch.uint8)
        sizes = {source: tensor.nbytes}
        return self.stream.launch_among(f"{source} {self.rank}", {}, sizes, lambda arrived: into.copy_(arrived[0]))

    def abort_collectives(self) -> bool:
        return self.stream.abort()


class StreamedThread(_Streamed, ThreadBackend):
    """A rank that is a thread."""

    def __init__(self, world: _World, rank: int, world_size: int, timeout: float, mail: Mail, limit: float) -> None:
        ThreadBackend.__init__(self, world, rank, world_size, timeout)
        self.stream, self.stall_limit = Stream(mail, rank, world_size), limit
        self._parts = list[StreamedThread]()

    @property
    def has_parts(self) -> bool:
        return True

    def part(self, parts: Sequence[Sequence[int]]) -> StreamedThread:
        mine = tuple(next(ranks for ranks in parts if self.rank in ranks))
        with _MAKING:
            made = vars(self._world).setdefault("parts", {}).setdefault(mine, (_World(None), ThreadMail()))
        part = StreamedThread(made[0], mine.index(self.rank), len(mine), self.timeout, made[1], self.stall_limit)
        self._parts.append(part)
        return part

    def board(self) -> dist.Store:
        with _MAKING:
            store: dist.Store = vars(self._world).setdefault("store", dist.HashStore())
        return store

    def is_closed(self, rank: int) -> bool:
        return rank in vars(self._world).setdefault("ended", set())

    def end(self) -> None:
        """End the streams."""
        self.stream.end()
        for part in self._parts:
            part.end()


class StreamedGloo(_Streamed, GlooBackend):
    """A rank that is a process of a gloo group."""

    def __init__(self, group: dist.ProcessGroup, timeout: float, mail: Mail, limit: float) -> None:
        GlooBackend.__init__(self, group, timeout)
        self.stream, self.stall_limit = Stream(mail, self.rank, self.world_size), limit


class StreamedLoopback(Loopback[T]):
    """A group of threads with streams. ``limit``: seconds before a sentinel asks why a rank waits."""

    def __init__(self, world_size: int, *, limit: float, timeout: float = 30.0) -> None:
        super().__init__(world_size)
        self._world, mail = _World(None), ThreadMail()
        self.backends = [
            StreamedThread(self._world, rank, world_size, timeout, mail, limit) for rank in range(world_size)
        ]
        self.transports = [Transport(backend) for backend in self.backends]
