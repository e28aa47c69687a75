"""Bytes that stay where they are: one rank lends memory that others of its host read in place, and say so.

    lender      header with a place  ->                           wait: until all have said that they have read
    borrower                         wait   read there   give_back  ->

Knows: places, and who may still read. Does not know: what is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .messages import Tag
from .messenger import Channel
from .peer_links import RETURN_LANE, Expected

_RETURNED = struct.Struct("<q")


class Lent:
    """Spans of a tensor, each lent to one rank; the tensor must not be written before `wait` returns."""

    def __init__(self, channel: Channel, tensor: Tensor, place: int, spans: Sequence[tuple[int, int, int]], tag: Tag):
        """``spans``: rank, and the elements' begin and end; ``place``: of the tensor's first byte. Whom nothing is lent
        is told so."""
        self._channel, self._tag = channel, tag
        self._left: list[tuple[int, int]] = []  # rank and number of what is still out, the first one last
        to, itemsize, sent = -1, tensor.itemsize, 0
        try:
            for to, begin, end in spans:
                size = (end - begin) * itemsize
                channel.send_header(channel.packed(tag, size), to, place + begin * itemsize)
                if size:
                    stream = channel.streams[to]
                    stream.lends = number = stream.lends + 1
                    stream.lent[number] = tensor
                    self._left.append((to, number))
                    sent += size
            channel.counted.sent += sent
        except BaseException as error:
            raise channel.cut_off(error, to, tag) from error
        self._left.reverse()

    def wait(self) -> None:
        channel = self._channel
        while self._left:
            to, number = self._left[-1]
            stream = channel.streams[to]
            while number in stream.lent:
                if stream.coming_back is None:
                    stream.coming_back = channel.recv_bytes(_RETURNED.size, to, RETURN_LANE, self._tag)
                (back,) = _RETURNED.unpack(channel.wait_bytes(stream.coming_back, to, self._tag))
                stream.coming_back = None
                del stream.lent[back]
            self._left.pop()


class Borrowed:
    """What some ranks lend this one, to be read in place between `wait` and `give_back`."""

    def __init__(self, channel: Channel, spans: Sequence[tuple[int, int]], dtype: torch.dtype, tag: Tag) -> None:
        """``spans``: rank, and how many elements it lends."""
        self._channel, self._dtype, self._tag = channel, dtype, tag
        self._expected: dict[int, Expected] = {}
        self._numbers: list[tuple[int, int]] = []  # rank, and which of its loans this is
        source, itemsize, received = -1, dtype.itemsize, 0
        try:
            for source, numel in spans:
                size = numel * itemsize
                self._expected[source] = channel.expect(tag, size, source)
                if size:
                    stream = channel.streams[source]
                    stream.borrowed = number = stream.borrowed + 1
                    self._numbers.append((source, number))
                    received += size
            channel.counted.received += received
        except BaseException as error:
            raise channel.cut_off(error, source, tag) from error

    def wait(self) -> None:
        for expected in self._expected.values():
            self._channel.confirm(expected)

    def tensor(self, source: int) -> Tensor:
        """What a rank lends, 1-D; after `wait`."""
        expected, memory = self._expected[source], self._channel.memory
        if not expected.size:
            return torch.empty(0, dtype=self._dtype, device="cpu")
        assert memory is not None
        assert expected.confirmed, "read before `wait`"
        return memory.look(self._channel.ranks[source], expected.place, expected.size, self._dtype)

    def give_back(self) -> None:
        """Say that all was read: the lenders may write there again."""
        channel, source = self._channel, -1
        slot = channel.slot(RETURN_LANE)
        try:
            for source, number in self._numbers:
                channel.bytes.send_bytes(_RETURNED.pack(number), channel.ranks[source], slot)
        except BaseException as error:
            raise channel.cut_off(error, source, self._tag) from error
