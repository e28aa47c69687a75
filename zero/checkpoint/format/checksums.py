"""CRC-32s of the blocks of a file, formed from those of the fragments that ranks have written.

Knows: offsets in one file, and how CRCs of neighbours combine. Does not know: files, tensors, ranks.

    file       | block 0         | block 1         | block 2  |
    fragments  [ rank 0 ][ rank 1 ][ rank 1 ][ rank 0 ][ .... ]     none crosses a border of blocks

A CRC of two neighbours is a function of their CRCs and of the second one's length, so a block's CRC does not depend on
the cuts. The formula is that of zlib's ``crc32_combine``: the first CRC, multiplied by x to the power of 8 times the
length modulo the CRC's polynomial, plus the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BLOCK_BYTES = 4 << 20
_POLYNOMIAL = 0xEDB88320  # of CRC-32, with the bits reversed: bit 31 is the coefficient of x^0
_ONE = 1 << 31
_X_TO_8 = 1 << 23


@dataclass(frozen=True, order=True)
class Fragment:
    """The CRC-32 of the bytes ``[begin, begin + length)`` of a file.

    ``rank``: which rank has written them. ``place``: how many bytes it had written before.
    """

    begin: int
    length: int
    crc32: int
    rank: int = 0
    place: int = 0


def split(begin: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[begin, end)`` between borders of blocks, in order."""
    while begin < end:
        border = min((begin // block_bytes + 1) * block_bytes, end)
        yield begin, border
        begin = border


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two neighbours. ``length``: the bytes of the second one."""
    return _product(_power(length), first) ^ second


def block_sums(fragments: Iterable[Fragment], nbytes: int, block_bytes: int) -> list[int]:
    """Return the CRC-32 of each block of a file of ``nbytes``.

    Raises `ValueError` if the fragments do not cover every byte once, or cross a border of blocks.
    """
    sums: list[int] = []
    end = 0
    for fragment in sorted(fragments):
        if fragment.length == 0:
            continue
        if fragment.begin != end:
            how = "not written" if end < fragment.begin else "written twice"
            raise ValueError(f"bytes {min(end, fragment.begin)} to {max(end, fragment.begin)} were {how}")
        if end % block_bytes == 0:
            sums.append(fragment.crc32)
        else:
            sums[-1] = combine(sums[-1], fragment.crc32, fragment.length)
        end += fragment.length
        if (end - 1) // block_bytes != fragment.begin // block_bytes:
            raise ValueError(f"the fragment at byte {fragment.begin} crosses a border of blocks")
    if end != nbytes:
        raise ValueError(f"{end} bytes were written instead of {nbytes}")
    return sums


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _powers() -> tuple[int, ...]:
    """Return x to the powers of 8, 16, 32, ..., modulo the CRC's polynomial: one for each bit of a length."""
    found = [_X_TO_8]
    for _ in range(62):
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_POWERS = _powers()


def _power(length: int) -> int:
    """Return x to the power of ``8 * length``, modulo the CRC's polynomial."""
    result = _ONE
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            result = _product(result, _POWERS[bit])
    return result
