"""Finds accesses to one storage on two streams that nothing orders: the rule of torch's CUDA sanitizer, on the CPU.

    access    every operator reads its inputs and writes its outputs, on the stream that is current in its thread
    order     `wait_stream`, the wait for a collective, `torch.accelerator.synchronize`, and autograd's own waits; work
              of the host comes behind what it has waited for, and before what it launches later (`on_host`)
    rule      of two accesses to a storage on different streams, one of them a write, one is ordered behind the other
    memory    an allocation is a write, as of the memory's last user on its stream; a freed storage goes back to the
              stream that allocated it, where the next allocation may use it again: the library's accesses to it must be
              ordered before, or it was given to `Tensor.record_stream`

Streams have vector clocks: what a stream knows of another is the number of that stream's accesses before its own next
one. A pool's block is one storage for as long as the pool has it, whoever uses it. A read of a value by the host
(`item`) orders nothing here: it is no part of the promise that a call waits for the device.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import Transport, pool
from collectives.algorithms import ordered_sum
from collectives.backend import Pending, PendingBytes
from collectives.backends.threads import _World
from zero.gradients.grad_publisher import ShardedGradient
from zero.runtime import accumulator, offload, streams
from zero.runtime.offload import OffloadedStates
from zero.runtime.streams import Streams

from ..support.late import OF_TWO, Combined, LateBackend, Parts, Sizes, Threads, _NoStreams

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = (f"{ROOT / 'zero'}/", f"{ROOT / 'collectives'}/")
RUNS_TESTS = f"{ROOT}/collectives/backends/threads.py"  # a rank that is a thread begins there
TESTS = f"{ROOT / 'tests'}/"
OURS = ("/stream_checker.py", "/late.py")
METADATA = {"aten::set_", "aten::detach_", "aten::record_stream"}  # they touch no element
GPU = torch.device("cuda", 0)
_HERE = threading.local()  # the checker of each rank, which is a thread

T = TypeVar("T")
Clock = dict["Stream", int]


@dataclass(frozen=True)
class Event:
    clock: Clock
    device: torch.device | None = None

    def query(self) -> bool:
        return True  # nothing runs


class Stream:
    """A stream of a rank's device that runs nothing, and has a vector clock."""

    def __init__(self, device: StreamChecker, name: str) -> None:
        self._device, self.name = device, name
        self.clock: Clock = {}

    def wait_stream(self, other: Stream) -> None:
        self.wait_clock(other.clock)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        self.wait_clock(event.clock)

    def wait_clock(self, clock: Clock) -> None:
        """Order all further work behind the work that a clock counts."""
        for stream, time in clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def __enter__(self) -> None:
        self._device.enter(self)

    def __exit__(self, *_: object) -> None:
        self._device.leave()

    def __repr__(self) -> str:
        return self.name


class Backward:
    """On which stream torch's engine runs each node of a backward, and what that stream waits for before.

    On a device the engine does this by itself (`torch/csrc/autograd/engine.cpp`). On the CPU it knows no streams:

        a node           runs on the stream of its forward; a leaf's, on that of the leaf's first use
        before it        that stream waits for the nodes that made its gradients, the first one for the caller's stream
        the end          the caller's stream waits for all leaves, and runs the callbacks of the end
    """

    def __init__(self, loss: Tensor, caller: Stream, stream_of_forward: Callable[[int], Stream]) -> None:
        """``stream_of_forward``: returns the stream on which a forward made the node of a number."""
        self._root: Any = loss.grad_fn
        self._caller, self._stream_of_forward = caller, stream_of_forward
        self._begin: Any = None  # the caller's clock when the first node begins
        self._producers: dict[Any, list[Any]] = defaultdict(list)  # the nodes that make a node's gradients
        self._done: dict[Any, Any] = {}  # the clock at the end of each node that ran an operator
        self._node: Any = None  # that runs
        self._find_producers()

    def _find_producers(self) -> None:
        seen, left = {self._root}, [self._root]
        while left:
            node: Any = left.pop()
            for following, _ in node.next_functions:
                if following is not None:
                    self._producers[following].append(node)
                    if following not in seen:
                        seen.add(following)
                        left.append(following)
        self._leaves = [node for node in seen if not node.next_functions]

    def stream_at(self, node: Any) -> Stream | None:
        """Note which node runs now. Return its stream; None if none runs, or if it is of another graph."""
        if node is None:
            if self._node is not None:
                self.end()
            return None
        if node is not self._root and node not in self._producers:
            return None
        stream = self._stream_of(node)
        if node is not self._node:
            if self._begin is None:
                self._begin = dict(self._caller.clock)
            self._finish()
            self._node = node
            stream.wait_clock(self._ready(node))
        return stream

    def end(self) -> None:
        self._finish()
        self._node = None
        for leaf in self._leaves:
            self._caller.wait_clock(self._done[leaf] if leaf in self._done else self._ready(leaf))

    def _finish(self) -> None:
        if self._node is not None:
            self._done[self._node] = dict(self._stream_of(self._node).clock)

    def _ready(self, node: Any) -> Any:
        """Return the clock at which all gradients of a node are there."""
        ready = dict(self._begin) if node is self._root else {}
        for producer in self._producers[node]:
            clock = self._done[producer] if producer in self._done else self._ready(producer)
            for stream, time in clock.items():
                ready[stream] = max(time, ready.get(stream, 0))
        return ready

    def _stream_of(self, node: Any) -> Stream:
        if node.name().endswith("AccumulateGrad") and self._producers[node]:
            node = min(self._producers[node], key=lambda producer: producer._sequence_nr())
        return self._stream_of_forward(node._sequence_nr())


@dataclass(frozen=True)
class Access:
    """An access to a storage. ``time``: its number among those of its stream; ``by_library``: or by the user."""

    operator: str
    stream: Stream
    time: int
    place: str
    by_library: bool
    writes: bool

    def is_before(self, stream: Stream) -> bool:
        """Return whether all further work of a stream is ordered behind this access."""
        return stream.clock.get(self.stream, 0) >= self.time

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.operator} on stream {self.stream} ({self.place})"


@dataclass
class Memory:
    """A storage: the accesses that later ones must be ordered behind."""

    allocated_on: Stream | None  # None: before the checker was entered
    write: Access | None = None
    reads: dict[Stream, Access] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    alive: Any = None  # a weak reference

    def accesses(self) -> list[Access]:
        return [*([] if self.write is None else [self.write]), *self.reads.values()]


class StreamChecker(TorchDispatchMode):
    """A device of one rank, whose accesses are checked inside ``with``. The end of the block raises what was found.

    Beside ``with stream:`` it needs `pretend`, and `backward` instead of ``loss.backward()``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams: list[Stream] = []
        self.found: list[str] = []
        self._memory: dict[int, Memory] = {}  # by the address of the storage object
        self._freed = defaultdict[Any, list[Access]](list)  # to freed memory, by the stream it belongs to
        self.host = Stream(self, "host")
        self.default = self.stream("default")
        self._entered: list[tuple[Stream, Any]] = [(self.default, None)]  # with the node that entered it
        self._switches: list[tuple[int, Stream]] = [(0, self.default)]  # the first node of a forward on each stream
        self._backward: Backward | None = None

    # -- streams ------------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """Return a new stream. It runs behind what the host has done."""
        self.streams.append(Stream(self, name))
        self.streams[-1].wait_stream(self.host)
        return self.streams[-1]

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Let the host do the work of the block, in which no node of a backward runs: behind what it has waited for."""
        with self.host:
            yield
        for stream in self.streams:
            stream.wait_stream(self.host)

    def current(self) -> Stream:
        stream, entered_by = self._entered[-1]
        if self._backward is None:
            return stream
        node = torch._C._current_autograd_node()
        own = self._backward.stream_at(node)
        return stream if own is None or (entered_by is not None and entered_by is node) else own

    def enter(self, stream: Stream) -> None:
        self._entered.append((stream, torch._C._current_autograd_node()))
        self._switches.append((_next_node(), stream))

    def leave(self) -> None:
        self._entered.pop()
        self._switches.append((_next_node(), self._entered[-1][0]))

    def backward(self, loss: Tensor) -> None:
        switches = self._switches
        self._backward = Backward(
            loss,
            self.current(),
            lambda number: switches[bisect_right(switches, number, key=lambda switch: switch[0]) - 1][1],
        )
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            self._backward.end()
        finally:
            self._backward = None

    def synchronize(self) -> None:
        """Let the host wait for all streams: all further work is ordered behind theirs."""
        for stream in (self.host, *self.streams):
            for other in self.streams:
                stream.wait_stream(other)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> StreamChecker:
        _HERE.checker = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        _HERE.checker = None
        if kind is None and self.found:
            raise AssertionError(self.found[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_on() or func._schema.name in METADATA:
            return result
        name, stream = func._schema.name, self.current()
        given: dict[int, list[Any]] = {}  # by storage: itself, and whether it is touched and written
        for index, (key, *how) in enumerate(_arguments(func)):
            for storage in _storages(args[index] if index < len(args) else kwargs.get(key)):
                before = given.get(storage._cdata, [storage, False, False])
                given[storage._cdata] = [storage, *map(max, before[1:], how)]
        for storage in _storages(result):
            if storage._cdata not in given:
                self._allocated(storage, stream, name)
                given[storage._cdata] = [storage, True, True]
        for storage, touches, writes in given.values():
            if touches:
                self._note(storage, stream, name, writes)
        return result

    def note(self, tensor: Tensor, stream: Stream, operator: str, *, writes: bool) -> None:
        """Note an access that is no operator: that of a collective."""
        for storage in _storages(tensor):
            self._note(storage, stream, operator, writes)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Note that the memory must not be used again before the work that a stream has when it is freed."""
        for storage in _storages(tensor):
            self._of(storage).recorded.add(stream)

    def _note(self, storage: Any, stream: Stream, operator: str, writes: bool) -> None:
        memory = self._of(storage)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        place, by_library = _place()
        access = Access(operator, stream, stream.clock[stream], place, by_library, writes)
        for before in memory.accesses():
            if (writes or before.writes) and not before.is_before(stream):
                self.found.append(f"nothing orders a {before} and a {access}: the storage has {storage.nbytes()} bytes")
        if writes:
            memory.write, memory.reads = access, {}
        else:
            memory.reads[stream] = access

    # -- memory -------------------------------------------------------------------------------------------------------

    def _of(self, storage: Any) -> Memory:
        if storage._cdata not in self._memory:
            self._watch(storage, Memory(None))
        return self._memory[storage._cdata]

    def _allocated(self, storage: Any, stream: Stream, operator: str) -> None:
        """Note new memory of a stream, which may be memory that was freed on it."""
        if storage._cdata in self._memory:
            return
        for access in self._freed.pop(stream, []):
            if not access.is_before(stream):
                place, _ = _place()
                self.found.append(
                    f"nothing orders a {access} and the next allocation, by {operator} on stream {stream} ({place}), "
                    "to which the memory went back when it was freed"
                )
        self._watch(storage, Memory(stream))

    def _watch(self, storage: Any, memory: Memory) -> None:
        number = storage._cdata

        def free(_: object) -> None:
            if self._memory.get(number) is memory:
                del self._memory[number]
            for access in memory.accesses() if memory.allocated_on is not None else ():
                if access.by_library and not any(map(access.is_before, memory.recorded)):
                    self._freed[memory.allocated_on].append(access)

        self._memory[number] = memory
        memory.alive = weakref.ref(storage, free)


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Return the arguments of an operator: the name, and whether it touches and writes their elements: not of views."""
    name = func._schema.name.removeprefix("aten::")
    as_model = name.startswith("new_") or name.endswith("_like")
    found = []
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found.append((argument.name, not as_model and (argument.alias_info is None or writes), writes))
    return tuple(found)


def _storages(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [storage for inside in value for storage in _storages(inside)]
    if not isinstance(value, Tensor) or isinstance(value, ShardedGradient):  # a placeholder has no memory
        return []
    with torch._C.DisableTorchFunctionSubclass():
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return []
        storage = value.untyped_storage()
    return [storage] if storage.nbytes() else []


def _place() -> tuple[str, bool]:
    """Return the innermost line of the library that is running, else of the tests, and whether it is the library's."""
    test = ""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        place = f"{file.removeprefix(f'{ROOT}/')}:{line}"
        if file.startswith(LIBRARY) and file != RUNS_TESTS:
            return place, True
        if file.startswith(TESTS) and not file.endswith(OURS):
            test = test or place
    return test, False


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def here() -> StreamChecker:
    checker: StreamChecker = _HERE.checker
    return checker


def is_on() -> bool:
    return getattr(_HERE, "checker", None) is not None and not getattr(_HERE, "is_off", False)


@contextmanager
def off() -> Iterator[None]:
    """Return a context in which no access of this thread is noted."""
    before, _HERE.is_off = getattr(_HERE, "is_off", False), True
    try:
        yield
    finally:
        _HERE.is_off = before


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
    """Messages of one rank, staged through the host by the current stream, and collectives on a stream of their own.

        launch    the collective's stream waits for the current one, then reads the input and writes the output
        wait      the current stream waits for the collective

    All transfers finish at the wait, as in `late.py`. The rank's thread must be inside its `StreamChecker`.
    """

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


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a device whose streams are those of the rank's checker."""

    def use(self: Any, devices: Iterable[torch.device]) -> None:
        for device in devices:
            self._last.setdefault(device)
        self.exist = True

    monkeypatch.setattr(Streams, "use", use)
    monkeypatch.setattr(streams, "_is_recorded", lambda device: False)
    monkeypatch.setattr(streams, "_number", lambda device: id(here().current()))
    monkeypatch.setattr("zero.core.bits.is_launched.__code__", (lambda device: True).__code__)  # for all importers
    monkeypatch.setattr(pool, "_current_stream", lambda device: here().current() if is_on() else None)
    for module in (pool, accumulator):
        monkeypatch.setattr(module, "worth_keeping", lambda device: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: here().current())
    monkeypatch.setattr(ordered_sum, "_made", lambda device: here().stream("aside"))
    monkeypatch.setattr(offload, "_line_on", lambda device: here().stream(f"copies {len(here().streams)}"))
    monkeypatch.setattr(OffloadedStates, "wait_for_copies", lambda self: here().synchronize())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: here().record_stream(self, stream))
