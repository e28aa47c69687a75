"""Where two sets of parameters first differ, and by how much: nothing is rounded, nothing is overlooked."""

from __future__ import annotations

import io
import math
import struct

import pytest
import torch
from torch import Tensor

from zero.commands.verify.bit_diff import Difference, Run, first_difference, ulps_between
from zero.job import load, save


def from_bits(pattern: int, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return torch.tensor(pattern - (1 << 8 * size if pattern >> (8 * size - 1) else 0), dtype=whole).view(dtype)


@pytest.mark.parametrize(
    ("one", "other", "dtype", "ulps"),
    [
        (0x3F800000, 0x3F800001, torch.float32, 1),  # 1 and its neighbour above
        (0x3F800000, 0x3F7FFFFF, torch.float32, 1),  # and below, across a power of two
        (0xBF800000, 0xBF800003, torch.float32, 3),
        (0x80000000, 0x00000000, torch.float32, 0),  # -0.0 and 0.0
        (0x80000001, 0x00000001, torch.float32, 2),  # the smallest numbers of both signs
        (0x7F7FFFFF, 0x7F800000, torch.float32, 1),  # the largest number and infinity
        (0xFF800000, 0x7F800000, torch.float32, 2 * 0x7F800000),  # both infinities
        (0x7FC00000, 0x3F800000, torch.float32, None),  # NaN and a number
        (0x7FC00000, 0x7FC00001, torch.float32, None),  # two NaNs
        (0x3F80, 0x3F82, torch.bfloat16, 2),
        (0x3C00, 0xBC00, torch.float16, 2 * 0x3C00),  # 1 and -1
        (0x3FF0000000000000, 0x3FF0000000000001, torch.float64, 1),
        (0xFFEFFFFFFFFFFFFF, 0x7FEFFFFFFFFFFFFF, torch.float64, 2 * 0x7FEFFFFFFFFFFFFF),  # beyond 2**63
    ],
)
def test_ulps_are_the_steps_from_one_value_to_the_other(
    one: int, other: int, dtype: torch.dtype, ulps: int | None
) -> None:
    a, b = from_bits(one, dtype), from_bits(other, dtype)
    assert ulps_between(a, b) == ulps_between(b, a) == ulps
    assert ulps_between(a, a) == (None if a.isnan() else 0)
    found = first_difference({"p": a}, {"p": b})
    assert found is not None
    assert (found.parameter, found.index, found.ulps, found.count, found.numel) == ("p", (), ulps, 1, 1)
    assert struct.pack("d", found.plain) == struct.pack("d", float(a))
    assert struct.pack("d", found.other) == struct.pack("d", float(b))
    assert first_difference({"p": a}, {"p": a.clone()}) is None


def model_like() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(5, 7, generator=generator).t(),
        "cut": torch.randn(4, 6, generator=generator)[:, ::2],
        "scalar": torch.randn((), generator=generator),
        "wide": torch.randn(2, 3, 4, generator=generator).double(),
    }


@pytest.mark.parametrize(("name", "index"), [("turned", (2, 1)), ("cut", (3, 2)), ("scalar", ()), ("wide", (1, 0, 3))])
def test_the_first_of_the_elements_that_differ_is_named_by_its_index(name: str, index: tuple[int, ...]) -> None:
    plain, other = model_like(), {key: tensor.contiguous() for key, tensor in model_like().items()}
    assert first_difference(plain, other) is None, "another order in memory is no difference"
    later = list(plain)[list(plain).index(name) + 1 :]
    for key in later:
        other[key] += 1
    other[name][index] += 1
    if name == "turned":
        other[name][6, 4] += 1
    found = first_difference(plain, other)
    assert found is not None
    assert (found.parameter, found.index) == (name, index)
    assert (found.plain, found.other) == (plain[name][index].item(), other[name][index].item())
    assert found.count == 1 + (name == "turned") + sum(plain[key].numel() for key in later)
    assert found.numel == 35 + 12 + 1 + 24


def test_another_model_is_told_and_not_compared() -> None:
    for change, said in (
        ({"cut": torch.zeros(4, 4)}, r"cut is float32 \[4, 3\] in the plain loop and float32 \[4, 4\] here"),
        ({"scalar": torch.zeros((), dtype=torch.bfloat16)}, r"scalar is float32 \[\] .* bfloat16 \[\] here"),
        ({"more": torch.zeros(1)}, r"more is none in the plain loop and float32 \[1\] here"),
    ):
        with pytest.raises(ValueError, match=said + r".*build_model\(\) must build one model"):
            first_difference(model_like(), {**model_like(), **change})


@pytest.mark.parametrize(
    ("plain", "other", "ulps", "said"),
    [
        (0.1, 0.25, 12, "is 0.1 in the plain loop and 0.25 here (12 ulps apart); 1,234 of 5,678 elements differ"),
        (0.0, -0.0, 0, "w[3, 1] is 0 in the plain loop and -0 here (zeros of different sign);"),
        (1.0, math.nan, None, "w[3, 1] is 1 in the plain loop and nan here (one of them is NaN);"),
        (math.nan, math.nan, None, "(NaNs of different bits);"),
        (1.0, 1.00000012, 1, "w[3, 1] is 1 in the plain loop and 1.00000012 here (1 ulp apart);"),
    ],
)
def test_a_difference_in_words_and_as_bytes(plain: float, other: float, ulps: int | None, said: str) -> None:
    difference = Difference("w", (3, 1), "float32", plain, other, ulps, 1234, 5678)
    assert said in str(difference)
    run = Run(2, 3, 4, 5678, (1,), difference)
    assert str(run) == f"stage 2, 3 ranks: DIFFERS after step 4 on rank 1 alone: {difference}"
    save(run, written := io.BytesIO())
    assert repr(load(io.BytesIO(written.getvalue()))) == repr(run)
