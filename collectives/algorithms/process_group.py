"""Algorithms that are made of the backend's own collectives, and how such a collective is begun, awaited and aborted.

Such a collective has no headers. Ranks that entered different ones would mix their bytes, or wait for each other until
the time limit. So on the host each rank first sends a header to all others, with a digest of bounds and dtype, and
begins when it has read the same header from all. That also keeps the order in which the backend wants the collectives.
On devices a ledger takes the place of most of these headers (`base.launched`).

Knows: tags, and collectives of a backend. Does not know: what the backend is.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import Backend, Pending
from ..launches.ledger import agreed_digest
from ..messages import Chain, CollectiveError, Tag, Work, as_bytes
from ..transport import Transport
from .base import Launched, Running, Several, launched, nothing
from .ordered_sum import AddedAside, Aside, ordered_sum

MOST_PADDING = 0.5  # of the elements of an all-gather


@dataclass(frozen=True)
class _Exchange:
    """How this rank gets the contributions to its shard. ``parts``: of `ordered_sum`, to be added up when ``call`` is
    done. ``sent`` and ``received``: bytes of payload."""

    call: Callable[[Backend], Pending]
    parts: Sequence[Tensor]
    sent: int
    received: int


class ProcessGroupAlgorithm(ABC):
    """An algorithm that consists of a backend's own collectives; a single rank needs none.

    If these stay on a device, sums are formed on its stream of ``aside``. If ``aside`` is None, sums are formed in the
    wait.
    """

    name: str
    exact: bool

    def __init__(self, transport: Transport) -> None:
        """``transport``: over a torch.distributed process group of exactly its ranks, else `CollectiveError`."""
        self.transport, backend = transport, transport.backend
        self.aside: Aside | None = Aside()
        self._lengths: dict[Hashable, tuple[int, int]] = {}  # of the longest and the shortest shard
        if transport.world_size == 1:
            return
        if not backend.has_collectives:
            raise CollectiveError(f"collective {self.name!r} needs a torch.distributed process group: use 'auto'")
        if transport.backend_ranks(range(transport.world_size)) != list(range(backend.world_size)):
            raise CollectiveError(
                f"collective {self.name!r} needs a process group of exactly these ranks, in their order"
            )

    def _longest_and_shortest(self, bounds: Sequence[int]) -> tuple[int, int]:
        """Return the elements of the longest shard, and of the shortest. Cuts are looked at once, lists each time."""
        known = self._lengths.get(bounds) if isinstance(bounds, Hashable) else None
        if known is None:
            lengths = [high - low for low, high in itertools.pairwise(bounds)]
            known = max(lengths), min(lengths)
            if isinstance(bounds, Hashable):
                self._lengths[bounds] = known
        return known

    @abstractmethod
    def _exchange(self, source: Tensor, bounds: Sequence[int], numel: int) -> _Exchange:
        """Plan the reduce-scatter of ``source``. ``numel``: elements of this rank's shard."""

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`, and `_exchange` for the scratch memory."""
        t, before = self.transport, [] if start is None else [start]
        if t.world_size == 1:
            return Running(t, tag, None, lambda: ordered_sum([*before, source], out))
        exchange = self._exchange(source, bounds, out.numel())
        parts = [*before, *exchange.parts]
        work = self.begin(tag, bounds, source, exchange.call, lambda: ordered_sum(parts, out))
        t.count_payload(exchange.sent, exchange.received)
        stream = self._stream(source.device)
        if stream is None:
            return work
        return AddedAside(t, work, stream, source.device, (source, exchange, parts, out))

    def add_in_wait(self) -> None:
        """See `AddsAside`."""
        self.aside = None

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream on which sums are formed at the launch; None if they are formed in the wait."""
        if self.aside is None or not self.transport.backend.stays_on(device):
            return None
        return self.aside.of(device)

    def begin(
        self,
        tag: Tag,
        bounds: Sequence[int],
        moved: Tensor,
        call: Callable[[Backend], Pending],
        finish: Callable[[], None],
    ) -> Launched:
        """Begin the collectives that ``call`` launches. ``finish`` runs when they are done. An empty collective has no
        call. ``moved``: has the dtype, and the device, of what travels. Internal."""
        t = self.transport
        digest_of = agreed_digest if t.launches is None else t.launches.ledger.agreed
        agreed = tag.digested(digest_of(tag.digest, bounds, moved.dtype))
        return launched(t, agreed, moved.device, lambda: call(t.backend) if bounds[-1] else None, finish)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Equal shards are received in place. Uneven shards are padded to the
        longest, in scratch memory for all of them, and the padding is counted as payload. If the padding would exceed
        `MOST_PADDING`, as with one owner per parameter, each owner broadcasts its shard instead."""
        return self._all_gather(self._own(buffer, bounds), buffer, bounds, tag)

    def all_gather_from(self, own: Tensor, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.all_gather_from`. Uneven shards, and those of one rank alone, are first copied into
        ``buffer``."""
        width, _ = self._longest_and_shortest(bounds)
        if self.transport.world_size == 1 or width * self.transport.world_size != bounds[-1]:
            self._own(buffer, bounds).copy_(own)
            return self.all_gather(buffer, bounds, tag=tag)
        return self._all_gather(own, buffer, bounds, tag)

    def _own(self, buffer: Tensor, bounds: Sequence[int]) -> Tensor:
        return buffer[bounds[self.transport.rank] : bounds[self.transport.rank + 1]]

    def _all_gather(self, own: Tensor, buffer: Tensor, bounds: Sequence[int], tag: Tag) -> Work:
        t = self.transport
        if t.world_size == 1:
            return Chain(())
        width, _ = self._longest_and_shortest(bounds)
        if width * t.world_size > (1 + MOST_PADDING) * bounds[-1]:
            return self._all_broadcast(buffer, bounds, tag)
        sent, padded, copies = own, buffer, list[tuple[Tensor, Tensor]]()
        if width * t.world_size != bounds[-1]:
            sent = t.scratch(width, buffer.dtype, buffer.device).zero_()
            sent[: own.numel()].copy_(own)
            padded = t.scratch(width * t.world_size, buffer.dtype, buffer.device)
            copies = [
                (buffer[low:high], padded[rank * width : rank * width + high - low])
                for rank, (low, high) in enumerate(itertools.pairwise(bounds))
                if rank != t.rank
            ]

        def finish() -> None:
            for target, arrived in copies:
                target.copy_(arrived)

        work = self.begin(
            tag, bounds, buffer, lambda backend: backend.all_gather(as_bytes(padded), as_bytes(sent)), finish
        )
        moved = (t.world_size - 1) * width * buffer.itemsize
        t.count_payload(moved, moved)
        return work

    def _all_broadcast(self, buffer: Tensor, bounds: Sequence[int], tag: Tag) -> Work:
        """Let each owner broadcast its shard into its place."""
        t = self.transport
        shards = [(rank, buffer[low:high]) for rank, (low, high) in enumerate(itertools.pairwise(bounds)) if high > low]

        def call(backend: Backend) -> Pending:
            return Several([backend.broadcast(as_bytes(each), rank) for rank, each in shards])

        work = self.begin(tag, bounds, buffer, call, nothing)
        own = (bounds[t.rank + 1] - bounds[t.rank]) * buffer.itemsize
        t.count_payload((t.world_size - 1) * own, bounds[-1] * buffer.itemsize - own)
        return work


class AllToAll(ProcessGroupAlgorithm):
    """Direct exchange by the backend's own all-to-all, and the sum in rank order.

        rank 0 | x00 | x01 | x02 |   all-to-all    rank 0 | x00 | x10 | x20 |   sum    start + x00 + x10 + x20
        rank 1 | x10 | x11 | x12 |      --->       rank 1 | x01 | x11 | x21 |   -->    start + x01 + x11 + x21
        rank 2 | x20 | x21 | x22 |                 rank 2 | x02 | x12 | x22 |          start + x02 + x12 + x22

    It is for NCCL, whose own sums have no fixed order; "auto" takes it on GPUs of one host. A rank sends (W - 1)/W of
    its contribution, as in a reduce-scatter, and nothing is added on the way. Among GPUs of one host the bytes are
    those of NCCL's own reduce-scatter. Between hosts the latter sends less, because it adds the contributions of a
    host before it sends them.

    The device of a tensor decides which backend of the process group carries it. With "cpu:gloo,cuda:nccl", NCCL
    carries CUDA tensors, and gloo carries the headers.
    """

    name = "all_to_all"
    exact = True

    def _exchange(self, source: Tensor, bounds: Sequence[int], numel: int) -> _Exchange:
        """Receive W shards, this rank's own among them, into scratch memory."""
        t = self.transport
        longest, shortest = self._longest_and_shortest(bounds)
        own, splits = numel * source.itemsize, None
        if longest != shortest:
            sizes = [(high - low) * source.itemsize for low, high in itertools.pairwise(bounds)]
            splits = [own] * t.world_size, sizes
        arrived = t.scratch(t.world_size * numel, source.dtype, source.device)

        def call(backend: Backend) -> Pending:
            return backend.all_to_all(as_bytes(arrived), as_bytes(source), splits)

        return _Exchange(
            call, [arrived.view(t.world_size, numel)], bounds[-1] * source.itemsize - own, (t.world_size - 1) * own
        )


class Native(ProcessGroupAlgorithm):
    """The reduce-scatter and all-gather of torch.distributed, on shards that are padded to equal length.

    It is the baseline, and over NCCL it sends the fewest bytes between hosts. It is not exact: the backend chooses the
    order of a sum. Payload is counted as a ring would send it, with the padding.
    """

    name = "native"
    exact = False

    def _exchange(self, source: Tensor, bounds: Sequence[int], numel: int) -> _Exchange:
        """Add up in ``source``'s dtype. The sum is in scratch memory, and so are shards that must be padded."""
        t = self.transport
        width, _ = self._longest_and_shortest(bounds)
        padded = source
        if width * t.world_size != bounds[-1]:
            padded = t.scratch(width * t.world_size, source.dtype, source.device).zero_()
            for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
                padded[rank * width : rank * width + high - low].copy_(source[low:high])
        summed = t.scratch(width, source.dtype, source.device)
        moved = (t.world_size - 1) * width * source.itemsize
        return _Exchange(lambda backend: backend.reduce_scatter(summed, padded), [summed[:numel]], moved, moved)
