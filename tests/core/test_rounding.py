"""Stochastic rounding is unbiased, and depends on seed, parameter, state, element and step alone."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from zero import StochasticRounding
from zero.core.rounding import WEIGHTS, Stream, round_into

from ..support.plain import assert_same_bits

BF16 = torch.bfloat16
LARGEST = 0x7F7F0000  # the bits in fp32 of the largest number of bf16
INF = 0x7F800000
STEPS = 500
UNLIKELY = 1e-12  # a wrong limit would fail with this probability, if bits were random; they are the same in each run


def fp32(*bits: int) -> Tensor:
    return torch.tensor([number - (1 << 32) if number >> 31 else number for number in bits], dtype=torch.int32).view(
        torch.float32
    )


def limit(count: int) -> float:
    """Return how far a count of heads may be from its mean (Hoeffding, 1963)."""
    return math.sqrt(count * math.log(2 / UNLIKELY) / 2)


def mixed(number: int) -> int:
    """Return the output function of SplitMix64, in Python's integers."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def random_bits(seed: int, parameter: int, name: str, step: int, element: int) -> int:
    digest = hashlib.blake2b(f"{seed},{parameter},{step},{name}".encode(), digest_size=16).digest()
    key, gamma = struct.unpack("<QQ", digest)
    gamma |= 1
    if bin(gamma ^ gamma >> 1).count("1") < 24:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return mixed((key + element // 4 * gamma) % 2**64) >> element % 4 * 16 & 0xFFFF


@given(
    st.integers(-(2**70), 2**70),
    st.integers(0, 10**6),
    st.sampled_from([None, "exp_avg"]),
    st.integers(0, 10**7),
    st.integers(0, 2**40),
)
@example(seed=67, parameter=0, state=None, step=0, begin=0)  # whose gamma changes too seldom
def test_bits_are_those_of_splitmix64(seed: int, parameter: int, state: str | None, step: int, begin: int) -> None:
    """The numbers are halfway between two of bf16 and around, so that every random bit decides one."""
    lower = [0x8000 >> place for place in range(16)] + [1, 0xFFFF, 0x5555]
    values = fp32(*(0x3F800000 + low for low in lower), *(0xBF800000 + low for low in lower))
    found = StochasticRounding(seed).round(values, parameter=parameter, state=state, step=step, begin=begin)
    for number, (value, bf16) in enumerate(
        zip(values.view(torch.int32).tolist(), found.view(torch.int16).tolist(), strict=True)
    ):
        drawn = random_bits(seed, parameter, state or WEIGHTS, step, begin + number)
        assert bf16 % 2**16 == (value % 2**32 + drawn) >> 16


@given(st.integers(0, 2**32))
def test_a_number_becomes_one_of_its_neighbours_or_the_nearest_if_there_is_no_next_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2**32, (4096,), generator=generator)
    edges = [LARGEST - 1, LARGEST, LARGEST + 1, LARGEST + 0x7FFF, LARGEST + 0x8000, INF - 1, INF, INF + 1, 0x7FFFFFFF]
    values = fp32(*drawn.tolist(), *edges, *(edge | 1 << 31 for edge in edges), 0, 1 << 31, 1, 1 << 31 | 1)
    found = StochasticRounding(seed).round(values)
    nearest, nan = values.to(BF16), values.isnan()
    assert torch.equal(found.isnan(), nan)
    raw = values.view(torch.int32)
    beyond = ((raw & 0x7FFFFFFF) >= LARGEST) & ~nan
    assert_same_bits(found[beyond], nearest[beyond])
    inside = ~beyond & ~nan
    up = (found.view(torch.int16).int() - (raw >> 16))[inside]
    assert set(up.tolist()) == {0, 1}
    assert not up[(raw[inside] & 0xFFFF) == 0].any()


@pytest.mark.parametrize("lower", [0x1234, 0x8000])
def test_the_mean_is_the_number_itself(lower: int) -> None:
    """Over the elements of a tensor, over those that share a place in a word, and over the steps of one element."""
    count, share = 1 << 16, lower / 2**16
    for value in fp32(0x40490000 + lower, 0xC0490000 + lower):
        values = value.expand(count)
        up = StochasticRounding(1).round(values).view(torch.int16) != values.view(torch.int32).bitwise_right_shift(16)
        assert abs(int(up.sum()) - share * count) <= limit(count)
        for place in range(4):
            assert abs(int(up[place::4].sum()) - share * count / 4) <= limit(count // 4)
        in_steps = [StochasticRounding(1).round(value[None], step=step) for step in range(STEPS)]
        ups = int((torch.cat(in_steps).view(torch.int16) != value.view(torch.int32).bitwise_right_shift(16)).sum())
        assert abs(ups - share * STEPS) <= limit(STEPS)


@given(st.lists(st.integers(0, 200), max_size=6), st.integers(0, 2**33), st.integers(0, 100))
def test_a_tensor_that_is_cut_has_the_same_bits(sizes: list[int], begin: int, step: int) -> None:
    sizes = [*sizes, 1 << 17]  # more than one block
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(step))
    rounding = StochasticRounding(5)
    whole = rounding.round(values, parameter=3, step=step, state="exp_avg", begin=begin)
    places = itertools.accumulate(sizes, initial=begin)
    parts = [
        rounding.round(part, parameter=3, step=step, state="exp_avg", begin=place)
        for part, place in zip(values.split(sizes), places, strict=False)
    ]
    assert_same_bits(torch.cat([torch.empty(0, dtype=BF16), *parts]), whole)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_elements_are_counted_row_by_row_whatever_the_strides(order: tuple[int, int, int]) -> None:
    whole = torch.randn(5, 7, 6)
    turned = whole.permute(order).contiguous().permute([order.index(n) for n in range(3)])
    expected = StochasticRounding(2).round(whole, parameter=4, step=1)
    assert_same_bits(StochasticRounding(2).round(turned, parameter=4, step=1), expected)
    memory = turned.as_strided((210,), (1,))
    found = torch.empty_strided(turned.shape, turned.stride(), dtype=BF16)
    for low, high in ((0, 33), (33, 97), (97, 210)):
        part = found.as_strided((high - low,), (1,), low)
        round_into(part, memory[low:high], Stream.of(2, 4, WEIGHTS, 1), low, turned.shape, turned.stride())
    assert_same_bits(found, expected)
