"""A backend whose peers answer at once: one process plays one rank of several, and no message leaves it.

What is sent to a peer as a header or in an exchange comes back as that peer's own. That is what it would send, since
all ranks do the same. Collectives are those of torch's "fake" process group, which FSDP2 has beside it: they return at
once. An all-gather copies the rank's own part for each rank. An all-to-all does so in some versions of torch, and here
in all. So the time of a step is this rank's own work, the packing and reading of messages included.

The model beside it has the tensors of Llama: nine a block, and an embedding, a norm and a head around them. It has no
rotary positions, which have no parameters.

Knows: which ports this library's messages travel by, and where it asks for a device. Does not know: steps, clocks.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from collectives import Tag, Transport, pool
from collectives.algorithms import ordered_sum
from collectives.backend import Pending, PendingBytes
from collectives.backends.gloo import GlooBackend, _UnderWay
from collectives.links.control_plane import pack_messages
from collectives.links.messenger import CONTROL_PORT, HEADER_PORT, MARKER, MARKER_PORT, PAYLOAD_PORT, PORTS
from collectives.messages import with_offset
from zero.core import bits, layout, norm
from zero.gradients import backward_schedule, grad_publisher, reducer
from zero.parameters import edit_detector
from zero.runtime import accumulator, flat_states
from zero.step import user_optimizer

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


class _Streams(_UnderWay):
    """Streams of devices; on the CPU a collective has ended when it is awaited."""

    def awaited(self, device: torch.device) -> torch.Event | None:
        if device.type != "cpu":
            return super().awaited(device)
        self._not_awaited -= 1
        return None


class AnsweredBackend(GlooBackend):
    """The last rank of a "fake" process group, whose peers answer at once. See the module.

    It is the last one since that owns a part of every bucket, however small.
    """

    name = "answered"

    def __init__(self, group: Any) -> None:
        super().__init__(group, TIMEOUT)
        self._on_streams = _Streams()
        self._sent: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._last_header = b""
        self._answer_size: dict[tuple[int, int], int] = {}  # by the rank and the slot of its header
        self._done = _Done()
        self._fills = self._all_to_all_fills()

    def all_to_all(self, out: Tensor, source: Tensor, splits: tuple[list[int], list[int]] | None) -> Any:
        pending = super().all_to_all(out, source, splits)
        own = out.numel() // self.world_size
        if own and not self._fills:
            torch.cat([source[source.numel() - own :]] * self.world_size, out=out)  # one launch, as fast as memory
        return pending

    def _all_to_all_fills(self) -> bool:
        """Return whether an all-to-all of torch's group writes its output. Otherwise sums would be of any numbers."""
        out = torch.zeros(self.world_size)
        super().all_to_all(out, torch.ones(self.world_size), None).wait(self.timeout)
        return bool(out.all())

    def device_backend(self, device: torch.device) -> str:
        """Return what a group of ranks with GPUs has: its collectives are awaited in streams."""
        return "gloo" if device.type == "cpu" else "nccl"

    def stays_on(self, device: torch.device) -> bool:
        return True

    def board(self) -> Any:
        """Return a store in which nothing is read: no rank is ever late."""
        return dist.HashStore()  # type: ignore[attr-defined]

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
        if port == CONTROL_PORT and (answer := self._from_all(data)) is not data:  # of a tree: it precedes its header
            self._answer_size[to, slot - CONTROL_PORT + HEADER_PORT] = len(answer)
            data = answer
        if port == HEADER_PORT:
            self._last_header = data
            size = self._answer_size.pop((to, slot), None)
            if size is not None:
                data = with_offset(Tag.unpack(data)[0].pack(size))
        if port in (HEADER_PORT, CONTROL_PORT):
            self._sent[to, slot].append(data)
        return self._done

    def _from_all(self, data: bytes) -> bytes:
        """Return the answer to a control message. Among many ranks these go by a tree: the rank above returns the
        messages of all, packed, when it has been sent this rank's own."""
        if len(data) < 12 or data[:12] != struct.pack("<3I", 1, len(data) - 12, 0):
            return data
        return pack_messages([data[12:]] * self.world_size)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        """Receive an answer, or the byte behind a part of a large message."""
        return _Answer(deque([MARKER]) if slot % PORTS == MARKER_PORT else self._sent[source, slot])


def answered() -> Transport:
    """Return the transport of the default group, which `join_fake_group` has made."""
    return Transport(AnsweredBackend(dist.group.WORLD))


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Llama:
    """The shape of a model. ``hidden``: the width between the matrices of the feed-forward part."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int


SEVEN_BILLION = Llama(32, 4096, 11008, 32, 32000)
NARROW = Llama(32, 128, 352, 4, 512)  # about 1/32 of that in each direction: the calls take most of the time
TINY = Llama(2, 128, 352, 4, 512)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.before_attention, self.before_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        y = self.before_feed_forward(x)
        down: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + down

    def _attention(self, y: Tensor) -> Tensor:
        query, key, value = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.query(y), self.key(y), self.value(y))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    """The whole model. It takes tokens and returns the loss of each next one."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def build(shape: Llama, device: torch.device) -> Model:
    """Build a model with the same weights at each call."""
    torch.manual_seed(0)
    with device:
        return Model(shape)


def tokens(shape: Llama, count: int, device: torch.device) -> Tensor:
    """Return one sequence of ``count`` tokens, and the one that follows the last."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (1, count + 1), generator=generator).to(device)


# -- a device ---------------------------------------------------------------------------------------------------------

NARROWER = (NARROW.width / SEVEN_BILLION.width) ** 2


def _no(device: torch.device) -> bool:
    return False


def _yes(device: torch.device) -> bool:
    return True


def _cuda(device: str) -> str:
    return "cuda"


@contextmanager
def device_paths() -> Iterator[None]:
    """Let the library take its paths for devices, on the CPU and for the narrow model.

    Its places that ask whether a device is the CPU are `host_readable`, `device_type`, `worth_keeping`, `is_launched`
    and the sizes of blocks of elements, which are smaller here in proportion, so that a step launches what it would at
    full width. The answers are plain functions: a mock would take longer than the call. What else a device decides
    (pinned memory, streams) stays as it is.
    """
    with ExitStack() as patches:
        for module in (bits, reducer, edit_detector, grad_publisher, flat_states, norm):
            patches.enter_context(mock.patch.object(module, "host_readable", _no))
        for keeper in (pool, accumulator):
            patches.enter_context(mock.patch.object(keeper, "worth_keeping", _no))
        for module in (user_optimizer, backward_schedule):
            patches.enter_context(mock.patch.object(module, "is_launched", _yes))
        patches.enter_context(mock.patch.object(layout, "device_type", _cuda))
        for owner, name, wide in (
            (ordered_sum, "BLOCK", ordered_sum.DEVICE_BLOCK),
            (norm, "TILES", norm.DEVICE_TILES),
        ):
            patches.enter_context(mock.patch.object(owner, name, int(wide * NARROWER)))
        yield
