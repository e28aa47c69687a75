"""The protocol of an algorithm, for ``collective=`` as a class, and a collective of a backend that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..backend import Pending
from ..messages import PeerError, Tag, Work
from ..transport import Transport, as_a_whole


class Collective(Protocol):
    """An algorithm over a transport. All ranks of the group call each method, with equal bounds and tag.

    All ranks wait for works in the same order, which need not be that of the launches: a wait may return only after
    peers have read this rank's data. A reduce-scatter may be a `StagedWork`.

    ``bounds`` has world_size + 1 entries, ascending from 0 to the number of elements: rank r owns
    ``[bounds[r], bounds[r + 1])``, which may be uneven or empty.
    """

    name: str
    exact: bool
    transport: Transport  # of its messages; the caller also takes memory and makes exchanges there

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        """Add all ranks' contributions to this rank's shard onto ``start`` and put the sum in ``out``.

        ``source``: this rank's contribution to every shard, 1-D. The algorithm may overwrite it until ``wait`` returns.
        ``out``: as long as this rank's shard, in the accumulator's dtype. It may share memory with this rank's own
        shard of ``source``, or be ``start``.
        ``start``: the sum so far, in ``out``'s dtype, or None. The algorithm may overwrite it, too, and reads it only
        in ``wait``; `FoldOnDevices`, which is in no replica, at the launch.
        If `exact` is True, the sum is formed in rank order: ((start + x_0) + x_1) + ...

        The first call of a round must send a header to every other rank before it waits for one, whatever the bounds:
        that is how a rank in `Transport.meet` learns of the round. `Transport.announce_round` does it.
        """

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        """Fill each shard of ``buffer`` with its owner's values. This rank's own shard is the input."""


def all_gather_from(collective: Collective, own: Tensor, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
    """Fill each shard of ``buffer`` with its owner's values. All ranks of ``collective``.

    ``own``: this rank's shard, outside ``buffer`` and of its dtype. It must not change before the wait. An algorithm
    that can read it where it lies has this function as a method.
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


def lost(transport: Transport, tag: Tag, error: PeerError) -> PeerError:
    """Abort after a failed collective of the backend, and return the error to raise.

    The backend does not report which rank failed. A rank that the abort cannot reach may be the one, so the error names
    it. After a time limit in the middle of a collective the error names no rank: gloo then closes connections at will,
    and all the other ranks wait as this one does.
    """
    reason = f"{transport.rank_label}, in {tag.label}: the process group's own collective failed ({error})"
    unreached = transport.abort(reason)
    who = f"; no answer from rank {' or '.join(map(str, unreached))}" if unreached else ""
    return PeerError(reason + who)
