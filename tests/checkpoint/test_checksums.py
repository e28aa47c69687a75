"""CRC-32s of blocks are those of the bytes, whatever fragments they were formed from."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.format.checksums import Fragment, block_sums, combine, split

BLOCK = 100
DATA = bytes(range(250))
MORE = settings(max_examples=10 * settings().max_examples)


def fragments_of(data: bytes, cuts: list[int], block_bytes: int) -> list[Fragment]:
    """Return the fragments of a file that is cut at these bytes, and between its blocks."""
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [
        Fragment(low, high - low, zlib.crc32(data[low:high]))
        for begin, end in itertools.pairwise(bounds)
        for low, high in split(begin, end, block_bytes)
    ]


@given(st.binary(max_size=200), st.binary(max_size=200))
@MORE
def test_the_checksum_of_two_neighbours_is_that_of_their_bytes(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1 << 12, (4 << 20) - 1, 4 << 20, 5 << 20])
def test_long_neighbours_combine(length: int) -> None:
    first, second = b"first", bytes(length)
    assert combine(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)


@given(
    st.binary(max_size=300),
    st.lists(st.integers(1, 299), max_size=6),
    st.sampled_from([1, 7, 64, 100, 299, 300, 4096]),
    st.randoms(use_true_random=False),
)
@MORE
def test_the_checksums_of_blocks_do_not_depend_on_the_cuts(
    data: bytes, cuts: list[int], block_bytes: int, order: random.Random
) -> None:
    fragments = fragments_of(data, cuts, block_bytes)
    order.shuffle(fragments)
    expected = [zlib.crc32(data[begin : begin + block_bytes]) for begin in range(0, len(data), block_bytes)]
    assert block_sums(fragments, len(data), block_bytes) == expected


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_the_parts_of_a_range_tile_it_and_cross_no_border(begin: int, length: int, block_bytes: int) -> None:
    parts = list(split(begin, begin + length, block_bytes))
    assert [byte for low, high in parts for byte in range(low, high)] == list(range(begin, begin + length))
    assert all(low < high and low // block_bytes == (high - 1) // block_bytes for low, high in parts)


def test_fragments_without_bytes_change_nothing() -> None:
    fragments = [*fragments_of(DATA, [30], BLOCK), Fragment(30, 0, 0), Fragment(250, 0, 0)]
    assert block_sums(fragments, 250, BLOCK) == block_sums(fragments_of(DATA, [], BLOCK), 250, BLOCK)


def test_what_does_not_tile_the_file_is_an_error_that_names_the_bytes() -> None:
    fragments = fragments_of(DATA, [30, 150], BLOCK)  # 0 30 100 150 200 250
    with pytest.raises(ValueError, match="bytes 30 to 100 were not written"):
        block_sums([fragments[0], *fragments[2:]], 250, BLOCK)
    with pytest.raises(ValueError, match="bytes 0 to 30 were not written"):
        block_sums(fragments[1:], 250, BLOCK)
    with pytest.raises(ValueError, match="bytes 30 to 100 were written twice"):
        block_sums([*fragments, fragments[1]], 250, BLOCK)
    with pytest.raises(ValueError, match="bytes 29 to 30 were written twice"):
        block_sums([fragments[0], replace(fragments[1], begin=29), *fragments[2:]], 250, BLOCK)
    with pytest.raises(ValueError, match="200 bytes were written instead of 250"):
        block_sums(fragments[:-1], 250, BLOCK)
    with pytest.raises(ValueError, match="250 bytes were written instead of 249"):
        block_sums(fragments, 249, BLOCK)
    with pytest.raises(ValueError, match="0 bytes were written instead of 1"):
        block_sums([], 1, BLOCK)


@pytest.mark.parametrize(("begin", "length"), [(0, 250), (0, 101), (30, 100)])
def test_a_fragment_across_a_border_of_blocks_is_an_error(begin: int, length: int) -> None:
    bounds = [(0, begin), (begin, begin + length), (begin + length, 250)]
    fragments = [Fragment(low, high - low, zlib.crc32(DATA[low:high])) for low, high in bounds]
    with pytest.raises(ValueError, match=f"the fragment at byte {begin} crosses a border"):
        block_sums(fragments, 250, BLOCK)
