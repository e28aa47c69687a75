"""Hosts of neighbouring ranks: an exchange inside each host, and the running sum goes from host to host.

    ranks 0 1 | 2 3 | 4 5, three hosts of two; ranks 0, 2 and 4 are a rail, and form the sums of the shards 0, 2 and 4

    rank 0: start + x_0 + x_1  ->  rank 2: + x_2 + x_3  ->  rank 4: + x_4 + x_5  ->  to ranks 0, 2 and 4, the owners

The sum is formed in rank order, for a fraction of the bytes of a direct exchange: between H hosts each element of a sum
crosses (H - 1) (1 + 1/H) times, and a sum so far (H - 1) / H times more, from its owner to the first host. A sum goes
in chunks, so that all hosts work on a bucket at the same time. Ranks of a host exchange contributions, which are not
added beforehand.

Sums go by messages, in the wait, or on devices by the backend's own collectives, without the host. There what a rank
sends is copied at the launch: what is written into the contribution or into the sum so far after it changes nothing.

Knows: which ranks share a host. Does not know: how hosts were found, or what moves bytes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..backend import Backend, Pending
from ..messages import Chain, Tag, Work, as_bytes
from ..transport import Transport, as_a_whole, chunks
from .base import ADDING_UP, has_ended, nothing
from .ordered_sum import Aside, enqueued, ordered_sum
from .plans import Rails, chunk_of_fold


class Together(Protocol):
    """What all ranks do together: an algorithm of the backend's own collectives, or of messages."""

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""


class Begins(Together, Protocol):
    """An algorithm that begins collectives of the backend when all ranks are in the same.

    Its stream aside is used here, too."""

    aside: Aside | None

    def begin(
        self,
        tag: Tag,
        bounds: Sequence[int],
        moved: Tensor,
        call: Callable[[Backend], Pending],
        finish: Callable[[], None],
    ) -> Work: ...


class Fold:
    """Reduce-scatter whose running sums travel from host to host, in rank order; all-gather of another algorithm.

    For ranks that are numbered host by host, equally many per host. "auto" takes it on GPUs of several hosts, with
    NCCL. `collectives.build` with "fold" builds it; this class sends messages, and `FoldOnDevices` uses NCCL.
    """

    name = "fold"
    exact = True

    def __init__(self, transport: Transport, hosts: Sequence[Sequence[int]], together: Together) -> None:
        """``hosts``: the ranks of each host, for which `why_not_folded` returns "". ``together``: the algorithm of the
        all-gather, over the same transport."""
        self.transport, self.together = transport, together
        self.rails = Rails(len(hosts), len(hosts[0]), transport.rank)
        self.onward = transport.sibling(1)  # for separate messages, since a rank sends sums in a wait
        self.exchanged: Work = Chain(())  # the last exchange, which holds its input

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.rails.hosts

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """See `collectives.Collective.reduce_scatter`. Scratch memory: twice the contribution, and the sums of a rail.
        `FoldOnDevices` reads ``start`` at the launch."""
        tag = tag.digested(tag.digest ^ zlib.crc32(repr((start is not None, out.dtype)).encode()))
        return self._launch(source, bounds, out, start, tag)

    def _launch(self, source: Tensor, bounds: Sequence[int], out: Tensor, start: Tensor | None, tag: Tag) -> Work:
        self.exchanged.wait()
        work = _ByMessages(self, _Operands(self, source, bounds, out, start), tag)
        self.exchanged = work.exchanged
        return work

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """See `collectives.Collective.all_gather`."""
        return self.together.all_gather(buffer, bounds, tag=tag)


class FoldOnDevices(Fold):
    """`Fold` over collectives of the backend: of all ranks, of the ranks of a host, and of the ranks of a rail."""

    def __init__(
        self, transport: Transport, hosts: Sequence[Sequence[int]], together: Begins, host: Backend, rail: Backend
    ) -> None:
        """``host``, ``rail``: the backends among the ranks of this rank's host and rail."""
        super().__init__(transport, hosts, together)
        self._begins, self.host, self.rail = together, host, rail
        self.exchange: _HostExchange | None = None  # the last one
        self.aside = together.aside

    def add_in_wait(self) -> None:
        """See `AddsAside`."""
        self.aside = None

    def _launch(self, source: Tensor, bounds: Sequence[int], out: Tensor, start: Tensor | None, tag: Tag) -> Work:
        def call(_: Backend) -> Pending:
            if self.exchange is not None:
                self.exchange.let_go(self.transport.timeout)
            copied = None if start is None else _copy(self, start)
            work = _FoldUnderWay(self, _Operands(self, source, bounds, out, copied))
            self.exchange = work.exchange
            return work

        return self._begins.begin(tag, bounds, source, call, nothing)


class _Operands:
    """The tensors of one reduce-scatter on one rank.

    ``sizes``: elements of the shards of each rail. ``shards``: elements of each shard of this rank's rail, by host.
    ``sorted``: this rank's contribution, rail by rail. ``arrived``: those of its host to the rail's shards, in rank
    order. ``sums``: of the rail's shards. ``start``: the sum so far, of this rank's shard.
    """

    def __init__(self, fold: Fold, source: Tensor, bounds: Sequence[int], out: Tensor, start: Tensor | None) -> None:
        t, rails, self.out, self.start = fold.transport, fold.rails, out, start
        by_rail = [rails.shards(bounds, place) for place in range(rails.width)]
        self.sizes = [sum(high - low for low, high in shards) for shards in by_rail]
        self.shards = [high - low for low, high in by_rail[rails.place]]
        numel = self.sizes[rails.place]
        self.sorted = t.scratch(source.numel(), source.dtype, source.device)
        if len({high - low for shards in by_rail for low, high in shards}) == 1:  # as one kernel
            by_host = source.view(rails.hosts, rails.width, -1)
            self.sorted.view(rails.width, rails.hosts, -1).copy_(by_host.transpose(0, 1))
        else:
            torch.cat([source[low:high] for shards in by_rail for low, high in shards], out=self.sorted)
        self.arrived = t.scratch(rails.width * numel, source.dtype, source.device).view(rails.width, numel)
        self.sums = t.scratch(numel, out.dtype, out.device)

    def add(self, low: int, high: int, *, begun: bool) -> None:
        """Add the contributions of this host to ``sums[low:high]``. ``begun``: a sum is there."""
        total = self.sums[low:high]
        before = [total] if begun else []
        ordered_sum([*before, *(part[low:high] for part in self.arrived)], total)


def _copy(fold: Fold, tensor: Tensor) -> Tensor:
    return fold.transport.scratch(tensor.numel(), tensor.dtype, tensor.device).copy_(tensor)


class _ByMessages:
    """A reduce-scatter whose contributions travel at once, and whose sum travels in the wait."""

    def __init__(self, fold: Fold, operands: _Operands, tag: Tag) -> None:
        t, rails = fold.transport, fold.rails
        self._fold, self._operands, self._tag = fold, operands, tag
        announced, first = t.announce_round(tag), rails.host * rails.width
        own = list(torch.split(operands.sorted, operands.sizes))
        del operands.sorted
        operands.arrived[rails.place].copy_(own[rails.place])
        peers = [(rails.place + step) % rails.width for step in range(1, rails.width)]
        recvs = [t.irecv(operands.arrived[peer], first + peer, tag) for peer in peers]
        self.exchanged = Chain([*recvs, *(t.isend(own[peer], first + peer, tag) for peer in peers)])
        t.post_remaining()
        self._under_way: Work = Chain([announced, self.exchanged])
        self._folded = False

    def wait(self) -> None:
        self._under_way.wait()
        if not self._folded:
            with as_a_whole(self._fold.transport, ADDING_UP):
                self._folded, self._under_way = True, self._fold_here()
            self._under_way.wait()

    def _fold_here(self) -> Work:
        """Add this host's contributions chunk by chunk, send each on, and expect the total."""
        onward, rails, given, tag = self._fold.onward, self._fold.rails, self._operands, self._tag
        sends, recvs, pieces = list[Work](), list[Work](), list(chunks(given.sums.numel()))
        self._begin(sends)
        if rails.before is not None:
            parts = [given.sums[low:high] for low, high in pieces]
            recvs = [onward.irecv(part, rails.before, tag, in_one_part=True, one_way=True) for part in parts]
        total = [onward.irecv(given.out, rails.owners[-1], tag, one_way=True)] if rails.after is not None else []
        for number, (low, high) in enumerate(pieces):
            if recvs:
                recvs[number].wait()
            given.add(low, high, begun=rails.host > 0 or given.start is not None)
            if rails.after is not None:
                part = given.sums[low:high]
                sends.append(onward.isend(part, rails.after, tag, in_one_part=True, one_way=True))
        if rails.after is None:
            *others, own = torch.split(given.sums, given.shards)
            given.out.copy_(own)
            owners = zip(others, rails.owners, strict=False)
            sends += [onward.isend(part, owner, tag, one_way=True) for part, owner in owners]
        return Chain([*total, *sends])

    def _begin(self, sends: list[Work]) -> None:
        """Send the sum so far to the first host, which has all of them then."""
        onward, rails, start = self._fold.onward, self._fold.rails, self._operands.start
        if start is None:
            return
        if rails.host:
            sends.append(onward.isend(_copy(self._fold, start), rails.place, self._tag, one_way=True))
            return
        own, *parts = torch.split(self._operands.sums, self._operands.shards)
        own.copy_(start)
        owners = zip(parts, rails.owners[1:], strict=True)
        Chain([onward.irecv(part, owner, self._tag, one_way=True) for part, owner in owners]).wait()


class _HostExchange:
    """The exchange inside a host, which holds its input."""

    def __init__(self, pending: Pending, given: Tensor) -> None:
        self._pending: Pending | None = pending
        self._given: Tensor | None = given

    def wait(self, timeout: float) -> None:
        """Order the current stream behind the exchange."""
        if self._pending is not None:
            self._pending.wait(timeout)

    def let_go(self, timeout: float) -> None:
        """Order the current stream behind the exchange, which may use the memory of its input again."""
        self.wait(timeout)
        self._pending = self._given = None


class _FoldUnderWay:
    """A reduce-scatter of the backend's own collectives, as one that is pending.

    Where the device has streams, everything is launched at once, and sums are formed on their own stream: so a
    bucket travels from host to host while the backward goes on, and no rank waits until another one is in a wait. On
    the CPU sums are formed in the wait.
    """

    def __init__(self, fold: FoldOnDevices, operands: _Operands) -> None:
        t, rails = fold.transport, fold.rails
        self._transport, self._rails, self._rail, self._operands = t, rails, fold.rail, operands
        itemsize, numel = operands.sorted.itemsize, operands.sums.numel()
        pending = fold.host.all_to_all(
            as_bytes(operands.arrived.view(-1)),
            as_bytes(operands.sorted),
            ([numel * itemsize] * rails.width, [size * itemsize for size in operands.sizes]),
        )
        self.exchange = _HostExchange(pending, operands.sorted)
        del operands.sorted
        sent, received = sum(operands.sizes) - numel, (rails.width - 1) * numel
        t.count_payload(sent * itemsize, received * itemsize)
        self._gathered = None if operands.start is None else self._gather(operands.start)
        self._begun = rails.host > 0 or operands.start is not None
        self._left = deque(self._pieces(numel))
        self._sends = list[Pending]()
        self._returned: Pending | None = None
        self._awaited = False
        device = operands.sums.device
        stream = None if fold.aside is None else fold.aside.of(device)
        if stream is not None:
            with enqueued(stream, device):
                self._fold_here(t.timeout)

    def wait(self, timeout: float) -> None:
        if self._awaited:
            return
        if self._returned is None:
            self._fold_here(timeout)
        assert self._returned is not None
        self.exchange.let_go(timeout)
        self._returned.wait(timeout)  # it was launched behind all additions
        for each in self._sends:
            each.wait(timeout)
        self._awaited = True
        del self._operands  # a ledger keeps this object longer than its caller

    def ended(self) -> bool:
        """See `DevicePending`. What comes before the sends and the return of the sums has ended with these."""
        return self._awaited and all(
            map(has_ended, [*self._sends, *([] if self._returned is None else [self._returned])])
        )

    def _gather(self, start: Tensor) -> Pending:
        """Send the sum so far of this rank's shard to the first host."""
        t, rails, shards = self._transport, self._rails, self._operands.shards
        there, here = [0] * t.world_size, [0] * t.world_size
        there[rails.place] = start.nbytes
        if not rails.host:
            for owner, numel in zip(rails.owners, shards, strict=True):
                here[owner] = numel * start.itemsize
        sums = self._operands.sums if not rails.host else self._operands.sums[:0]
        t.count_payload(start.nbytes if rails.host else 0, sum(here) and sum(here) - start.nbytes)
        return t.backend.all_to_all(as_bytes(sums), as_bytes(start), (here, there))

    def _pieces(self, numel: int) -> list[tuple[int, int, Pending | None]]:
        """Return where each chunk lies, and expect it from the host before."""
        found = list[tuple[int, int, Pending | None]]()
        length = chunk_of_fold(numel)
        for low in range(0, numel, length):
            high = min(low + length, numel)
            taken = None
            if self._rails.host:
                taken = self._rail.take_from(as_bytes(self._operands.sums[low:high]), self._rails.host - 1)
            found.append((low, high, taken))
        return found

    def _fold_here(self, timeout: float) -> None:
        """Add this host's contributions chunk by chunk, send each on, and the total to its owners."""
        self.exchange.wait(timeout)
        if self._gathered is not None:
            self._gathered.wait(timeout)
        rails, given = self._rails, self._operands
        onward = rails.after is not None
        while self._left:
            low, high, taken = self._left[0]
            if taken is not None:
                taken.wait(timeout)
            with as_a_whole(self._transport, ADDING_UP):
                self._left.popleft()
                given.add(low, high, begun=self._begun)
                if onward:
                    self._sends.append(self._rail.pass_to(as_bytes(given.sums[low:high]), rails.host + 1))
        self._returned = self._return_sums()

    def _return_sums(self) -> Pending:
        rails, given, onward = self._rails, self._operands, self._rails.after is not None
        out, itemsize, summed = given.out, given.out.itemsize, given.sums.nbytes
        arriving = [0] * rails.hosts
        arriving[-1] = out.nbytes
        sending = [0 if onward else numel * itemsize for numel in given.shards]
        sent = summed if onward else summed - out.nbytes
        self._transport.count_payload(sent, (summed if rails.host else 0) + (out.nbytes if onward else 0))
        return self._rail.all_to_all(as_bytes(out), as_bytes(given.sums[: sum(sending)]), (arriving, sending))
