"""The protocol of an algorithm, for ``collective=`` as a class, and a collective of a backend that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..backend import Pending
from ..launches.ledger import Launches, Ledger
from ..messages import Chain, CollectiveError, Kind, PeerError, Tag, Work
from ..transport import Transport, as_a_whole


class Collective(Protocol):
    """The protocol of an algorithm on a transport. All ranks call each method, with equal ``bounds`` and ``tag``.

    All ranks wait for works in the same order, which may differ from the order of the launches. A wait may return only
    after peers have read this rank's data, and raises `CollectiveError` if the collective failed. A reduce-scatter may
    return a `StagedWork`. Tensors are 1-D, contiguous, on one device, and not changed before the wait.

    ``bounds`` has world_size + 1 entries, ascending from 0 to the number of elements. Rank r owns
    ``[bounds[r], bounds[r + 1])``. Shards may be uneven or empty.
    """

    name: str
    """The name of the algorithm in messages and descriptions."""
    exact: bool
    """Whether sums are formed in rank order, so that their bits do not depend on the number of messages or hosts."""
    transport: Transport
    """The transport of the algorithm's messages; the caller also uses it for memory and exchanges."""

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """Add all ranks' contributions to this rank's shard onto ``start``, and store the sum in ``out``.

        Args:
            source: this rank's contribution to every shard. The algorithm may overwrite it until ``wait`` returns.
            bounds: see `Collective`.
            out: as long as this rank's shard, in the accumulator's dtype. It may share memory with this rank's own
                shard of ``source``, or be ``start``.
            start: the sum so far, in ``out``'s dtype, or None. The algorithm may overwrite it. It is read in ``wait``;
                if the algorithm adds on a side stream (`aside.AddsAside`; never in a replica), at the launch.
            tag: identifies the collective.

        If `exact` is True, the sum is formed in rank order: ((start + x_0) + x_1) + ...

        The first call of a round must send a header to every other rank before it waits for one, for any ``bounds``. A
        rank in `Transport.meet` learns of the round by this header. `Transport.announce_round` sends it.
        """

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """Fill each shard of ``buffer`` (1-D, any dtype) with its owner's values. This rank's shard is the input."""


def all_gather_from(collective: Collective, own: Tensor, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
    """Fill each shard of ``buffer`` with its owner's values. All ranks of ``collective`` call it.

    ``own``: this rank's shard, outside of ``buffer`` and in its dtype. It must not change before the wait. If an
    algorithm can read ``own`` in place, it has this function as a method; else ``own`` is copied into ``buffer``.
    """
    from_elsewhere: Callable[..., Work] | None = getattr(collective, "all_gather_from", None)
    if from_elsewhere is not None:  # a protocol that is checked at run time would take longer than the launch
        return from_elsewhere(own, buffer, bounds, tag=tag)
    rank = collective.transport.rank
    buffer[bounds[rank] : bounds[rank + 1]].copy_(own)
    return collective.all_gather(buffer, bounds, tag=tag)


ADDING_UP = "while adding up"  # half a sum is no sum


class Running:
    """A collective of the backend, and the work that is left when its bytes are here."""

    def __init__(self, transport: Transport, tag: Tag, pending: Pending | None, finish: Callable[[], None]) -> None:
        self._transport, self._tag, self._pending = transport, tag, pending
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        t = self._transport
        t.check()
        if self._pending is not None:
            try:
                self._pending.wait(t.timeout)
            except PeerError as error:
                raise lost(t, self._tag, error) from error
        finish, self._finish, self._pending = self._finish, None, None
        with as_a_whole(t, ADDING_UP):
            finish()


class Several:
    """Transfers of the backend that are under way together."""

    def __init__(self, pendings: Sequence[Pending]) -> None:
        self._pendings = pendings

    def wait(self, timeout: float) -> None:
        for pending in self._pendings:
            pending.wait(timeout)

    def ended(self) -> bool:
        """See `DevicePending`."""
        return all(has_ended(pending) for pending in self._pendings)


def has_ended(pending: Pending) -> bool:
    """Return what `DevicePending` says; True if it is not one."""
    ended: Callable[[], bool] | None = getattr(pending, "ended", None)
    return ended is None or ended()


class _Noted:
    """A launch of a ledger: a stream waits for it when its rank does."""

    def __init__(self, pending: Pending, ledger: Ledger, number: int) -> None:
        self._pending, self._ledger, self._number = pending, ledger, number

    def wait(self, timeout: float) -> None:
        self._ledger.awaited(self._number, partial(has_ended, self._pending))
        self._pending.wait(timeout)


@dataclass(frozen=True)
class Launched:
    """A collective of the backend that is under way. ``announced``: the headers that are read when it is awaited."""

    announced: Work
    running: Running

    def wait(self) -> None:
        self.announced.wait()
        self.running.wait()


def launched(
    transport: Transport,
    tag: Tag,
    device: torch.device,
    call: Callable[[], Pending | None],
    finish: Callable[[], None],
) -> Launched:
    """Launch a collective of the backend among all ranks of a transport. ``finish`` runs when it is done.

    It begins when all ranks have sent its header. Where a ledger notes launches on devices, only a gate does so. There
    the first reduction of a round sends a header that is read when it is awaited: `Transport.meet` relies on it.
    ``tag``: its digest is that of all that the ranks must have in common.
    """
    launches = transport.launches if transport.backend.stays_on(device) else None
    if launches is None:
        transport.announce(tag).wait()
        return Launched(Chain(()), begun(transport, tag, call, finish))
    announced: Work = Chain(())
    if launches.is_gate():
        launches.pass_gate(tag, transport.announce(tag).wait)
    elif tag.kind is Kind.REDUCE_SCATTER:
        announced = _Waited(transport.announce_round(tag), launches, tag)
    return Launched(announced, begun(transport, tag, partial(noted, launches, tag, call), finish))


def noted(launches: Launches, tag: Tag, call: Callable[[], Pending | None]) -> Pending | None:
    """Launch a collective that a ledger notes."""
    number, pending = launches.ledger.add(tag), call()
    return None if pending is None else _Noted(pending, launches.ledger, number)


class _Waited:
    """A wait for the headers of all ranks, of which the sentinel knows."""

    def __init__(self, announced: Work, launches: Launches, tag: Tag) -> None:
        self._announced, self._launches, self._tag = announced, launches, tag

    def wait(self) -> None:
        with self._launches.waiting(self._tag):
            self._announced.wait()


def begun(transport: Transport, tag: Tag, call: Callable[[], Pending | None], finish: Callable[[], None]) -> Running:
    """Begin a collective of the backend that the other ranks have begun, or will. ``finish`` runs when it is done."""
    with as_a_whole(transport, f"in {tag.label}"):
        try:
            pending = call()
        except PeerError as error:
            raise lost(transport, tag, error) from error
    return Running(transport, tag, pending, finish)


def nothing() -> None:
    """The end of a collective whose bytes are all that is wanted."""


def lost(transport: Transport, tag: Tag, error: PeerError) -> CollectiveError:
    """Abort after a failed collective of the backend, and return the error to raise.

    The backend does not report which rank failed. A rank that the abort cannot reach may be the one, so the error names
    it. After a time limit in the middle of a collective the error names no rank: gloo then closes connections at will,
    and all the other ranks wait as this one does.
    """
    reason = f"{transport.rank_label}, in {tag.label}: the process group's own collective failed ({error})"
    unreached = transport.abort(reason)
    found = None if transport.launches is None else transport.launches.take_verdict()
    if found is not None:
        return found
    who = f"; no answer from rank {' or '.join(map(str, unreached))}" if unreached else ""
    return PeerError(reason + who)
