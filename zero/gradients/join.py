"""The protocol of `join`: ranks that have run out of micro-batches go on taking part in the collectives of the others.

Knows: the calls that are broadcast before each rank makes them, and the options, other than gradients, on which the
next update depends. Does not know: how a call is carried out.

    rank with batches       broadcast "clip_grad_norm_" - clip - broadcast "step" - step - ... - broadcast nothing
    rank without            receive                     - clip - receive          - step - ... - end

A backward is not broadcast: a rank that entered fewer rounds catches up in the next barrier, with empty contributions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives import Transport

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
            raise RuntimeError(
                f"inside join(), rank {first} calls {expected['name']}() and rank {rank} {call['name']}(), with {key} "
                f"{expected[key]!r} and {call[key]!r}: every rank makes the same calls until it runs out of batches"
            )


def digests_of(groups: Sequence[Options], keys: Set[str]) -> dict[str, int]:
    """Return for each key the CRC-32 of its values in all param groups."""
    texts = {key: json.dumps([_plain(group.get(key)) for group in groups]) for key in sorted(keys)}
    return {key: zlib.crc32(text.encode()) for key, text in texts.items()}


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
