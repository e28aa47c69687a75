"""Ranks that have run out of micro-batches: inside `join` they go on taking part in what the others do.

Knows: what a rank is about to do, told to all before it is done, and what the next update depends on beside gradients.
Does not know: how any of it is done.

    a rank with batches       tell "clip_grad_norm_" - clip - tell "step" - step - tell "zero_grad" - ... - tell nothing
    one without               hear it        - clip - hear it    - step - hear it         - ... - leave

A backward needs no word: who is behind catches up when ranks meet, with nothing to add.
"""

from __future__ import annotations

import json
import numbers
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collectives import Kind, Tag, Transport

Options = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """What a rank is about to do: a method by its name, its arguments, and the options that all ranks must share."""

    name: str
    arguments: dict[str, Any]
    divisor: float
    options: list[Options]

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()


LEAVING = b""
_UNKNOWN = "an object of class"  # what cannot be told


class Turns:
    """The calls of one optimizer inside `join`."""

    def __init__(self, transport: Transport, meet: Callable[[str], object], groups: Sequence[Options]) -> None:
        """``meet``: returns when all ranks are here and have entered the same rounds; ``groups``: the live ones."""
        self._transport, self._meet, self.groups = transport, meet, groups
        self._inside = False  # a call, whose own parts are not told

    @contextmanager
    def taken(self, name: str, arguments: dict[str, Any], divisor: float) -> Iterator[None]:
        """Tell a call, then make it inside. Collective."""
        if self._inside:
            yield
            return
        _check(self._exchange(Call(name, arguments, divisor, options_of(self.groups)).pack()))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def others(self) -> Iterator[Call]:
        """What the ranks that have batches do, call by call, until none has any. Collective."""
        while True:
            told = self._exchange(LEAVING)
            calls = [data for data in told if data != LEAVING]
            if not calls:
                return
            _check(told)
            self._inside = True
            try:
                yield Call(**json.loads(calls[0]))
            finally:
                self._inside = False

    def _exchange(self, data: bytes) -> list[bytes]:
        self._meet("join()")
        return self._transport.exchange(data, Tag(Kind.EXCHANGE, "what comes next, inside join()"))


def _check(told: Sequence[bytes]) -> None:
    """Raise, on every rank alike, where ranks are about to do different things."""
    calls = {rank: json.loads(data) for rank, data in enumerate(told) if data != LEAVING}
    (first, expected), *others = calls.items()
    for rank, call in others:
        if call != expected:
            key = next(key for key in expected if call[key] != expected[key])
            raise RuntimeError(
                f"inside join(), rank {first} calls {expected['name']}() and rank {rank} {call['name']}(), with {key} "
                f"{expected[key]!r} and {call[key]!r}: every rank makes the same calls until it runs out of batches"
            )


def digests_of(groups: Sequence[Options]) -> tuple[int, ...]:
    """CRC-32 of what each param group says."""
    return tuple(zlib.crc32(json.dumps(options, sort_keys=True).encode()) for options in options_of(groups))


def options_of(groups: Sequence[Options]) -> list[Options]:
    """What the param groups say beside their parameters, as JSON knows it."""
    return [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")} for group in groups
    ]


def adopt_options(groups: Sequence[Options], told: Sequence[Options]) -> None:
    """Take over what another rank's param groups say."""
    for group, options in zip(groups, told, strict=True):
        for key, value in options.items():
            known = group.get(key)
            if _plain(known) == value or (isinstance(value, dict) and _UNKNOWN in value):
                continue
            if isinstance(known, Tensor):
                known.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(known, tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()  # host synchronisation: a learning rate on a device, where ranks must agree on it
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str, type(None))):
        return value
    return float(value) if isinstance(value, numbers.Real) else {_UNKNOWN: type(value).__qualname__}
