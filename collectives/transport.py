"""Communication among the ranks of a group: tagged messages, memory, meetings, and parts of the group.

Knows: ranks of the group, which are numbered from 0 in it. Does not know: what moves the bytes (a `Backend`; see
`collectives.backends`), algorithms, or optimizers.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from .backend import Backend, Region
from .launches.ledger import Launches
from .links.control_plane import Mesh, Tree
from .links.exposed_buffers import ExposedBuffer, PeerBuffers
from .links.messenger import DeferredSends, Messenger, PeerLinks
from .messages import Chain, Kind, Tag, Traffic, Work, as_bytes, describe
from .pool import Pool

LOG = logging.getLogger("collectives")
CHUNK, LEAST = 1 << 20, 1 << 17  # elements of a chunk at most, and at least
GRAIN = 64  # elements, a multiple of what any kernel takes at once: cutting there leaves its remainder unchanged


class Transport:
    """Tagged messages among the ranks of a group, over a backend: the interface of an algorithm to its group.

    Ranks are always ranks of the group, 0 to ``world_size - 1``, and tensors are 1-D. All ranks call the methods that
    say "Collective", in the same order. After a failure each method that communicates raises `CollectiveError`."""

    def __init__(
        self, backend: Backend, ranks: Sequence[int] | None = None, channel: int = 0, like: Transport | None = None
    ) -> None:
        """``ranks``: the backend's ranks that form the group, in group order (default: all); `ValueError` if this rank
        is not one of them. ``channel``: separates the messages of transports over one backend. ``like``: a transport
        of the same ranks, which shares its counters, failures and scratch memory with this one."""
        ranks = tuple(range(backend.world_size) if ranks is None else ranks)
        if backend.rank not in ranks:
            raise ValueError(f"rank {backend.rank} is not one of the group's ranks {list(ranks)}")
        self.backend = backend
        self._messenger: Messenger = Messenger(backend, ranks, channel, None if like is None else like._messenger)
        self.rank = self._messenger.rank
        self.world_size = len(ranks)
        self.timeout, self.name = backend.timeout, backend.name
        self._control: Mesh | Tree = Mesh(self._messenger)
        self._may_have_common = True
        self._announced_round = 0
        self.memory: Backend | None = self._messenger.memory
        self._allocate = partial(_allocate, self.memory)  # no reference back to this transport
        self.pool: Pool = Pool(allocate=self._allocate) if like is None else like.pool

    # -- memory ---------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D buffer outside the pool, with undefined content, aligned to 64 bytes."""
        if not numel:
            return torch.empty(0, dtype=dtype, device=device)
        storage = self._allocate(numel * dtype.itemsize, device)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))

    def peers_can_read(self, tensor: Tensor) -> bool:
        """Return True if peers on this host can read a tensor's memory in place."""
        return self.memory is not None and (not tensor.numel() or self.memory.offset_of(tensor) is not None)

    def peer_readable(self, tensor: Tensor) -> Tensor:
        """Return a 1-D tensor's values in memory that peers can read: the tensor itself, or a scratch copy."""
        if self.peers_can_read(tensor):
            return tensor
        # host synchronisation: device memory, which peers cannot read in place
        return self.scratch(tensor.numel(), tensor.dtype, torch.device("cpu")).copy_(tensor)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D buffer from the pool, with undefined content. The pool reuses it after its last use."""
        return self.pool.take(numel, dtype, device)

    @property
    def has_common(self) -> bool:
        """True if all ranks share a host, so that `common` returns memory while there is enough."""
        return self._may_have_common and self.backend.share_host(self._messenger.ranks)

    def common(self, sizes: Sequence[int]) -> Sequence[Region] | None:
        """Return a region of each of ``sizes``, in bytes, that all ranks have in common; None if they do not share a
        host, or if memory is short. Collective."""
        self.check()
        if not self.has_common or not sum(sizes):
            return None
        tag = Tag(Kind.EXCHANGE, "making memory for all ranks")
        self.exchange(b"", tag)  # finds a rank that failed or is elsewhere, which the wait for the memory could not
        try:
            regions = self.backend.common(sizes, self._messenger.ranks)
        except BaseException as error:
            raise self._messenger.cut_off(error, 0, tag) from error
        problems = self.exchange(b"" if regions is not None else b"none", tag)
        found = None if any(problems) else regions
        said = "no room" if found is None else "made"
        LOG.debug("%s: %d bytes of common memory: %s", self.rank_label, sum(sizes), said)
        return found

    # -- groups ---------------------------------------------------------------------------------------------------

    def peers(self) -> Sequence[int]:
        """Return the other ranks, from the next one on, so that not all ranks send to rank 0 first."""
        return self._messenger.peers

    def split(self, ranks: Sequence[int], channel: int = 0, *, may_have_common: bool = True) -> Transport:
        """Return the transport of a part of this group, with ``ranks`` in that order. Exactly these ranks call it;
        nothing is sent. ``may_have_common``: False forbids common memory, because some other part has none."""
        backend_ranks = self.backend_ranks(ranks)
        part = Transport(self.backend, backend_ranks, self._derived(backend_ranks, channel))
        part._may_have_common = may_have_common
        return part

    def attach(self, part: Transport, ranks: Sequence[int]) -> None:
        """Let the transport of a part share counters, failures and rank labels with this one. Local. ``ranks``: the
        ranks of ``part``, in its order, by their numbers in this group."""
        self._messenger.attach(part._messenger, ranks)

    def over(self, backend: Backend) -> Transport:
        """Return the same group over another backend with the same ranks. Do not use this transport afterwards."""
        ranks = self._messenger.ranks  # on another channel: this one has posted receives that it will not wait for
        return Transport(backend, ranks, self._derived(ranks, -1))

    def backend_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the backend's numbers of these ranks."""
        return [self._messenger.ranks[rank] for rank in ranks]

    def sibling(self, channel: int) -> Transport:
        """Return a transport of the same ranks with separate messages, which shares counters and failures with this
        one. All ranks call it; nothing is sent."""
        ranks = self._messenger.ranks
        return Transport(self.backend, ranks, self._derived(ranks, channel), like=self)

    def _derived(self, backend_ranks: Sequence[int], channel: int) -> int:
        name = ",".join(map(str, (self._messenger.number, channel, *backend_ranks)))
        return zlib.crc32(name.encode()) & 0xFFFFFF

    def fork(self) -> Transport:
        """Return a transport of the same ranks with separate messages, for another user of the group. Collective."""
        tag = Tag(Kind.EXCHANGE, "opening a channel")
        channel = int.from_bytes(os.urandom(3), "little")
        first = self.exchange(channel.to_bytes(4, "little"), tag)[0]
        return Transport(self.backend, self._messenger.ranks, int.from_bytes(first, "little"))

    # -- messages -------------------------------------------------------------------------------------------------

    def isend(
        self,
        tensor: Tensor,
        to: int,
        tag: Tag,
        *,
        control: bool = False,
        in_one_part: bool = False,
        one_way: bool = False,
    ) -> Work:
        """Start to send a 1-D contiguous tensor to rank ``to``. It must not be written before ``wait`` returns.

        ``in_one_part``: do not cut the tensor into `chunks`, since it is one of them. ``one_way``: the receiver
        acknowledges the message, whatever its size. Set it, unless this rank waits for a later message from ``to``
        before it waits for this send. Without either, the wait may last until the time limit if that rank is killed,
        because a network does not always report it. The receiver must pass the same options.
        """
        self.check()
        work = self._messenger.send(_parts(tensor, in_one_part), to, tag, one_way=one_way)
        if control:
            self._messenger.counted.control_sent += tensor.nbytes
        else:
            self._messenger.counted.payload_sent += tensor.nbytes
        return work

    def irecv(
        self,
        tensor: Tensor,
        source: int,
        tag: Tag,
        *,
        control: bool = False,
        in_one_part: bool = False,
        one_way: bool = False,
    ) -> Work:
        """Start to receive a 1-D contiguous tensor of exactly this size from rank ``source``. The receives of all parts
        but the first are posted at the next send, at `post_remaining`, or at a wait. Options: those of `isend`."""
        return Chain(self.irecv_chunks(tensor, source, tag, control=control, in_one_part=in_one_part, one_way=one_way))

    def irecv_chunks(
        self,
        tensor: Tensor,
        source: int,
        tag: Tag,
        *,
        control: bool = False,
        in_one_part: bool = False,
        one_way: bool = False,
    ) -> Sequence[Work]:
        """Like `irecv`, but return one work per part of `chunks`. Wait for them in order."""
        self.check()
        works = self._messenger.recv(_parts(tensor, in_one_part), source, tag, one_way=one_way)
        if control:
            self._messenger.counted.control_received += tensor.nbytes
        else:
            self._messenger.counted.payload_received += tensor.nbytes
        return works

    def post_remaining(self) -> None:
        """Post the receives that were deferred, because this rank sends nothing more now."""
        self._messenger.post_remaining()

    def expose(self, tensor: Tensor, spans: Sequence[tuple[int, int, int]], tag: Tag) -> ExposedBuffer:
        """Let other ranks, which call `map_buffers`, read elements of a 1-D contiguous tensor in place. If peers cannot
        read its memory, they read a copy. Do not write to the tensor before ``wait`` returns.

        ``spans``: a rank, and the begin and end of its elements.
        """
        self.check()
        assert self.memory is not None
        offset = self.memory.offset_of(tensor) if tensor.numel() else 0
        if offset is None:
            first = min((begin for _, begin, _ in spans), default=0)
            last = max((end for _, _, end in spans), default=0)
            tensor = self.peer_readable(tensor[first:last])
            spans = [(to, begin - first, end - first) for to, begin, end in spans]
            offset = self.memory.offset_of(tensor) if tensor.numel() else 0
        assert offset is not None, "peers can read scratch memory"
        return ExposedBuffer(self._messenger, tensor, offset, spans, tag)

    def map_buffers(self, spans: Sequence[tuple[int, int]], dtype: torch.dtype, tag: Tag) -> PeerBuffers:
        """Map memory that other ranks `expose`. ``spans``: a rank, and the number of elements that it exposes."""
        self.check()
        return PeerBuffers(self._messenger, spans, dtype, tag)

    def exchange(self, data: bytes, tag: Tag) -> list[bytes]:
        """Return every rank's bytes, in rank order. Lengths may differ. Collective.

        While other messages are under way, the bytes must be at most 64 KiB (after `route`, of all ranks together).
        Otherwise this call would wait for those messages.
        """
        self.check()
        self._log("exchanges bytes", tag)
        messages = self._swap(data, tag)
        assert messages is not None, "no rank is behind in an exchange"
        return messages

    @property
    def launches(self) -> Launches | None:
        """The launches of this rank on devices; None if each collective there awaits its headers. Internal."""
        return self._messenger.launches

    @property
    def links(self) -> PeerLinks:
        """The links that carry its messages. Internal."""
        return self._messenger

    def route(self, hosts: Sequence[Sequence[int]]) -> None:
        """Route exchanges and meetings over a star in each host and a tree between hosts from now on. All ranks call it
        with the same ``hosts``, the ranks of each host; nothing is sent."""
        self._control = Tree(self._messenger, hosts)

    @property
    def is_routed(self) -> bool:
        """Whether `route` was called."""
        return isinstance(self._control, Tree)

    def announce(self, tag: Tag) -> Work:
        """Send the header of ``tag`` without bytes to every other rank, and receive the same from each. All ranks."""
        self.check()
        self._log("announces itself", tag)
        if tag.kind is Kind.REDUCE_SCATTER:
            self._announced_round = tag.round
        recvs = [self._messenger.recv((), source, tag)[0] for source in self.peers()]
        sends = [self._messenger.send((), to, tag) for to in self.peers()]
        return Chain([*recvs, DeferredSends(self._messenger, sends)])

    def announce_round(self, tag: Tag) -> Work:
        """`announce` the first collective of a round; do nothing for the others. Each reduce-scatter of an algorithm
        calls this, unless it sends a message to every other rank before it waits: `meet` relies on one."""
        if tag.round == self._announced_round:
            return Chain(())
        return self.announce(tag)

    def meet(self, tag: Tag, catch_up: Callable[[], None], message: Callable[[], bytes] = bytes) -> list[bytes]:
        """Exchange messages, and first let ranks catch up. Return every rank's ``message()``, in rank order, once all
        ranks have called this with the same ``tag.round``. Collective.

        ``tag.round`` is the number of rounds of collectives that this rank has entered. If a rank reads that another
        one has entered a later round, it calls ``catch_up``, which enters one more round, and sends a message again.
        So a rank that has nothing to contribute still takes part in every round that others begin. ``message`` is
        called for each message, so every returned message was made after the last round.

        If all headers that a rank reads have the same round, no rank had entered a later round when it sent its own.
        So no rank will in this meeting, and the messages of that round are final.
        Messages of a pair of ranks are in order, so a rank reads the headers of a peer's rounds before that of this
        meeting. The reader drops a message whose sender has entered a later round since.
        """
        self.check()
        self._log("meets all ranks", tag)
        while True:
            messages = self._swap(message(), tag)
            if messages is not None:
                return messages
            self._log("catches up", tag)
            catch_up()
            tag = tag._replace(round=tag.round + 1)

    def _swap(self, data: bytes, tag: Tag) -> list[bytes] | None:
        swap = partial(self._control.swap, data, tag)
        return swap() if self.launches is None else self.launches.meet(tag, swap)

    def _log(self, what: str, tag: Tag) -> None:
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("%s: %s, in %s", self.rank_label, what, describe(tag))

    # -- failures and counts --------------------------------------------------------------------------------------

    def abort(self, reason: str) -> list[int]:
        """Report to every other rank that this one failed, and return the ranks that the report cannot reach.
        Then this transport is closed. The backend remains usable, unless a time limit passed."""
        LOG.debug("%s: aborts: %s", self.rank_label, reason)
        return self._messenger.abort(reason)

    def advise(self, text: str) -> None:
        """Append ``text`` to errors of ranks in different collectives, here and on attached transports."""
        self._messenger.advise(text)

    @property
    def rank_label(self) -> str:
        """The name of this rank in errors."""
        return self._messenger.rank_label

    @property
    def broken(self) -> bool:
        """True after a failure: every further call raises."""
        return self._messenger.broken is not None

    def check(self) -> None:
        """Raise `CollectiveError` after a failure, which it names, or in a process that was forked."""
        self._messenger.check()

    def check_process(self) -> None:
        """Raise `CollectiveError` in a process that was forked from the rank's own."""
        self._messenger.check_process()

    @property
    def traffic(self) -> Traffic:
        """The bytes and messages that this rank has sent and received so far."""
        return replace(self._messenger.counted)

    def count_payload(self, sent: int, received: int) -> None:
        """Count bytes of payload that do not pass through `isend` and `irecv`."""
        self._messenger.counted.payload_sent += sent
        self._messenger.counted.payload_received += received


def _allocate(memory: Backend | None, nbytes: int, device: torch.device) -> UntypedStorage:
    if memory is None or device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    return memory.allocate(nbytes)


class as_a_whole:  # noqa: N801 - a context, and cheaper than a generator: it is entered for each bucket
    """Abort the transport if one of ``errors`` ends the block, since the ranks may then differ; the error goes on.

    ``doing``: names the block in the error of the other ranks, such as "in step()".
    """

    __slots__ = ("_doing", "_errors", "_transport")

    def __init__(self, transport: Transport, doing: str, errors: type[BaseException] = BaseException) -> None:
        self._transport, self._doing, self._errors = transport, doing, errors

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, self._errors) and not self._transport.broken:
            label = self._transport.rank_label
            self._transport.abort(f"{label}, {self._doing}: {type(error).__name__}: {error}")


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a large message, as begin and end in elements.

    The work on one part overlaps with the transfer of the next. Each part is half of the rest, within limits. So little
    work remains after the last part, and no part is too short for a message. An empty message is one empty part."""
    begin = 0
    while True:
        half = -(-(numel - begin) // (2 * GRAIN)) * GRAIN
        end = min(begin + min(CHUNK, max(LEAST, half)), numel)
        yield begin, end
        if end == numel:
            return
        begin = end


def _parts(tensor: Tensor, in_one_part: bool) -> list[Tensor]:
    data, size = as_bytes(tensor), tensor.itemsize
    spans = [(0, tensor.numel())] if in_one_part else chunks(tensor.numel())
    return [data[begin * size : end * size] for begin, end in spans if end]  # an empty tensor has no part
