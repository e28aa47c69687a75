"""Agreement of all ranks before a call changes anything: a meeting whose messages are the ranks' records.

And the protocol of `join`: ranks that have run out of micro-batches go on taking part in the collectives of the others.

    rank with batches       broadcast "clip_grad_norm_" - clip - broadcast "step" - step - ... - broadcast nothing
    rank without            receive                     - clip - receive          - step - ... - end

A backward is not broadcast: a rank that entered fewer rounds catches up in the next barrier, with empty contributions.

Knows: the fields of a record and how they compare, the numbers of meetings, the calls that are broadcast, and the
options on which the next update depends. Does not know: how a message is sent or a call is carried out.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives import Kind, Tag, Transport
from collectives.launches.ledger import compare

from ..runtime.joining import SAME_UNITS, UnitOrder

NO_FACTS: dict[str, Any] = {}  # never changed
LONGEST_REPORT = 500  # characters: reports travel in every record


class Record(NamedTuple):
    """The record of one rank.

    Attributes:
        divisor: of the sums.
        phase: the phase of the gradients, see `Phase`.
        pending: indices of the buckets for which this rank has a contribution that was not reduced.
        used: one byte, 0 or 1, per parameter in the layout's order: whether it was used.
        trainable: likewise, whether it is trainable.
        error: an error that this rank found; every rank raises it.
        scale: the loss scale, if gradients are being unscaled.
        options: a digest of each option of the param groups, if a step will use them.
        attachment: for a clip, that this rank could clip on the device, or else its part of the gradient norm, if the
            gradients are means already; or the message of a save.
        reports: of `Agreement.report`.
        order: of the units that this rank has used beside its training since the last agreement, as a digest.
        launched: how many collectives this rank has launched on devices, and a digest of them; None: all were agreed
            on one by one.
        gathered: the divisor of the means that were gathered while a backward ran; None if none are right.
        unusable: why no call may use the gradients; None if one may.
    """

    divisor: float
    phase: str
    pending: tuple[int, ...]
    used: bytes
    trainable: bytes
    error: str | None = None
    scale: float | None = None
    options: Mapping[str, int] = NO_FACTS
    attachment: bytes = b""
    reports: Mapping[str, str] = NO_FACTS
    order: int = 0
    launched: tuple[int, int] | None = None
    gathered: float | None = None
    unusable: str | None = None

    def pack(self) -> bytes:
        head = {
            "parameters": len(self.used),
            "divisor": float(self.divisor).hex(),
            "scale": self.scale,
            "options": self.options,
            "phase": self.phase,
            "pending": self.pending,
            "error": self.error,
            "reports": self.reports,
        }
        if self.order:
            head["order"] = self.order
        if self.launched is not None:
            head["launched"] = self.launched
        if self.gathered is not None:
            head["gathered"] = self.gathered
        if self.unusable is not None:
            head["unusable"] = self.unusable
        return b"\0".join([json.dumps(head).encode(), self.used + self.trainable + self.attachment])

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        head, _, rest = data.partition(b"\0")
        fields = json.loads(head)
        count, divisor, pending = fields.pop("parameters"), fields.pop("divisor"), fields.pop("pending")
        launched = fields.pop("launched", None)
        return cls(
            divisor=float.fromhex(divisor),
            pending=tuple(pending),
            used=rest[:count],
            trainable=rest[count : 2 * count],
            attachment=rest[2 * count :],
            launched=None if launched is None else tuple(launched),
            **fields,
        )

    @classmethod
    def unpack_all(cls, messages: Sequence[bytes]) -> list[Record]:
        """Return the records of all ranks. Equal messages, which ranks that agree mostly send, give one object."""
        found = {data: cls.unpack(data) for data in set(messages)}
        return [found[data] for data in messages]


class Agreement:
    """The meetings of the ranks of one optimizer."""

    def __init__(self, transport: Transport, sharing: int, unit_order: UnitOrder) -> None:
        """``sharing``: how many neighbouring ranks share one copy of what the stage shards; ``unit_order``: of the
        units that this rank uses beside its training."""
        self._transport, self._sharing = transport, sharing
        self._unit_order = unit_order
        self._warned = False  # of orders that differ
        self._own_reports: dict[str, str] = {}
        self.number = 0  # of the last meeting
        self.reports: list[Mapping[str, str]] = [NO_FACTS] * transport.world_size  # by rank, of the last agreement

    def report(self, name: str, text: str | None) -> None:
        """Let all ranks have a short text in `reports` after each further agreement; None withdraws it. Local.

        Agreements are what every clip, step and check of the replicas begins with. A text is cut after
        `LONGEST_REPORT` characters.
        """
        if text is None:
            self._own_reports.pop(name, None)
        else:
            self._own_reports[name] = text[:LONGEST_REPORT]

    def meet(
        self, purpose: str, rounds: int, catch_up: Callable[[], None], message: Callable[[], bytes]
    ) -> list[bytes]:
        """Return the messages of all ranks when all have entered the same rounds; see `Transport.meet`. Collective.

        ``purpose``: the call that errors name. ``rounds``: the number of rounds that this rank has entered.
        """
        self.number += 1
        return self._transport.meet(Tag(Kind.MEET, purpose, rounds, self.number), catch_up, message)

    def agree(
        self,
        purpose: str,
        rounds: int,
        catch_up: Callable[[], None],
        record: Callable[[], Record],
        name: Callable[[int], str],
    ) -> list[Record]:
        """Return the records of all ranks if they agree. Collective; otherwise `check` raises the same error on every
        rank. ``record``: is called again after each round that this rank catches up."""
        also: dict[str, Any] = {"reports": dict(self._own_reports), "order": self._unit_order.take()}
        messages = self.meet(purpose, rounds, catch_up, lambda: record()._replace(**also).pack())
        records = Record.unpack_all(messages)
        self.reports = [record.reports for record in records]
        if all(record.error is None for record in records):
            self.compare_launches(records)
        check(records, purpose, name)
        self._compare_orders([record.order for record in records], purpose)
        return records

    def compare_launches(self, records: Sequence[Record]) -> None:
        """Raise `MismatchError` on every rank, and close the group, if ranks that share a copy have launched different
        collectives on devices. Collective. ``records``: of all ranks, of one meeting."""
        launches, blocks = self._transport.launches, range(0, len(records), self._sharing)
        of_block = [{record.launched for record in records[first : first + self._sharing]} for first in blocks]
        if launches is None or all(len(states) == 1 for states in of_block):
            return
        told = self._transport.exchange(
            json.dumps(launches.ledger.history()).encode(), Tag(Kind.EXCHANGE, "what was launched")
        )
        found = compare([json.loads(data) for data in told], self._sharing, launches.advice)
        assert found is not None, "records of ranks that have launched the same are equal"
        error = found.error(self._transport.rank_label)
        self._transport.abort(str(error))
        raise error

    def _compare_orders(self, orders: Sequence[int], purpose: str) -> None:
        """Warn, once and on rank 0, if ranks that share a copy have used other units beside their training."""
        for rank, order in enumerate(orders):
            first = rank - rank % self._sharing
            if order != orders[first] and not self._warned:
                self._warned = True
                if self._transport.rank == 0:
                    warnings.warn(
                        f"before {purpose}, ranks {first} and {rank} have run different forwards without gradients "
                        "or gathered() different modules: did one rank alone evaluate, generate or save? These share "
                        "memory, and may. Where units are gathered from other ranks it is an error (rehearse that with "
                        f"collective='pairwise'): {SAME_UNITS}",
                        RuntimeWarning,
                        stacklevel=2,
                    )


def check_usable(purpose: str, records: Sequence[Record]) -> None:
    """Raise `RuntimeError` if a call may not use the gradients of a rank; the same on every rank."""
    for rank, record in enumerate(records):
        if record.unusable is not None:
            raise RuntimeError(f"{purpose} on rank {rank}: {record.unusable}")


def check(records: Sequence[Record], purpose: str, name: Callable[[int], str]) -> None:
    """Raise the error that a rank found, or `ValueError` or `RuntimeError` if the records differ.

    ``records`` are those of all ranks, in rank order, so that every rank raises the same error. ``purpose``: the call
    that errors name. ``name``: returns the name of a parameter by its index. ``pending`` and ``used`` may differ.
    """
    for rank, record in enumerate(records):
        if record.error is not None:
            raise RuntimeError(f"rank {rank}: {record.error}")
    first = records[0]
    for rank, record in enumerate(records):
        if record is first:
            continue
        if record.divisor != first.divisor:
            raise ValueError(
                f"{purpose}: optimizer.divisor is {first.divisor:g} on rank 0, but {record.divisor:g} on rank {rank}: "
                "it must be equal on all ranks"
            )
        if record.scale != first.scale:
            raise ValueError(
                f"{purpose}: the loss scale is {first.scale} on rank 0, but {record.scale} on rank {rank}: give every "
                "rank's GradScaler the same arguments, and update it on every rank alike"
            )
        for key, ours in first.options.items():
            if record.options.get(key, ours) != ours:
                raise ValueError(
                    f"{purpose}: option {key!r} of the param groups differs between rank 0 and rank {rank}: change "
                    "options, and step schedulers, on every rank alike"
                )
        if record.phase != first.phase:
            raise RuntimeError(
                f"{purpose}: the gradients of rank 0 are {first.phase}, those of rank {rank} {record.phase}: clip, "
                "step and clear gradients on every rank alike"
            )
        if record.trainable != first.trainable:
            pairs = enumerate(zip(record.trainable, first.trainable, strict=True))
            index = next(i for i, (theirs, ours) in pairs if theirs != ours)
            state = ("frozen", "trainable")
            raise RuntimeError(
                f"{purpose}: {name(index)} is {state[first.trainable[index]]} on rank 0, but "
                f"{state[record.trainable[index]]} on rank {rank}: freeze and unfreeze on every rank alike"
            )


Options = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call that a rank is about to make: a method's name, its arguments, the divisor, and the param groups' options.

    All ranks must make an equal call.
    """

    name: str
    arguments: dict[str, Any]
    divisor: float
    options: list[Options]

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()


LEAVING = b""
FAILED = b"!"  # before an error's text


class JoinProtocol:
    """Broadcasts the calls of one optimizer inside `join`."""

    def __init__(
        self, transport: Transport, meet: Callable[[str, bytes], list[bytes]], groups: Sequence[Options]
    ) -> None:
        """Create the protocol.

        ``meet``: returns every rank's bytes when all ranks have reached it and have entered the same rounds.
        ``groups``: the param groups themselves, not a copy.
        """
        self._transport, self._meet, self._groups = transport, meet, groups
        self._inside = False  # inside a call, whose nested calls are not broadcast
        self._over = False  # a rank failed, and every rank has that error

    @contextmanager
    def broadcast(self, name: str, arguments: dict[str, Any], divisor: float) -> Iterator[None]:
        """Broadcast a call; the caller then makes it inside the block. Collective.

        Raises `RuntimeError` on every rank if the ranks are about to make different calls, or if one has failed.
        """
        if self._inside:
            yield
            return
        self._compare(self._meet("join()", Call(name, arguments, divisor, options_of(self._groups)).pack()))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def others(self) -> Iterator[Call]:
        """Yield the calls of the ranks that have batches, until none has any. Collective; for ranks without batches."""
        while True:
            messages = self._meet("join()", LEAVING)
            self._compare(messages)
            calls = [data for data in messages if data != LEAVING]
            if not calls:
                return
            self._inside = True
            try:
                yield Call(**json.loads(calls[0]))
            finally:
                self._inside = False

    def report_failure(self, error: Exception) -> None:
        """Send the error that ended this rank's `join` block to the other ranks, which wait for its next call.

        Collective; does nothing if the ranks have an error already.
        """
        if not self._over and not self._transport.broken:
            self._over = True
            self._meet("join()", FAILED + f"{type(error).__name__}: {error}".encode())

    def _compare(self, messages: Sequence[bytes]) -> None:
        try:
            _check(messages)
        except RuntimeError:
            self._over = True
            raise


def _check(messages: Sequence[bytes]) -> None:
    """Raise `RuntimeError`, the same on every rank, if a rank failed or if the ranks' calls differ."""
    for rank, data in enumerate(messages):
        if data.startswith(FAILED):
            raise RuntimeError(f"rank {rank} left join() with an error: {data.removeprefix(FAILED).decode()}")
    calls = {rank: json.loads(data) for rank, data in enumerate(messages) if data != LEAVING}
    if not calls:
        return
    (first, expected), *others = calls.items()
    for rank, call in others:
        if call != expected:
            key = next(key for key in expected if call[key] != expected[key])
            units = f". At stage 3 {SAME_UNITS}" if "gather" in (expected["name"], call["name"]) else ""
            raise RuntimeError(
                f"inside join(), rank {first} calls {expected['name']}() and rank {rank} {call['name']}(), with {key} "
                f"{expected[key]!r} and {call[key]!r}: every rank makes the same calls until it runs out of batches"
                f"{units}"
            )


def digests_of(groups: Sequence[Options], keys: Set[str]) -> dict[str, int]:
    """Return for each key the CRC-32 of its values in all param groups."""
    return {key: zlib.crc32(repr([_plain(group.get(key)) for group in groups]).encode()) for key in sorted(keys)}


def options_of(groups: Sequence[Options]) -> list[Options]:
    """Return the options of each param group, without its parameters, as plain data for JSON."""
    return [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")} for group in groups
    ]


def adopt_options(groups: Sequence[Options], others: Sequence[Options]) -> None:
    """Set the options of ``groups`` to ``others``, those of another rank. Values that cannot be sent
    stay as they are."""
    for group, options in zip(groups, others, strict=True):
        for key, value in options.items():
            known = group.get(key)
            if key in group and _plain(known) == value:
                continue
            found = _rebuilt(value)
            if isinstance(known, Tensor) and isinstance(found, Tensor) and known.dtype is found.dtype:
                known.copy_(found)  # the same tensor, which others may hold, too
            elif found is not _UNKNOWN:
                group[key] = found


_UNKNOWN = object()  # a value that cannot be sent


def _plain(value: Any) -> Any:
    """Return a value as plain data for JSON, with its type: an update with a number of another dtype has other bits."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return {"numpy": value.dtype.str, "value": value.tolist()}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Tensor):
        found = value.tolist()  # host synchronisation: a learning rate on a device, on which ranks must agree
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": found}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(item) for item in value]}
    return {"object": type(value).__qualname__}


def _rebuilt(plain: Any) -> Any:
    match plain:
        case {"tensor": name, "value": value}:
            return torch.tensor(value, dtype=getattr(torch, name), device="cpu")
        case {"numpy": name, "value": value}:
            import numpy as np

            return np.asarray(value, name)[()]
        case {"tuple": items}:
            return tuple(_rebuilt(item) for item in items)
        case {"list": items}:
            return [_rebuilt(item) for item in items]
        case {"object": _}:
            return _UNKNOWN
        case _:
            return plain
