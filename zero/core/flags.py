"""Flags in a `bytearray`: one byte, 0 or 1, for each slot of a bucket. Nothing here loops over flags in Python.

Knows: bytes. Does not know: what a flag means.
"""

from __future__ import annotations

from collections.abc import Iterator


def either(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` or in ``other``, which are equally long."""
    return _flags(_number(one) | _number(other), len(one))


def without(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` and not in ``other``, which are equally long."""
    return _flags(_number(one) & ~_number(other), len(one))


def where(flags: bytes | bytearray) -> Iterator[int]:
    """Yield the places of the flags that are set, in order."""
    place = flags.find(1)
    while place >= 0:
        yield place
        place = flags.find(1, place + 1)


def _number(flags: bytes | bytearray) -> int:
    return int.from_bytes(flags, "little")


def _flags(number: int, length: int) -> bytearray:
    return bytearray(number.to_bytes(length, "little"))
