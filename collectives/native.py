"""The library's one seam to torch.distributed: its point-to-point as a carrier, its collectives as a baseline.

Knows: process groups, and that torch numbers ranks globally; only here do global ranks exist at all, and even here
every call is made with ranks of the group. Does not know: buckets, optimizers.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .loopback import solo
from .messages import Chain, CollectiveError, PeerError, Tag, Work
from .transport import Transport

DEFAULT_TIMEOUT = 1800.0  # seconds; that of torch.distributed's gloo groups


class _GlooPending:
    def __init__(self, work: Any, tensor: Tensor, staged: Tensor | None, others: set[_GlooPending]) -> None:
        self._work, self._tensor, self._staged, self._others = work, tensor, staged, others

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:  # gloo: a time limit, a closed connection
            raise PeerError(" ".join(str(error).split())) from error
        self._others.discard(self)
        if self._staged is not None:  # pragma: no cover - device memory, which these tests cannot have
            self._tensor.copy_(self._staged)
            self._staged = None


class ProcessGroupCarrier:
    """torch.distributed's isend and irecv over a gloo group. Device memory is staged through the host."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout = timeout
        # What nobody has waited for, for as long as the group is there: gloo moves nothing more between two ranks once
        # it finds that a message's memory is gone, also where whoever began it has failed and is forgotten.
        self._under_way = set[_GlooPending]()
        weakref.finalize(group, self._under_way.clear).atexit = False

    def send(self, tensor: Tensor, to: int, slot: int) -> _GlooPending:
        data = tensor.cpu()
        work = _started(dist.isend, data, group=self.group, group_dst=to, tag=_tag(slot, data))
        return self._started(_GlooPending(work, data, None, self._under_way))

    def recv(self, tensor: Tensor, source: int, slot: int) -> _GlooPending:
        staged = None if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        target = tensor if staged is None else staged
        work = _started(dist.irecv, target, group=self.group, group_src=source, tag=_tag(slot, target))
        return self._started(_GlooPending(work, tensor, staged, self._under_way))

    def _started(self, pending: _GlooPending) -> _GlooPending:
        self._under_way.add(pending)
        return pending


def _tag(slot: int, data: Tensor) -> int:
    """gloo ends the process where more bytes come than are expected: so it is not to find them together at all."""
    return zlib.crc32(b"%d %d" % (slot, data.numel())) >> 1


def _started(call: Any, tensor: Tensor, **arguments: Any) -> Any:
    try:
        return call(tensor, **arguments)
    except RuntimeError as error:  # a pair that an earlier time limit closed
        raise PeerError(" ".join(str(error).split())) from error


def connect(process_group: dist.ProcessGroup | None = None) -> Transport:
    """The transport of a process group; the default group where None; a single rank where there is none at all.

    Raises `RuntimeError` where the environment says that there are several ranks but no group was initialised: each
    process would train a model of its own in silence.
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
    if process_group is None or dist.get_rank(process_group) < 0:
        raise ValueError("this process is not a rank of the process group that it was given")
    size = dist.get_world_size(process_group)
    if size == 1:
        return solo()
    backend = str(dist.get_backend(process_group))
    if "gloo" not in backend:
        raise NotImplementedError(
            f"the process group's backend is {backend!r}: more than one rank needs gloo, alone or beside another "
            "backend, as in init_process_group('cpu:gloo,cuda:nccl')"
        )
    return Transport(ProcessGroupCarrier(process_group, _timeout(process_group)))


def _timeout(group: dist.ProcessGroup) -> float:
    """The group's own time limit, which torch shows on the options of its backend."""
    try:
        limit = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT
    return float(limit.total_seconds())


class _NativeWork:
    """A collective of torch.distributed, and what is left to copy when it is done."""

    def __init__(self, work: Any, copies: Sequence[tuple[Tensor, Tensor]], add: Tensor | None, limit: float) -> None:
        self._work, self._copies, self._add, self._limit = work, copies, add, limit

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=self._limit))
        except RuntimeError as error:
            raise PeerError(" ".join(str(error).split())) from error
        self._work = None
        for target, source in self._copies:
            if self._add is None:
                target.copy_(source)
            else:
                torch.add(self._add, source, out=target)


class Native:
    """torch.distributed's own reduce-scatter and all-gather, padded to equal slices: the baseline.

    The order of its sums is the backend's own. Payload is counted as a ring would send it, padding included.
    """

    name = "native"
    exact = False

    def __init__(self, transport: Transport) -> None:
        carrier = transport.carrier
        if not isinstance(carrier, ProcessGroupCarrier):
            if transport.world_size > 1:
                raise CollectiveError("collective 'native' needs a torch.distributed process group")
        elif transport.world_size != carrier.world_size:
            raise CollectiveError("collective 'native' needs a process group of exactly these ranks")
        self.transport, self._carrier = transport, carrier
        self._announced = 0  # the last round that the other ranks were told of

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`; sums in ``source``'s dtype, in the backend's order."""
        t = self.transport
        if t.world_size == 1:
            return _NativeWork(_Done(), [(out, source)], start, t.timeout)
        works: list[Work] = []
        if tag.round != self._announced:  # torch's own collectives have no headers
            self._announced = tag.round
            works.append(t.announce(tag))
        width = max(high - low for low, high in itertools.pairwise(bounds))
        padded = t.scratch(width * t.world_size, source.dtype, source.device).zero_()
        for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
            padded[rank * width : rank * width + high - low].copy_(source[low:high])
        received = t.scratch(width, source.dtype, source.device)
        call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(received, padded, group=self._group(), async_op=True)
        t.count_payload((t.world_size - 1) * width * source.itemsize, (t.world_size - 1) * width * source.itemsize)
        return Chain([*works, _NativeWork(work, [(out, received[: out.numel()])], start, t.timeout)])

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        t = self.transport
        if t.world_size == 1:
            return Chain(())
        width = max(high - low for low, high in itertools.pairwise(bounds))
        own = buffer[bounds[t.rank] : bounds[t.rank + 1]]
        sent = t.scratch(width, buffer.dtype, buffer.device).zero_()
        sent[: own.numel()].copy_(own)
        padded = t.scratch(width * t.world_size, buffer.dtype, buffer.device)
        call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = call(padded, sent, group=self._group(), async_op=True)
        t.count_payload((t.world_size - 1) * width * buffer.itemsize, (t.world_size - 1) * width * buffer.itemsize)
        copies = [
            (buffer[low:high], padded[rank * width : rank * width + high - low])
            for rank, (low, high) in enumerate(itertools.pairwise(bounds))
            if rank != t.rank
        ]
        return _NativeWork(work, copies, None, t.timeout)

    def _group(self) -> dist.ProcessGroup:
        assert isinstance(self._carrier, ProcessGroupCarrier)
        return self._carrier.group


class _Done:
    def wait(self, timeout: timedelta) -> None:
        return
