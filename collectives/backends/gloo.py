"""The library's only use of torch.distributed: a backend over a process group, and how it is connected.

Asks for a device's events while another thread captures a CUDA graph.

In CUDA's default mode of a capture no thread may ask for an event, and one that does spoils the capture. A thread whose
own mode is "thread local" may: torch's watchdog of NCCL changes its mode in this way, too.

The gloo group of ranks whose process group has none, as after ``init_process_group("nccl")``: messages need one.

Its ranks alone make it, in the store of their process group. `torch.distributed.new_group` would not do: every process
of the job must call it, or, with ``use_local_synchronization``, all ranks must be in equally many groups before, since
the name under which they meet has that number.

Knows: process groups and their stores, and that torch numbers ranks globally. Global ranks exist in this module and in
`device_mesh` alone, and even here every call is made with ranks of the group. Does not know: buckets, optimizers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend import NCCL, Backend
from ..messages import PeerError
from ..transport import Transport
from .threads import solo

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _loaded() -> Any:
    """Return the library of the CUDA driver; None if there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


_DRIVER = _loaded()


def has_ended(event: torch.Event) -> bool:
    """Return whether the device has reached an event, whatever other threads capture. The host does not wait."""
    if _DRIVER is None or event.device.type != "cuda":
        return event.query()
    mode = ctypes.c_int(_THREAD_LOCAL)
    _DRIVER.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        return event.query()
    finally:
        _DRIVER.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # the mode that it was


LOG = logging.getLogger("collectives")
_PAUSE = 0.005  # seconds between two looks at the store


def make_gloo(group: dist.ProcessGroup, ranks: Sequence[int], place: int, timeout: float) -> Any:
    """Make the gloo group of some ``ranks`` of a process group, in which this one has a ``place``. Collective.

    Raises `RuntimeError` if a rank does not come within ``timeout`` seconds.
    """
    there = dist.get_backend_config(group)
    torch: Any = dist  # its annotations leave out names that it exports
    try:
        store = torch.PrefixStore(f"gloo of {','.join(map(str, ranks))}", group.get_group_store())
        store = torch.PrefixStore(_agreed_name(store, place, len(ranks), timeout), store)
        found = torch.ProcessGroupGloo(store, place, len(ranks), timedelta(seconds=timeout))
    except (RuntimeError, AttributeError) as error:  # the second: torch was built without gloo
        raise RuntimeError(
            f"rank {place}: the process group's backend is {there!r}. The gloo group beside it, for short messages, "
            f"could not be made: some of its {len(ranks)} ranks did not come within {timeout:g} s or cannot be reached "
            f"({' '.join(str(error).split())}). init_process_group('cpu:gloo,{there}') makes both"
        ) from error
    if place == 0:
        LOG.info("the process group's backend is %r: %d ranks have made a gloo group beside it", there, len(ranks))
    return found


def _agreed_name(store: Any, place: int, size: int, timeout: float) -> str:
    """Return rank 0's name for a new group. Rank 0 sends it, to the name of each rank, until the rank has it.

    A store may outlive processes, as torchrun's does, and then has addresses of ranks that are gone. No name is known
    to these.
    """
    mine, left, end = secrets.token_hex(8), list(range(1, size)), time.monotonic() + timeout
    if place:
        store.set(f"{place}", mine)
        store.wait([mine], timedelta(seconds=timeout))
        name: str = store.get(mine).decode()
        store.set(f"{name}/{place}", "")
        return name
    while left := [rank for rank in left if not store.check([f"{mine}/{rank}"])]:
        if time.monotonic() > end:
            raise RuntimeError(f"no answer from {', '.join(f'rank {rank}' for rank in left)}")
        for rank in left:
            if store.check([f"{rank}"]):
                store.set(store.get(f"{rank}").decode(), mine)
        time.sleep(_PAUSE)
    return mine


_PASSED = zlib.crc32(b"pass_to") >> 1  # gloo's tag of tensors that are passed on; those of messages depend on a slot
_PROBE = zlib.crc32(b"is_closed") >> 1  # the tag with which nothing is sent
DEFAULT_TIMEOUT = 1800.0  # seconds; that of torch.distributed's gloo groups


class _TorchPending:
    """A message. ``staged``: a buffer in which it arrives before ``tensor``. ``others``: all messages under way."""

    def __init__(
        self, work: Any, tensor: Tensor, staged: Tensor | None = None, others: set[_TorchPending] | None = None
    ) -> None:
        self._work, self._tensor, self._staged, self._others = work, tensor, staged, others

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:  # gloo: a time limit, a closed connection
            raise PeerError(" ".join(str(error).split())) from error
        if self._others is not None:
            self._others.discard(self)
        if self._staged is not None:  # pragma: no cover - device memory, which most machines of these tests do not have
            self._tensor.copy_(self._staged)  # host synchronisation: from the host's memory to a device
            self._staged = None


class _Collective:
    """A collective of the process group. It holds the tensors that it reads and writes until the wait: otherwise the
    pool would hand out their memory again.

    NCCL begins when the current stream has reached this launch, and runs on a stream of its own. ``wait`` orders the
    current stream behind it. So gradients travel while the backward goes on, the host waits for nothing, and work that
    is enqueued on the same stream after the wait may use the memory. The only time limit is that of the group, at
    which torch ends the process. If a peer died, the next header or a sentinel reports that before.
    """

    def __init__(self, work: Any, under_way: _UnderWay | None, *held: Tensor) -> None:
        """``under_way``: of the streams that the work is on; None if it is on the host."""
        self._work, self._under_way = work, under_way
        self._held: tuple[Tensor, ...] = held
        self._event: torch.Event | None = None  # behind it, on the stream that waits
        self._awaited = False
        if under_way is not None:
            under_way.launched()

    def wait(self, timeout: float) -> None:
        if self._awaited:
            if self._event is not None:  # the current stream may be another one than at the first wait
                torch.accelerator.current_stream(self._event.device).wait_event(self._event)
            return
        try:
            self._work.wait() if self._under_way is not None else self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PeerError(" ".join(str(error).split())) from error
        if self._under_way is not None and self._held:
            self._event = self._under_way.awaited(self._held[0].device)
        self._held, self._work, self._awaited = (), None, True

    def ended(self) -> bool:
        """See `DevicePending`."""
        return self._awaited and (self._event is None or has_ended(self._event))


class _UnderWay:
    """What is known of a backend's collectives on streams, for which the host does not wait."""

    def __init__(self) -> None:
        self._not_awaited = 0  # by a stream
        self._events: deque[torch.Event] = deque()  # behind each that a stream waits for and that may not have ended

    def launched(self) -> None:
        self._not_awaited += 1

    def awaited(self, device: torch.device) -> torch.Event | None:
        """Note that the current stream of a device waits for one. Return the event behind it."""
        self._not_awaited -= 1
        while self._events and self._events[0].query():
            self._events.popleft()
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        self._events.append(event)
        return event

    def __bool__(self) -> bool:
        """Whether any may not have ended."""
        return self._not_awaited > 0 or not all(event.query() for event in list(self._events))


@dataclass(frozen=True)
class GroupsOfMesh:
    """The process groups of a mesh.

    Attributes:
        ranks: its ranks, in ascending order.
        known: that of this rank in some partitions of its ranks.
    """

    ranks: Sequence[int]
    known: Mapping[tuple[tuple[int, ...], ...], dist.ProcessGroup]


class GlooBackend(Backend):
    """The isend and irecv of torch.distributed over a gloo group, and its collectives, in which the tensor's device
    decides what moves it. Messages of device memory are staged through the host.

    If the process group has no gloo, messages go through a gloo group beside it; see `gloo_beside`.
    """

    name = "gloo"
    has_collectives = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        part_of: tuple[GlooBackend, Sequence[Sequence[int]]] | None = None,
        of_mesh: GroupsOfMesh | None = None,
    ) -> None:
        """``part_of``: the backend of which this is a part, and all parts of that. ``of_mesh``: the groups of a mesh
        whose ranks alone use this backend."""
        self.group, self._part_of, self._of_mesh = group, part_of, of_mesh
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout = timeout
        self._is_in_part = of_mesh is not None and len(of_mesh.ranks) < self.world_size
        self._gloo: Any = group
        self._places: Sequence[int] | Mapping[int, int] = range(self.world_size)  # there, of the ranks
        if self.device_backend(torch.device("cpu")) != "gloo":
            ranks = self._places if of_mesh is None else of_mesh.ranks
            self._places = {rank: place for place, rank in enumerate(ranks)}
            self._gloo = _PARTS.beside(group, tuple(ranks), self._places[self.rank], timeout)
        # Messages before their wait, kept as long as the group: once gloo finds the memory of a message gone, it moves
        # nothing more between these two ranks, even if the user of the message has failed and is gone, too.
        self._under_way = set[_TorchPending]()
        self._on_streams = _UnderWay()
        self._parts: list[GlooBackend] = []
        weakref.finalize(self._gloo, self._under_way.clear).atexit = False

    def send(self, tensor: Tensor, to: int, slot: int) -> _TorchPending:
        data = tensor.cpu()  # host synchronisation: device memory goes through the host
        work = _started(self._gloo.send, [data], self._places[to], _tag(slot, data))  # dist.isend takes twice as long
        return self._kept(_TorchPending(work, data, None, self._under_way))

    def recv(self, tensor: Tensor, source: int, slot: int) -> _TorchPending:
        staged = None if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        target = tensor if staged is None else staged
        work = _started(self._gloo.recv, [target], self._places[source], _tag(slot, target))
        return self._kept(_TorchPending(work, tensor, staged, self._under_way))

    def _kept(self, pending: _TorchPending) -> _TorchPending:
        self._under_way.add(pending)
        return pending

    def device_backend(self, device: torch.device) -> str:
        return _device_backend(self.group, device)

    @property
    def has_parts(self) -> bool:
        if self._part_of is not None:
            return self._part_of[0].has_parts
        if self._is_in_part:
            return False
        everyone = range(self.world_size)
        return [dist.get_global_rank(self.group, rank) for rank in everyone] == list(range(dist.get_world_size()))

    def knows_parts(self, parts: Sequence[Sequence[int]]) -> bool:
        return self._of_mesh is not None and tuple(map(tuple, parts)) in self._of_mesh.known

    def part(self, parts: Sequence[Sequence[int]]) -> GlooBackend:
        if self._part_of is not None:  # the ranks of the other parts make theirs at the same time
            backend, siblings = self._part_of
            return backend.part([[sibling[place] for place in part] for sibling in siblings for part in parts])
        key = tuple(map(tuple, parts))
        known = None if self._of_mesh is None else self._of_mesh.known.get(key)
        group = known or _PARTS.of(self.group, key, self.rank, self.timeout)
        mine = GlooBackend(group, self.timeout, (self, parts))
        self._parts.append(mine)
        return mine

    def all_to_all(self, out: Tensor, source: Tensor, splits: tuple[list[int], list[int]] | None) -> _Collective:
        return self._collective(dist.all_to_all_single, out, source, *(splits or ()))

    def all_gather(self, out: Tensor, source: Tensor) -> _Collective:
        return self._collective(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, out, source)

    def reduce_scatter(self, out: Tensor, source: Tensor) -> _Collective:
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._collective(call, out, source)

    def broadcast(self, tensor: Tensor, source: int) -> _Collective:
        return self._held(_started(dist.broadcast, tensor, group=self.group, group_src=source, async_op=True), tensor)

    def pass_to(self, tensor: Tensor, to: int) -> _Collective:
        return self._held(_started(self.group.send, [tensor], to, _PASSED), tensor)

    def take_from(self, tensor: Tensor, source: int) -> _Collective:
        return self._held(_started(self.group.recv, [tensor], source, _PASSED), tensor)

    def board(self) -> Any:
        if self._is_in_part:
            return None  # a sentinel's ranks are all of a process group
        store = self.group.get_group_store()
        return store.clone() if hasattr(store, "clone") else store  # a connection of its own, for another thread

    def is_closed(self, rank: int) -> bool:
        probe = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:  # gloo refuses it at once if it has seen the end of the connection; else nothing ever comes
            work = _started(self._gloo.recv, [probe], self._places[rank], _PROBE)
        except PeerError:
            return True
        self._kept(_TorchPending(work, probe, None, self._under_way))
        return False

    def interrupt(self) -> None:
        """Let a time limit pass for each message: gloo then closes all connections of the group."""
        for pending in list(self._under_way):
            with suppress(PeerError):
                pending.wait(0.001)

    def abort_collectives(self) -> bool:
        aborted = sum(part.abort_collectives() for part in self._parts) > 0
        if self._on_streams:
            for kind, name in _backends(self.group).items():
                if name in NCCL:
                    _of_device(self.group, kind).abort()
            self._on_streams, aborted = _UnderWay(), True
        return aborted

    def _collective(self, call: Any, out: Tensor, source: Tensor, *splits: list[int]) -> _Collective:
        if not self.device_backend(out.device):
            raise PeerError(
                f"its backend {dist.get_backend_config(self.group)!r} moves no {out.device.type} tensors: "
                "init_process_group('cpu:gloo,cuda:nccl') makes one that does, and collective='auto' needs none"
            )
        return self._held(_started(call, out, source, *splits, group=self.group, async_op=True), out, source)

    def _held(self, work: Any, *tensors: Tensor) -> _Collective:
        return _Collective(work, self._on_streams if self.stays_on(tensors[0].device) else None, *tensors)


def _tag(slot: int, data: Tensor) -> int:
    """Return gloo's tag. It differs by size: gloo ends the process if a message is longer than the receive expects."""
    return zlib.crc32(b"%d %d" % (slot, data.numel())) >> 1


def _started(call: Any, *given: Any, **named: Any) -> Any:
    try:
        return call(*given, **named)
    except RuntimeError as error:  # a connection that an earlier time limit closed
        raise PeerError(" ".join(str(error).split())) from error


def connect(process_group: dist.ProcessGroup | None = None) -> Transport:
    """Return the transport of a process group. None is the default group, or a single rank if there is no group.

    Raises `RuntimeError` if the environment says that there are several ranks but no group was initialised: each
    process would silently train a model of its own.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            world = os.environ.get("WORLD_SIZE", "1")
            if world.isdecimal() and int(world) > 1:
                raise RuntimeError(
                    f"WORLD_SIZE is {world}, but no process group is initialised: call "
                    "torch.distributed.init_process_group() before the optimizer is built"
                )
            return solo()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup | int):  # torch gives -100 to processes outside of a group
        raise TypeError(
            "a group of ranks must be a ProcessGroup of torch.distributed, a DeviceMesh or a Transport, not "
            f"{process_group!r:.100}"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("this process is not a rank of the process group that it was given")
    size = dist.get_world_size(process_group)
    if size == 1:
        return solo()
    return Transport(GlooBackend(process_group, timeout_of(process_group)))


def backend_of(process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the name of what moves a device's tensors in a process group; empty if nothing does. None: the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    group = dist.group.WORLD if process_group is None else process_group
    return "" if group is None else _device_backend(group, device)


def _device_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of what moves a device's tensors in a group; empty if nothing does."""
    return _backends(group).get(device.type, "")


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of what moves tensors in a group, by the type of their device."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}


def _of_device(group: dist.ProcessGroup, kind: str) -> Any:
    """Return the part of a group that moves tensors of a type of device."""
    return group._get_backend(torch.device(kind))


def job_size() -> int:
    """Return the number of processes of the default group."""
    return dist.get_world_size()


class _Parts:
    """The process groups of parts of a group, and beside it, which the optimizers of the group share: each costs
    connections. They are freed with the group."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]]
        self._made = weakref.WeakKeyDictionary()

    def beside(self, group: dist.ProcessGroup, ranks: tuple[int, ...], place: int, timeout: float) -> Any:
        """Return the gloo group of some ranks of a group that has none. Collective."""
        known = self._made.setdefault(group, {})
        if ranks not in known:
            known[ranks] = make_gloo(group, ranks, place, timeout)
        return known[ranks]

    def of(
        self, group: dist.ProcessGroup, parts: tuple[tuple[int, ...], ...], rank: int, timeout: float
    ) -> dist.ProcessGroup:
        """Return the process group of the part with ``rank``. Collective."""
        known = self._made.setdefault(group, {})
        if parts not in known:
            for ranks in parts:  # torch wants every process of the job to make every group
                members = [dist.get_global_rank(group, member) for member in ranks]
                limit, backends = timedelta(seconds=timeout), {**_backends(group), "cpu": "gloo"}
                backend = ",".join(f"{kind}:{name}" for kind, name in backends.items())
                made = dist.new_group(members, timeout=limit, backend=backend)
                if rank in ranks:
                    known[parts] = made
        return known[parts]


_PARTS = _Parts()


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the group's own time limit, from the options of its first backend that has one."""
    for kind in sorted(_backends(group), key="cpu".__ne__):
        with suppress(AttributeError, RuntimeError):
            return float(_of_device(group, kind).options._timeout.total_seconds())
    return DEFAULT_TIMEOUT
