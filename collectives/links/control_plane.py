"""How the short messages of an exchange or a meeting reach all ranks.

Among few ranks each sends to every other (`Mesh`). Among many they go by a tree (`Tree`): a star in each host around
its first rank, and a binomial tree between the first ranks.

    host A   1 -> 0 <- 2         up: a rank's message, and all that came to it from below
                  ^              down, the same way back: the messages of all ranks
    host B   4 -> 3 <- 5

A rank that is not the first of its host sends one message and receives one, whatever the number of ranks; two, if the
messages are long together.

A meeting needs no other messages to find a rank that is ahead. The headers of its payload go to every rank, so its
neighbours in the tree see them where they wait for it, catch up, and are then ahead of their own neighbours. What the
root has received from all ranks is final, see `Transport.meet`, and so is what it sends back.

A neighbour may itself be waiting. So a rank that comes late, or whose own wait for another rank has ended late, tells
its neighbours that it is there. And a rank waits the longer for a neighbour, the more ranks that one may wait for in
turn. Of all ranks that wait because one has stopped, its own neighbour therefore gives up first. It names the rank that
stopped, and reports it to all.

Knows: headers, and who waits for whom. Does not know: what the messages say.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..messages import Kind, Tag
from .messenger import GRACE, SMALL, ControlRecv, DeferredSends, Messenger, Send

MESH_RANKS = 8  # among more, the messages of a mesh cost more than the detour
WAITING, AGAIN = 1 << 60, 1 << 61  # in the digest of a tag: a rank still waits; the second pass
TOO_LONG = b""  # instead of packed messages, which are never empty
PARTS = 64  # of the time limit: a rank that waits longer than one of them tells its neighbours


def _arrived(
    messenger: Messenger, source: int, tag: Tag, size: int | None, patience: float, still_here: Callable[[], None]
) -> ControlRecv | None:
    """Return what ``source`` sends at ``tag``, or None if it has entered a round that this rank has not.

    ``size``: how many bytes that probably is, if it is known. ``patience``: seconds beyond the time limit.
    ``still_here``: is called when ``source`` says that it waits itself.
    """
    messenger.confirm_expected(source)
    while True:
        header = messenger.next_header(source, tag, patience)
        if size is not None and header.startswith(messenger.packed(tag, size)):
            return ControlRecv(messenger, source, tag, size)
        theirs, nbytes = Tag.unpack(header)
        if theirs.same(tag):
            return ControlRecv(messenger, source, tag, nbytes)
        if theirs.same(_marked(tag, WAITING)):
            still_here()
        elif theirs.round > tag.round and tag.kind is Kind.MEET and theirs.kind in (Kind.REDUCE_SCATTER, Kind.MEET):
            messenger.states[source].unread_header = header
            return None
        elif theirs.kind is Kind.MEET and theirs.round < tag.round:
            ControlRecv(messenger, source, theirs, nbytes).wait()
        else:
            raise messenger.mismatch(source, tag, theirs)


def _marked(tag: Tag, mark: int) -> Tag:
    return tag.digested(tag.digest ^ mark)


def _nothing() -> None:
    return None


class Mesh:
    """Each rank sends to every other."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._sends: list[Send] = []  # of this exchange, and of a meeting's rounds so far

    def swap(self, data: bytes, tag: Tag) -> list[bytes] | None:
        """Return every rank's bytes, in rank order; None if a rank has entered a later round than this one, which can
        happen in a meeting. Collective."""
        messenger, arriving = self._messenger, dict[int, ControlRecv]()
        for source in messenger.peers:
            messenger.post_next_header(source, tag)
        self._sends += [messenger.send_control(data, to, tag) for to in messenger.peers]
        for source in messenger.peers:
            found = _arrived(messenger, source, tag, len(data), 0.0, _nothing)
            if found is None:
                for recv in arriving.values():
                    recv.wait()  # it is out of date
                return None
            arriving[source] = found
        for recv in arriving.values():
            recv.post_body()
        self._sends += messenger.send_body(data, arriving, tag)
        result = [data] * (1 + len(arriving))
        for source, recv in arriving.items():
            result[source] = recv.wait()
        DeferredSends(messenger, self._sends).wait()
        self._sends = []
        return result


@dataclass(frozen=True)
class TreeNode:
    """A rank's place in the tree.

    ``parent``: the rank to which it sends; None for the root. ``below``: for each rank that sends to it, all ranks
    whose messages come that way, in the order of the hosts. ``chains``: for each neighbour, the length of the longest
    chain of ranks that may wait for each other behind it, while this rank waits for it.
    """

    parent: int | None
    below: dict[int, tuple[int, ...]]
    chains: dict[int, int]

    @classmethod
    def of(cls, rank: int, hosts: Sequence[Sequence[int]]) -> TreeNode:
        """``hosts``: the ranks of each host. Host n is below host n without its lowest bit."""
        number = next(number for number, host in enumerate(hosts) if rank in host)
        depth, deepest = number.bit_count(), (len(hosts) - 1).bit_length() + 1
        first, *others = hosts[number]
        if rank != first:
            return cls(first, {}, {first: deepest + depth})
        below: dict[int, tuple[int, ...]] = {other: (other,) for other in others}
        chains, size = dict.fromkeys(others, 0), 1
        while number + size < len(hosts) and (number == 0 or size < number & -number):
            child = hosts[number + size][0]
            below[child] = tuple(rank for host in hosts[number + size : number + 2 * size] for rank in host)
            chains[child] = size.bit_length()
            size *= 2
        parent = hosts[number & (number - 1)][0] if number else None
        if parent is not None:
            chains[parent] = deepest + depth - 1
        return cls(parent, below, chains)


class Tree:
    """Messages go up a tree and back."""

    def __init__(self, messenger: Messenger, hosts: Sequence[Sequence[int]]) -> None:
        """``hosts``: the ranks of each host, the same on every rank."""
        self._messenger = messenger
        messenger.use_tree()
        place = TreeNode.of(messenger.rank, hosts)
        self._parent, self._below = place.parent, place.below
        self._neighbours = [*place.below] if place.parent is None else [*place.below, place.parent]
        self._order = [rank for host in hosts for rank in host]
        self._pause = messenger.timeout / PARTS
        # A rank has GRACE more for the ranks of its own host than for others, see `PeerLinks`.
        self.patience = {
            peer: chain * (self._pause + GRACE) + GRACE if chain else 0.0 for peer, chain in place.chains.items()
        }
        self._sends: list[Send] = []  # of this exchange, and of a meeting's rounds so far
        self._told_at = time.monotonic()  # when the neighbours last heard of this rank

    def swap(self, data: bytes, tag: Tag) -> list[bytes] | None:
        """See `Mesh.swap`. Many bytes go in a second pass: all ranks are here then, and wait for nothing else."""
        packed = self._pass(data, tag, SMALL)
        if packed == TOO_LONG:
            packed = self._pass(data, _marked(tag, AGAIN), None)
        if packed is None:
            return None
        found = dict(zip(self._order, unpack_messages(packed), strict=True))
        return [found[rank] for rank in range(len(found))]

    def _pass(self, data: bytes, tag: Tag, most: int | None) -> bytes | None:
        """Return the messages of all ranks, packed; `TOO_LONG` if they have more than ``most`` bytes, None if a rank
        is ahead."""
        for source in self._neighbours:
            self._messenger.post_next_header(source, tag)
        if self._below:
            self._tell(self._neighbours, tag)
        packed = self._up_and_down(data, tag, most)
        if packed is None:
            return None
        self._send(packed, self._below, tag, acked=True)
        DeferredSends(self._messenger, self._sends).wait()
        self._sends, self._told_at = [], time.monotonic()
        return packed

    def _up_and_down(self, data: bytes, tag: Tag, most: int | None) -> bytes | None:
        messages, too_long = [data], False
        for child, ranks in self._below.items():
            below = self._hear(child, tag, self._neighbours)
            if below is None:
                return None
            too_long = too_long or below == TOO_LONG
            messages += [b""] * len(ranks) if too_long else unpack_messages(below)
        packed = TOO_LONG if too_long else pack_messages(messages)
        if most is not None and len(packed) > most:
            packed = TOO_LONG
        if self._parent is None:
            return packed
        self._send(packed, [self._parent], tag)
        return self._hear(self._parent, tag, [*self._below])

    def _send(self, data: bytes, ranks: Iterable[int], tag: Tag, *, acked: bool = False) -> None:
        self._sends += [self._messenger.send_control(data, to, tag, acked=acked) for to in ranks]
        self._sends += self._messenger.send_body(data, ranks, tag)

    def _hear(self, source: int, tag: Tag, waiting: Sequence[int]) -> bytes | None:
        """Return a neighbour's bytes; None if it has entered a later round. ``waiting``: those that may wait for this
        rank meanwhile."""
        recv = _arrived(self._messenger, source, tag, None, self.patience[source], lambda: self._tell(waiting, tag))
        if recv is None:
            return None
        self._tell(waiting, tag)
        recv.post_body()
        data = recv.wait()
        if source == self._parent and recv.size <= SMALL:
            self._messenger.acknowledge_control(source, tag)
        return data

    def _tell(self, ranks: Sequence[int], tag: Tag) -> None:
        """Tell ranks that this one is here and waits, unless they have heard of it a short while ago."""
        now = time.monotonic()
        if now - self._told_at >= self._pause:
            self._told_at = now
            self._sends += [self._messenger.send_control(b"", to, _marked(tag, WAITING)) for to in ranks]


def pack_messages(messages: Sequence[bytes]) -> bytes:
    """Return messages as one. Equal ones, which most records of ranks are, are there once."""
    distinct = {message: number for number, message in enumerate(dict.fromkeys(messages))}
    numbers = [len(distinct), *map(len, distinct), *(distinct[message] for message in messages)]
    return b"".join([struct.pack(f"<{len(numbers)}I", *numbers), *distinct])


def unpack_messages(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", data)
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    begin = len(data) - sum(lengths)
    numbers, distinct = struct.unpack(f"<{begin // 4}I", data[:begin])[1 + count :], list[bytes]()
    for length in lengths:
        distinct.append(data[begin : begin + length])
        begin += length
    return [distinct[number] for number in numbers]
