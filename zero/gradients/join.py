"""Ranks that have run out of micro-batches: inside `join` they go on taking part in what the others do.

Knows: what a rank is about to do, told to all before it is done, and what the next update depends on beside gradients.
Does not know: how any of it is done.

    a rank with batches       tell "clip_grad_norm_" - clip - tell "step" - step - tell "zero_grad" - ... - tell nothing
    one without               hear it        - clip - hear it    - step - hear it         - ... - leave

A backward needs no word: who is behind catches up when ranks meet, with nothing to add.
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
FAILED = b"!"  # before an error's text


class JoinProtocol:
    """The calls of one optimizer inside `join`."""

    def __init__(self, transport: Transport, meet: Callable[[str], object], groups: Sequence[Options]) -> None:
        """``meet``: returns when all ranks are here and have entered the same rounds; ``groups``: the live ones."""
        self._transport, self._meet, self._groups = transport, meet, groups
        self._inside = False  # a call, whose own parts are not told
        self._over = False  # a rank failed, and all know

    @contextmanager
    def broadcast(self, name: str, arguments: dict[str, Any], divisor: float) -> Iterator[None]:
        """Tell a call, then make it inside. Collective."""
        if self._inside:
            yield
            return
        self._compare(self._exchange(Call(name, arguments, divisor, options_of(self._groups)).pack()))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def others(self) -> Iterator[Call]:
        """What the ranks that have batches do, call by call, until none has any. Collective."""
        while True:
            told = self._exchange(LEAVING)
            self._compare(told)
            calls = [data for data in told if data != LEAVING]
            if not calls:
                return
            self._inside = True
            try:
                yield Call(**json.loads(calls[0]))
            finally:
                self._inside = False

    def tell_failure(self, error: Exception) -> None:
        """An error ends the block on this rank: the others, who wait to be told something, get it, too. Collective,
        unless all know."""
        if not self._over and not self._transport.broken:
            self._over = True
            self._exchange(FAILED + f"{type(error).__name__}: {error}".encode())

    def _compare(self, told: Sequence[bytes]) -> None:
        try:
            _check(told)
        except RuntimeError:
            self._over = True
            raise

    def _exchange(self, data: bytes) -> list[bytes]:
        self._meet("join()")
        return self._transport.exchange(data, Tag(Kind.EXCHANGE, "what comes next, inside join()"))


def _check(told: Sequence[bytes]) -> None:
    """Raise, on every rank alike, where ranks are about to do different things."""
    for rank, data in enumerate(told):
        if data.startswith(FAILED):
            raise RuntimeError(f"rank {rank} left join() with an error: {data.removeprefix(FAILED).decode()}")
    calls = {rank: json.loads(data) for rank, data in enumerate(told) if data != LEAVING}
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
    """Of each key, CRC-32 of what the param groups say of it."""
    told = {key: json.dumps([_plain(group.get(key)) for group in groups]) for key in sorted(keys)}
    return {key: zlib.crc32(text.encode()) for key, text in told.items()}


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
            if key in group and _plain(known) == value:
                continue
            found = _rebuilt(value)
            if isinstance(known, Tensor) and isinstance(found, Tensor) and known.dtype is found.dtype:
                known.copy_(found)  # the same tensor, which others may hold, too
            elif found is not _UNKNOWN:
                group[key] = found


_UNKNOWN = object()  # what cannot be told


def _plain(value: Any) -> Any:
    """A value with its kind, as JSON knows it: an update with a number in another dtype has other bits."""
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
