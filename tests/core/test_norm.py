"""The norm has the same bits for every cut, order and grouping, and those of an exact oracle."""

from __future__ import annotations

import math
import random
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero.core.norm import PowerSum

from ..support.errors import assert_in_order, error_of
from ..support.rows import placed
from .spread import DTYPES, NORM_TYPES, bits, block_of, cut, widely_spread

# Around every length at which the code changes: a block, a tile, a piece that is read in place, a chunk.
LENGTHS = (0, 1, 15, 16, 17, 64, 1000, 4095, 4096, 4097, 32767, 32768, 40000, 65536, 65537, 140003)
UNIT = Fraction(1, 1 << 1074)
POWERS: dict[float, Callable[[float], float]] = {
    1.0: abs,
    2.0: lambda value: value * value,
    3.0: lambda value: abs(value) * (value * value),
}
quick = settings(max_examples=50)


def block_sum(powers: list[float]) -> float:
    """Add up in the fixed tree: lane j + lane j + half, until one is left."""
    while len(powers) > 1:
        half = len(powers) // 2
        powers = [powers[lane] + powers[lane + half] for lane in range(half)]
    return powers[0]


def oracle(parameters: list[Tensor], norm_type: float) -> PowerSum:
    """Return the partial over whole 1-D ``parameters``, block by block, in Python's floats, fractions and integers."""
    sums: list[float] = []
    for parameter in parameters:
        powers = [POWERS[norm_type](value) for value in parameter.tolist()]
        block = block_of(parameter.dtype)
        powers += [0.0] * (-len(powers) % block)
        sums += [block_sum(powers[start : start + block]) for start in range(0, len(powers), block)]
    units = sum((Fraction(value) for value in sums if math.isfinite(value)), Fraction()) / UNIT
    assert units.denominator == 1
    return PowerSum(norm_type, units.numerator, any(map(math.isinf, sums)), any(map(math.isnan, sums)))


@given(seed=st.integers(0, 2**32 - 1), norm_type=st.sampled_from(NORM_TYPES))
@quick
def test_no_cut_no_order_and_no_grouping_changes_the_partial(seed: int, norm_type: float) -> None:
    rng = random.Random(seed)
    parameters = [widely_spread(rng.choice(LENGTHS), rng.choice(DTYPES), rng) for _ in range(rng.randrange(1, 4))]
    whole = PowerSum.of(parameters, norm_type)
    pieces = [piece for parameter in parameters for piece in cut(parameter, rng)]
    rng.shuffle(pieces)
    ranks: list[list[Tensor]] = [[] for _ in range(rng.randrange(1, 5))]
    for piece in pieces:
        rng.choice(ranks).append(piece)
    partials = [PowerSum.of(iter(owned), norm_type) for owned in ranks]
    while len(partials) > 1:  # any tree of merges
        rng.shuffle(partials)
        partials.append(partials.pop().merge(partials.pop()))
    assert partials[0].to_bytes() == whole.to_bytes()


@given(
    values=st.lists(st.lists(st.floats(), max_size=40), max_size=3),
    norm_type=st.sampled_from([*POWERS, math.inf]),
    dtype=st.sampled_from(DTYPES),
)
@example(values=[[1e-45, 1e38, -0.0], [5e-324], [1.7e308, -1.7e308]], norm_type=1.0, dtype=torch.float64)
@example(values=[[1.3e154], [1.3e154, 1.0], [1e-160, 2.0**-537]], norm_type=2.0, dtype=torch.float64)
@example(values=[[1.7e308], [1.7e308, 1.0], [1e-300, 5e-324]], norm_type=1.0, dtype=torch.float64)
@example(values=[[2.0**126], [2.0**-149]], norm_type=2.0, dtype=torch.float32)  # far below the sum, it still counts
@quick
def test_the_partial_is_the_exact_sum_of_the_blocks(
    values: list[list[float]], norm_type: float, dtype: torch.dtype
) -> None:
    parameters = [torch.tensor(value, dtype=torch.float64).to(dtype) for value in values]
    found = PowerSum.of(parameters, norm_type)
    if norm_type < math.inf:
        assert found == oracle(parameters, norm_type)
        return
    magnitudes = [abs(value) for parameter in parameters for value in parameter.tolist()]
    norm = found.norm(torch.float64).item()
    assert math.isnan(norm) if any(map(math.isnan, magnitudes)) else norm == max(magnitudes, default=0.0)


@pytest.mark.parametrize("dtype", placed("dtype", DTYPES, 0))
def test_it_is_exact_over_many_tiles_a_wide_spread_and_equal_magnitudes(dtype: torch.dtype) -> None:
    parameters = [widely_spread(length, dtype, random.Random(length)) for length in (70001, 33000, 5000, 100, 1)]
    # Where all blocks are as large as the largest, the sum of all leading bits needs the most bits.
    noise = torch.rand(15 * 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for norm_type in POWERS:
        assert PowerSum.of(parameters, norm_type) == oracle(parameters, norm_type)
    even = [(1 - noise / 16).to(dtype)]
    assert PowerSum.of(even, 1.0) == oracle(even, 1.0)


@given(units=st.integers(0, (1 << 2176) - 1), norm_type=st.sampled_from(NORM_TYPES), dtype=st.sampled_from(DTYPES[:2]))
@example(units=((1 << 53) + 1) << 1074, norm_type=1.0, dtype=torch.float64)  # halfway: to even
@example(units=1, norm_type=2.0, dtype=torch.float64)
@example(units=1, norm_type=2.0, dtype=torch.float32)
@example(units=1 << 2098, norm_type=1.0, dtype=torch.float64)
@quick
def test_the_norm_rounds_sum_root_and_dtype_once_each(units: int, norm_type: float, dtype: torch.dtype) -> None:
    try:
        rounded = float(units * UNIT)  # correctly rounded
    except OverflowError:
        rounded = math.inf
    root = {1.0: rounded, 2.0: math.sqrt(rounded), math.inf: rounded}.get(norm_type, rounded ** (1 / norm_type))
    partial = PowerSum(norm_type, units)
    assert PowerSum.from_bytes(partial.to_bytes()) == partial
    norm = partial.norm(dtype)
    assert norm.shape == ()
    assert bits(norm) == bits(torch.tensor(root, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_inf_and_nan_reach_the_norm_from_anywhere(norm_type: float) -> None:
    for poison in (math.inf, -math.inf, math.nan):
        for length, position in ((1, 0), (5000, 0), (5000, 2500), (70000, 35000), (70000, 69999)):
            values = torch.ones(length)
            values[position] = poison
            partial = PowerSum.of([torch.ones(20), values], norm_type)
            assert PowerSum.from_bytes(partial.to_bytes()) == partial
            assert (partial.has_inf, partial.has_nan) == (not math.isnan(poison), math.isnan(poison))
            assert bits(partial.norm(torch.float32)) == bits(torch.tensor(abs(poison)))
    infinite, undefined = (PowerSum.of([torch.tensor([value])], norm_type) for value in (math.inf, math.nan))
    for merged in (infinite.merge(undefined), undefined.merge(infinite)):
        assert math.isnan(merged.norm(torch.float32).item())
    nothing, something = PowerSum.of([], norm_type), PowerSum.of([torch.arange(5.0)], norm_type)
    assert nothing == PowerSum(norm_type) == PowerSum.of([torch.empty(0), torch.empty(0).double()], norm_type)
    assert PowerSum(0.01, 1 << 1200).norm(torch.float64).item() == math.inf
    assert nothing.merge(something) == something == something.merge(nothing)
    assert bits(nothing.norm(torch.float64)) == bits(torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_on_a_device_it_is_the_same_and_is_read_once_if_gradients_are_finite_and_of_a_usual_spread(
    norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    usual = [torch.randn(length, generator=generator).mul_(1e-3) for length in (0, 1, 40_000, 600_000)]
    others = [[widely_spread(5000, dtype, rng)] for dtype in DTYPES]
    others += [[*usual, torch.tensor([value])] for value in (math.inf, math.nan)]
    others += [[torch.tensor([1.0, 1.7e308], dtype=torch.float64)], [torch.tensor([1e-300, 5e-324]).double()]]
    looks = []
    noted = lambda look: lambda tensor: (looks.append(look), look(tensor))[1]  # noqa: E731
    for pieces in (usual, *others):
        expected = PowerSum.of(pieces, norm_type)
        with monkeypatch.context() as device:
            device.setattr("zero.core.norm.host_readable", lambda device: False)
            for name in ("item", "tolist"):
                device.setattr(Tensor, name, noted(getattr(Tensor, name)))
            looks.clear()
            assert PowerSum.of(pieces, norm_type).to_bytes() == expected.to_bytes()
        assert len(looks) == 1 or pieces is not usual


def test_pieces_are_let_go_of_as_they_are_read() -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def pieces() -> Iterator[Tensor]:
        for length in (100_001, 70_000, 32_769, 140_000):
            piece = torch.ones(length)
            alive.append(weakref.ref(piece.untyped_storage()))
            yield piece
            del piece
            assert [reference() for reference in alive[:-1]] == [None] * (len(alive) - 1)

    assert PowerSum.of(pieces(), 1.0).norm(torch.float64).item() == 100_001 + 70_000 + 32_769 + 140_000


# -- what is refused --------------------------------------------------------------------------------------------------


def with_a_bit(position: int) -> bytes:
    data = bytearray(PowerSum(2.0).to_bytes())
    data[position] |= 4
    return bytes(data)


NO_TYPES = (0.0, -1.0, math.nan, -math.inf)
REFUSED: list[tuple[Callable[[Any], object], Sequence[Any], str]] = [  # call, what it is given
    (lambda p: PowerSum.of([p], 2.0), (torch.ones(4, 4), torch.ones(()), torch.ones(32)[::2]), "Value … 1-D contig"),
    (lambda d: PowerSum.of([torch.ones(16, dtype=d)], 2.0), (torch.int64, torch.complex64), "TypeError: … torch."),
    (lambda n: PowerSum(2.0).merge(PowerSum(n)), (3.0,), "ValueError: … 2.0-norm and a 3.0-norm"),
    (PowerSum.from_bytes, (b"", bytes(287), bytes(289)), "ValueError: … 288 bytes"),
    (lambda n: PowerSum.from_bytes(with_a_bit(n)), range(8, 16), "ValueError: … never set"),
    (PowerSum, NO_TYPES, "ValueError: … norm_type"),
    (lambda n: PowerSum.from_bytes(struct.pack("<d", n) + bytes(280)), NO_TYPES, "ValueError: … norm_type"),
]


def test_what_is_no_piece_and_no_partial_is_refused() -> None:
    for call, each, words in REFUSED:
        for given_ in each:
            assert_in_order(words, error_of(call, given_))
