"""Flags in a `bytearray`: one byte, 0 or 1, for each slot of a bucket. Nothing here loops over flags in Python.

Knows: bytes. Does not know: what a flag means.
"""

from __future__ import annotations

import itertools


def either(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` or in ``other``, which are equally long."""
    return _flags(_number(one) | _number(other), len(one))


def without(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` and not in ``other``, which are equally long."""
    return _flags(_number(one) & ~_number(other), len(one))


def where(flags: bytes | bytearray) -> list[int]:
    """Return the places of the flags that are set, in order."""
    return list(itertools.compress(range(len(flags)), flags))


def _number(flags: bytes | bytearray) -> int:
    return int.from_bytes(flags, "little")


def _flags(number: int, length: int) -> bytearray:
    return bytearray(number.to_bytes(length, "little"))
