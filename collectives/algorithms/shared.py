"""Ranks of one host, through memory that all of them map.

    rank 0 | x00 | x01 |  owner 0 reads x10 in rank 1's memory, adds up in rank order, and releases it
    rank 1 | x10 | x11 |  owner 1 reads x01 in rank 0's memory, ...

A contribution lies in shared memory from the start (`Transport.scratch`, `Transport.empty`), so no copy is needed. If
one lies elsewhere, it is copied there first. The bytes read are those of a direct exchange, and so is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..links.exposed_buffers import ExposedBuffer, PeerBuffers
from ..messages import CollectiveError, Tag, Work
from ..transport import Transport, as_a_whole
from .ordered_sum import ordered_sum


class _Reading:
    """Reads memory of the peers when all of it is exposed, and releases it. Then it waits until the peers release this
    rank's own."""

    def __init__(
        self, transport: Transport, mapped: PeerBuffers, exposed: ExposedBuffer, read: Callable[[], None]
    ) -> None:
        self._transport, self._mapped, self._exposed = transport, mapped, exposed
        self._read: Callable[[], None] | None = read

    def wait(self) -> None:
        if self._read is not None:
            self._mapped.wait()
            read, self._read = self._read, None
            with as_a_whole(self._transport, "while reading"):
                read()
            self._mapped.release()
        self._exposed.wait()


class Shared:
    """Reduce-scatter and all-gather through shared memory, for ranks on one host.

    "auto" takes it on CPUs if all ranks are on one host. `collectives.build` with "shared" connects the ranks.
    """

    name = "shared"
    exact = True

    def __init__(self, transport: Transport) -> None:
        """``transport``: over a backend whose ranks map each other's memory, else `CollectiveError`."""
        if transport.memory is None:
            raise CollectiveError(f"collective 'shared': ranks over {transport.name} share no memory; use 'pairwise'")
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Peers read ``source`` in place. If it does not lie in
        memory that they can read, a scratch copy is made."""
        t = self.transport
        low, high = bounds[t.rank], bounds[t.rank + 1]
        mapped = t.map_buffers([(rank, high - low) for rank in t.peers()], source.dtype, tag)
        exposed = t.expose(source, [(to, bounds[to], bounds[to + 1]) for to in t.peers()], tag)

        def read() -> None:
            parts = [] if start is None else [start]
            for rank in range(t.world_size):
                part = source[low:high] if rank == t.rank else mapped.tensor(rank)
                parts.append(
                    part.to(out.device)
                )  # host synchronisation: the sum of a device, through the host's memory
            ordered_sum(parts, out)

        return _Reading(t, mapped, exposed, read)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`. Each peer's shard is copied once."""
        t = self.transport
        low, high = bounds[t.rank], bounds[t.rank + 1]
        mapped = t.map_buffers([(r, bounds[r + 1] - bounds[r]) for r in t.peers()], buffer.dtype, tag)
        exposed = t.expose(buffer, [(to, low, high) for to in t.peers()], tag)

        def read() -> None:
            for rank in t.peers():
                # host synchronisation: peers may write there again only after a device has read it
                buffer[bounds[rank] : bounds[rank + 1]].copy_(mapped.tensor(rank))

        return _Reading(t, mapped, exposed, read)
