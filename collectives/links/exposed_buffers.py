"""Bytes that are read in place: one rank exposes memory, and other ranks of its host map and read it.

    owner      header with an offset  ->                            wait: until all readers have released it
    reader                               wait   read there   release  ->

Knows: offsets, and which ranks may still read. Does not know: what is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..messages import Tag
from .messenger import RELEASE_PORT, Expected, Messenger

_RELEASED = struct.Struct("<q")


class ExposedBuffer:
    """Spans of a tensor, each exposed to one rank. The tensor must not be written before `wait` returns."""

    def __init__(
        self, messenger: Messenger, tensor: Tensor, offset: int, spans: Sequence[tuple[int, int, int]], tag: Tag
    ):
        """``spans``: rank, and the elements' begin and end, which may be empty; ``offset``: of the tensor's first
        byte."""
        self._messenger, self._tag = messenger, tag
        self._left: list[tuple[int, int]] = []  # rank and number of what is not released yet, the first one last
        to, itemsize, sent = -1, tensor.itemsize, 0
        try:
            for to, begin, end in spans:
                size = (end - begin) * itemsize
                messenger.send_header(messenger.packed(tag, size), to, offset + begin * itemsize)
                if size:
                    state = messenger.states[to]
                    state.times_exposed = number = state.times_exposed + 1
                    state.exposed[number] = tensor
                    self._left.append((to, number))
                    sent += size
            messenger.counted.payload_sent += sent
        except BaseException as error:
            raise messenger.cut_off(error, to, tag) from error
        self._left.reverse()

    def wait(self) -> None:
        messenger = self._messenger
        while self._left:
            to, number = self._left[-1]
            state = messenger.states[to]
            while number in state.exposed:
                if state.pending_release is None:
                    state.pending_release = messenger.recv_bytes(_RELEASED.size, to, RELEASE_PORT, self._tag)
                (back,) = _RELEASED.unpack(messenger.wait_bytes(state.pending_release, to, self._tag))
                state.pending_release = None
                del state.exposed[back]
            self._left.pop()


class PeerBuffers:
    """Memory that other ranks expose to this one, to be read in place between `wait` and `release`."""

    def __init__(self, messenger: Messenger, spans: Sequence[tuple[int, int]], dtype: torch.dtype, tag: Tag) -> None:
        """``spans``: rank, and how many elements it exposes."""
        self._messenger, self._dtype, self._tag = messenger, dtype, tag
        self._expected: dict[int, Expected] = {}
        self._numbers: list[tuple[int, int]] = []  # rank, and the number of what it exposes
        source, itemsize, received = -1, dtype.itemsize, 0
        try:
            for source, numel in spans:
                size = numel * itemsize
                self._expected[source] = messenger.expect(tag, size, source)
                if size:
                    state = messenger.states[source]
                    state.times_mapped = number = state.times_mapped + 1
                    self._numbers.append((source, number))
                    received += size
            messenger.counted.payload_received += received
        except BaseException as error:
            raise messenger.cut_off(error, source, tag) from error

    def wait(self) -> None:
        for expected in self._expected.values():
            self._messenger.confirm(expected)

    def tensor(self, source: int) -> Tensor:
        """Return the elements that a rank exposes, 1-D. Call it after `wait`."""
        expected, memory = self._expected[source], self._messenger.memory
        if not expected.size:
            return torch.empty(0, dtype=self._dtype, device="cpu")
        assert memory is not None
        assert expected.confirmed, "read before `wait`"
        return memory.map_peer(self._messenger.ranks[source], expected.offset, expected.size, self._dtype)

    def release(self) -> None:
        """Report that all was read: the owners may write there again."""
        messenger, source = self._messenger, -1
        slot = messenger.slot(RELEASE_PORT)
        try:
            for source, number in self._numbers:
                messenger.backend.send_bytes(_RELEASED.pack(number), messenger.ranks[source], slot)
        except BaseException as error:
            raise messenger.cut_off(error, source, self._tag) from error
