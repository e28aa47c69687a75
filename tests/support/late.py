"""Ranks as threads whose transfers finish at the wait, and which detect every earlier access to their memory.

    launch    the bytes of the input are copied; every byte of the output becomes 255, which is NaN in any float dtype
    wait      the input must have the same bytes, the output must still be 255: then the received data is written to it

A rank may send what lies in the output of a receive by messages: the peer answers only after it has that.

If an output is read too early, its NaN reaches the result. If an input or an output is written too early, the wait
raises an `AssertionError` with the rank, the operation and the tag. NCCL may read and write at any moment between the
two. On one stream there are no other races.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from collectives import Collective, Loopback, Tag, Transport
from collectives.backend import Backend, Pending
from collectives.backends.gloo import _Collective, _UnderWay
from collectives.backends.threads import ThreadBackend, _World
from collectives.messages import describe
from collectives.topology import _fold_by_nccl

from .carried import CPU, equal_hosts, plain_sum

T = TypeVar("T")
POISON = 255
OF_TWO = ("pass to", "take from")  # begin the names of what two ranks do
SLOT, PASSED = -1, -2  # of collectives, and of tensors that are passed on; transports use slots from 0 on
NOTHING = torch.empty(0, dtype=torch.uint8)
MAKING = threading.Lock()  # of parts
Parts = Mapping[int, Tensor]  # by rank
Sizes = Mapping[int, int]
Combined = Callable[[Sequence[Tensor]], Tensor]


class Exchanging(Backend):
    """A backend whose collectives are exchanges of parts of tensors."""

    has_collectives = True

    def exchange(
        self, name: str, out: Tensor, source: Tensor, parts: Parts, sizes: Sizes, combined: Combined = torch.cat
    ) -> Pending:
        """Send ``parts`` of ``source``, and receive ``sizes`` elements from each rank, of which ``out`` is made."""
        raise NotImplementedError

    def all_to_all(self, out: Tensor, source: Tensor, splits: tuple[list[int], list[int]] | None) -> Pending:
        arriving, leaving = splits or ([source.numel() // self.world_size] * self.world_size,) * 2
        parts = dict(enumerate(torch.split(source, leaving)))
        return self.exchange("all_to_all", out, source, parts, dict(enumerate(arriving)))

    def all_gather(self, out: Tensor, source: Tensor) -> Pending:
        ranks = range(self.world_size)
        sizes = dict.fromkeys(ranks, source.numel())
        return self.exchange("all_gather", out, source, dict.fromkeys(ranks, source), sizes)

    def reduce_scatter(self, out: Tensor, source: Tensor) -> Pending:
        parts = dict(enumerate(source.chunk(self.world_size)))
        sizes = dict.fromkeys(parts, out.numel())
        return self.exchange("reduce_scatter", out, source, parts, sizes, partial(plain_sum, None, dtype=out.dtype))

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        if self.rank != source:
            return self.exchange("broadcast", tensor, NOTHING, {}, {source: tensor.numel()})
        peers = {rank: tensor for rank in range(self.world_size) if rank != source}
        return self.exchange("broadcast", NOTHING, tensor, peers, {})

    def pass_to(self, tensor: Tensor, to: int) -> Pending:
        return self.exchange(f"pass to rank {to}", NOTHING, tensor, {to: tensor}, {})

    def take_from(self, tensor: Tensor, source: int) -> Pending:
        return self.exchange(f"take from rank {source}", tensor, NOTHING, {}, {source: tensor.numel()})


class LateTransfer:
    """A transfer from its launch to its wait.

    It keeps only ``held`` alive. The caller must keep all other memory: memory that is reused before the wait counts as
    written.
    """

    def __init__(
        self,
        backend: LateBackend,
        name: str,
        source: Tensor,
        out: Tensor,
        sides: Sequence[Pending],
        arrived: Callable[[], Tensor],
        held: Tensor | None = None,
    ) -> None:
        """``sides``: the messages of the transfer, behind which ``arrived`` returns the bytes for ``out``."""
        self.what = f"rank {backend.rank}: {name} in {_tag_of_the_caller()}"
        self._backend, self._sides, self._arrived, self._held = backend, sides, arrived, held
        self._source, self._out = backend.bytes_of(source), backend.bytes_of(out)
        self._copy, self._poisoned = self._source.clone(), _apart(self._out, self._source)
        self._overwritten = [part.clone() for part in self._poisoned]
        for part in self._poisoned:
            part.fill_(POISON)
        self._done = False

    def answers(self, sent: Tensor) -> None:
        """Restore the output if it has the memory of a message that is sent now."""
        if not self._done and self._out.numel() and 0 <= sent.data_ptr() - self._out.data_ptr() < self._out.numel():
            for part, before in zip(self._poisoned, self._overwritten, strict=True):
                part.copy_(before)
            self._poisoned = self._overwritten = []

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        self.check()
        for side in self._sides:
            side.wait(self._backend.timeout if timeout is None else timeout)
        self._out.copy_(self._arrived().view(torch.uint8))
        self._done, self._held = True, None
        self._backend.launched.discard(self)

    def check(self) -> None:
        """Raise `AssertionError` if the memory has been written since the launch."""
        if not torch.equal(self._source, self._copy):
            raise AssertionError(f"{self.what}: its input was written before the wait")
        if any(bool((part != POISON).any()) for part in self._poisoned):
            raise AssertionError(f"{self.what}: its output was written before the wait")


class _NoStreams(_UnderWay):
    """Stands for the streams of a device: a wait has no time limit, and nothing is recorded."""

    def awaited(self, device: torch.device) -> None:
        return


class LateBackend(Exchanging, ThreadBackend):
    """Messages between threads, and the collectives that `GlooBackend` has."""

    name = "late"
    has_parts = True

    def __init__(self, world: _World, rank: int, world_size: int, timeout: float) -> None:
        ThreadBackend.__init__(self, world, rank, world_size, timeout)
        self.launched = set[LateTransfer]()  # collectives before their wait
        self.most_launched = 0
        self._receives = WeakSet[LateTransfer]()  # by messages

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's memory as bytes, without keeping it alive."""
        return self.map_peer(self.rank, tensor.data_ptr(), tensor.nbytes, torch.uint8) if tensor.nbytes else NOTHING

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        for receive in self._receives:
            receive.answers(tensor)
        side = super().send(tensor.clone(), to, slot)
        return LateTransfer(self, f"send to rank {to}", tensor, NOTHING, [side], lambda: NOTHING, tensor)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        there = torch.empty_like(tensor)
        side = super().recv(there, source, slot)
        made = LateTransfer(self, f"receive from rank {source}", NOTHING, tensor, [side], lambda: there, tensor)
        self._receives.add(made)
        return made

    def device_backend(self, device: torch.device) -> str:
        return self.name

    def part(self, parts: Sequence[Sequence[int]]) -> LateBackend:
        mine = tuple(next(ranks for ranks in parts if self.rank in ranks))
        with MAKING:
            world = vars(self._world).setdefault("parts", {}).setdefault(mine, _World(None))
        made = type(self)(world, mine.index(self.rank), len(mine), self.timeout)
        made.launched = self.launched
        return made

    def exchange(
        self, name: str, out: Tensor, source: Tensor, parts: Parts, sizes: Sizes, combined: Combined = torch.cat
    ) -> Pending:
        slot, own = PASSED if name.startswith(OF_TWO) else SLOT, self.rank
        there = {rank: parts[own].clone() if rank == own else out.new_empty(size) for rank, size in sizes.items()}
        sides = [ThreadBackend.send(self, part.clone(), to, slot) for to, part in parts.items() if to != own]
        sides += [ThreadBackend.recv(self, part, rank, slot) for rank, part in there.items() if rank != own]
        arrived = [*there.values()]
        transfer = LateTransfer(self, name, source, out, sides, lambda: combined(arrived) if arrived else NOTHING)
        self.launched.add(transfer)
        self.most_launched = max(self.most_launched, len(self.launched))
        return _Collective(transfer, _NoStreams(), out, source)


class Threads(Loopback[T]):
    """A group of threads, with backends that ``make`` returns for a world and a rank."""

    def __init__(self, world_size: int, make: Callable[[Any, int], Backend], world: _World | None = None) -> None:
        super().__init__(world_size)
        self._world = world or _World(None)  # the transports of `Loopback` already listen in the world that it made
        self.backends: list[Any] = [make(self._world, rank) for rank in range(world_size)]
        self.transports = [Transport(backend) for backend in self.backends]


class LateLoopback(Threads[T]):
    def __init__(self, world_size: int, *, timeout: float = 30.0) -> None:
        super().__init__(world_size, lambda world, rank: LateBackend(world, rank, world_size, timeout))


def folded_by_groups(transport: Transport, hosts: int = 2) -> Collective:
    return _fold_by_nccl(transport, equal_hosts(transport, hosts), CPU)


def on_late_threads(world_size: int, program: Callable[[Transport], T]) -> list[T]:
    """Run ``program`` as `collectives.on_threads` does, with `LateBackend`. A collective without a wait is an error."""
    group = LateLoopback[T](world_size)
    results = group.run(program)
    forgotten = [transfer.what for backend in group.backends for transfer in backend.launched]
    assert not forgotten, f"{forgotten[0]}: it was never waited for"
    return results


def _apart(out: Tensor, source: Tensor) -> list[Tensor]:
    """Return the bytes of ``out`` without those of ``source``, which may lie inside it."""
    begin = source.data_ptr() - out.data_ptr()
    if source.numel() and 0 <= begin < out.numel():
        return [out[:begin], out[begin + source.numel() :]]
    return [out]


def _tag_of_the_caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        tag = frame.f_locals.get("tag")
        if isinstance(tag, Tag):
            return describe(tag)
    return "no tag"
