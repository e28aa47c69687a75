"""A broadcast from rank 0 along a ring, in chunks.

    rank 0   send 0  send 1  send 2
    rank 1           send 0  send 1  send 2          a rank sends a chunk on while it receives the next
    rank 2                                           the last rank sends nothing

Every rank but the last sends each byte once. Sent directly, each byte would leave rank 0 once for every other rank.

On a device whose tensors the backend moves by itself (NCCL), its own broadcast does this, without the host.

A rank hears from its two neighbours alone. So all ranks announce themselves to each other first: a rank that is
elsewhere, or that failed before, is named by all.

Knows: the order of chunks. Does not know: what the tensors are, how a message travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .algorithms.base import begun, noted, nothing
from .backend import Pending
from .messages import Chain, Tag, Work, as_bytes
from .transport import Transport

CHUNK = 1 << 21  # bytes: a message costs little next to them, and the last rank is W - 2 chunks behind the second
AHEAD = 2  # chunks under way to a rank: the second follows the first without a pause


def ring_broadcast(transport: Transport, buffers: Iterable[Tensor], tag: Tag) -> None:
    """Copy rank 0's values to all ranks, in place. Collective. Returns when this rank has received and sent everything.

    Args:
        transport: the group. Raises `CollectiveError` on every rank if one fails, is late or has another tag.
        buffers: 1-D contiguous tensors of any dtype; on every rank equally many, of the same sizes in bytes. Each
            buffer is complete when the next one is requested of an iterator.
        tag: must differ between ranks whose sizes differ, or whose buffers differ in `Backend.stays_on`.
    """
    transport.announce(tag).wait()
    sends = deque[Work]()
    backend = transport.backend
    everyone = transport.backend_ranks(range(transport.world_size)) == list(range(backend.world_size))
    for buffer in buffers:
        if buffer.numel() and everyone and backend.has_collectives and backend.stays_on(buffer.device):
            call: Callable[[], Pending | None] = partial(backend.broadcast, as_bytes(buffer), 0)
            if transport.launches is not None:
                call = partial(noted, transport.launches, tag._replace(index=buffer.numel()), call)
            begun(transport, tag, call, nothing).wait()
            last, first = transport.rank + 1 == transport.world_size, transport.rank == 0
            transport.count_payload(buffer.nbytes * (not last), buffer.nbytes * (not first))
            continue
        for chunk in _arriving(transport, torch.split(as_bytes(buffer), CHUNK), tag):
            if transport.rank + 1 < transport.world_size:
                sends.append(transport.isend(chunk, transport.rank + 1, tag, in_one_part=True, one_way=True))
            if len(sends) > AHEAD:
                sends.popleft().wait()
    Chain(sends).wait()


def _arriving(transport: Transport, chunks: Sequence[Tensor], tag: Tag) -> Iterator[Tensor]:
    """Yield each chunk when it holds rank 0's values, while later ones arrive."""
    if transport.rank == 0:
        yield from chunks
        return
    recvs = deque[tuple[Tensor, Work]]()
    for chunk in chunks:
        recvs.append((chunk, transport.irecv(chunk, transport.rank - 1, tag, in_one_part=True, one_way=True)))
        if len(recvs) == AHEAD:
            yield _arrived(recvs)
    while recvs:
        yield _arrived(recvs)


def _arrived(recvs: deque[tuple[Tensor, Work]]) -> Tensor:
    chunk, work = recvs.popleft()
    work.wait()
    return chunk
