"""What is under way between this rank and another: messages that are sent, expected or lent, and who waits for them.

Knows: a channel, by what it does when somebody waits. Does not know: how anything travels, or what it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .backend import Pending, PendingBytes
from .messages import Tag

if TYPE_CHECKING:
    from .messenger import Channel

SMALL = 1 << 16  # bytes that a network takes at once


@dataclass
class Counters:
    """`messages.Traffic` while it grows."""

    sent: int = 0
    received: int = 0
    control_sent: int = 0
    control_received: int = 0
    messages: int = 0


class Stream:
    """Messages of one rank: headers asked for, those expected, at most one that was read and put back, and what this
    rank lends it. ``distant``: it is reached over a network; ``limit``: seconds for which it is waited for."""

    def __init__(self, distant: bool, limit: float) -> None:
        self.distant, self.limit = distant, limit
        self.words: PendingBytes | None = None
        self.answers: deque[PendingBytes] = deque()  # to what was sent
        self.asked = self.answered = 0
        self.posted: deque[PendingBytes] = deque()
        self.expected: deque[Expected] = deque()
        self.returned: bytes | None = None
        self.lent: dict[int, Tensor] = {}  # by number, as both sides count
        self.lends = self.borrowed = 0
        self.coming_back: PendingBytes | None = None


class Expected:
    """A header that is expected from one rank."""

    __slots__ = ("confirmed", "packed", "place", "size", "source", "tag")

    def __init__(self, source: int, tag: Tag, size: int, packed: bytes) -> None:
        self.source, self.tag, self.size, self.packed = source, tag, size, packed
        self.confirmed, self.place = False, 0


class Send:
    """A message under way. The channel holds it until it was waited for: a carrier may drop what nobody holds."""

    def __init__(self, channel: Channel, to: int, tag: Tag, size: int, pendings: Sequence[Pending] = ()) -> None:
        self._channel, self._to, self._tag, self.size = channel, to, tag, size
        self.distant = channel.streams[to].distant
        self.pendings = list(pendings)
        self.answers = 0  # which answer says that this was read; 0: none does
        channel.unsent[id(self)] = self

    def wait(self) -> None:
        if self.answers:
            self._channel.wait_answers(self._to, self.answers, self._tag)
        while self.pendings:
            self._channel.wait(self.pendings[0], self._to, self._tag)
            self.pendings.pop(0)
        self._channel.unsent.pop(id(self), None)


class Settled:
    """Sends to peers that had asked for them before they sent what was read of them since: these are under way. To wait
    would be to ask the network, which may have lost sight of one whose peer is gone just now; so that is left to the
    next time, when the peers have been heard of again."""

    def __init__(self, channel: Channel, sends: Sequence[Send]) -> None:
        self._channel, self._sends = channel, sends

    def wait(self) -> None:
        settled = self._channel.settled
        for send in (*settled, *(send for send in self._sends if not send.distant or send.size > SMALL)):
            send.wait()
        settled[:] = [send for send in self._sends if send.distant and send.size <= SMALL]
        self._sends = ()


class Recv:
    """A part of a message that is expected from one rank. The header is read before its bytes are believed."""

    def __init__(self, channel: Channel, expected: Expected, part: Tensor | None, *, last: bool) -> None:
        """``last``: to be answered when it was read, where that is waited for."""
        self._channel, self.expected, self._last = channel, expected, last
        self.part = part  # None: there is none, or it was read
        self.payload: Pending | None = None  # what comes there, when it was asked for
        self.here: PendingBytes | None = None  # what is sent behind a part of many bytes

    def wait(self) -> None:
        channel, expected = self._channel, self.expected
        channel.confirm(expected)
        if self.here is not None:
            channel.wait_here(self.here, expected.source, expected.tag)
            self.here = None
        if self.part is not None:
            assert self.payload is not None, "every part is asked for before a header is believed"
            channel.wait(self.payload, expected.source, expected.tag)
            self.part = self.payload = None  # it was read
            if self._last:
                channel.answer(expected)
