"""A backend whose peers answer at once: one process plays one rank of several, and no message leaves it.

What is sent to a peer as a header or in an exchange comes back as that peer's own. That is what it would send, since
all ranks do the same. Collectives are those of torch's "fake" process group, which FSDP2 has beside it: they return at
once. An all-gather copies the rank's own part for each rank. An all-to-all does so in some versions of torch, and here
in all. So the time of a step is this rank's own work, the packing and reading of messages included.

Knows: which ports this library's messages travel by. Does not know: steps, clocks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from collectives import Tag, Transport
from collectives.backend import Pending, PendingBytes
from collectives.backends.gloo import GlooBackend
from collectives.messages import with_offset
from collectives.messenger import MARKER
from collectives.peer_links import CONTROL_PORT, HEADER_PORT, MARKER_PORT, PAYLOAD_PORT, PORTS

MOST_RANKS = 8  # among more, exchanges go by a tree, whose ranks do not all send the same
TIMEOUT = 60.0
OFFSET_BYTES = len(with_offset(b""))


def join_fake_group(world_size: int) -> None:
    """Make the default process group: this process is its last rank, and the other ranks do not exist."""
    dist.init_process_group("fake", rank=world_size - 1, world_size=world_size, store=FakeStore())


class _Done:
    def wait(self, timeout: float) -> None:
        """Return: there is nothing to wait for."""


class _Answer:
    """The next bytes that a peer sends on a port, which are those that this rank has sent to it."""

    def __init__(self, sent: deque[bytes]) -> None:
        self._sent = sent

    def wait(self, timeout: float) -> bytes:
        return self._sent.popleft()


class _Marker:
    """The byte behind a part of a large message."""

    def wait(self, timeout: float) -> bytes:
        return MARKER


class AnsweredBackend(GlooBackend):
    """The last rank of a "fake" process group, whose peers answer at once. See the module.

    It is the last one since that owns a part of every bucket, however small.
    """

    name = "answered"

    def __init__(self, group: Any) -> None:
        if dist.get_world_size(group) > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS} ranks send the same to each other")
        super().__init__(group, TIMEOUT)
        self._sent: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._last_header = b""
        self._done, self._marker = _Done(), _Marker()
        self._fills = self._all_to_all_fills()

    def all_to_all(self, out: Tensor, source: Tensor, out_splits: list[int], splits: list[int]) -> Any:
        pending = super().all_to_all(out, source, out_splits, splits)
        own = splits[self.rank]
        if own and not self._fills:
            out.view(self.world_size, own).copy_(source[source.numel() - own :])
        return pending

    def _all_to_all_fills(self) -> bool:
        """Return whether an all-to-all of torch's group writes its output. Otherwise sums would be of any numbers."""
        out, ones = torch.zeros(self.world_size), [1] * self.world_size
        super().all_to_all(out, torch.ones(self.world_size), ones, ones).wait(self.timeout)
        return bool(out.all())

    def device_backend(self, device: torch.device) -> str:
        """Return what a group of ranks with GPUs has: its collectives are awaited in streams."""
        return "gloo" if device.type == "cpu" else "nccl"

    def send(self, tensor: Tensor, to: int, slot: int) -> Any:
        raise NotImplementedError("the last rank sends no values in a broadcast, nor in an all-to-all")

    def recv(self, tensor: Tensor, source: int, slot: int) -> Any:
        """Receive rank 0's values at construction, which are this rank's own: the header comes, and nothing else."""
        tag, _ = Tag.unpack(self._last_header[:-OFFSET_BYTES])
        header_slot = slot - PAYLOAD_PORT + HEADER_PORT
        self._sent[source, header_slot].append(with_offset(tag.pack(tensor.numel())))
        return self._done

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        port = slot % PORTS
        if port == HEADER_PORT:
            self._last_header = data
        if port in (HEADER_PORT, CONTROL_PORT):
            self._sent[to, slot].append(data)
        return self._done

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        return self._marker if slot % PORTS == MARKER_PORT else _Answer(self._sent[source, slot])


def answered() -> Transport:
    """Return the transport of the default group, which `join_fake_group` has made."""
    return Transport(AnsweredBackend(dist.group.WORLD))
