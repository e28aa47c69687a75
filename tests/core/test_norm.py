"""The norm has the same bits for every cut, order and grouping, and those of an exact oracle. The clip is torch's."""

from __future__ import annotations

import math
import random
import struct
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

from collectives import Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_
from zero.core.norm import PowerSum
from zero.step.clip import check_norm_arguments, clip_factor, in_memory_order

from ..support.plain import assert_same_bits, assert_same_model, plain_step
from ..support.small import TwoVectors, with_sgd
from ..test_errors import linear

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf, 2.5)
BITS_OF = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
# Around every length at which the code changes: a block, a tile, a piece that is read in place, a chunk.
LENGTHS = (0, 1, 15, 16, 17, 64, 1000, 4095, 4096, 4097, 32767, 32768, 40000, 65536, 65537, 140003)
UNIT = Fraction(1, 1 << 1074)

given_a_seed = given(seed=st.integers(0, 2**32 - 1))
quick = settings(deadline=None, max_examples=50)


def block_of(dtype: torch.dtype) -> int:
    """Return the number of elements of a block."""
    return 8 if dtype == torch.float64 else 16


def widely_spread(length: int, dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Return normal values times powers of two, over most of the range whose cubes fit fp64.

    Some are zeros of either sign.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    reach = {torch.float16: 10, torch.float64: 300}.get(dtype, 110)
    exponents = torch.randint(-reach, reach + 1, (length,), generator=generator).double()
    values = torch.randn(length, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    zeros = torch.randint(0, 8, (length,), generator=generator) == 0
    return torch.where(zeros, torch.copysign(torch.zeros(()), values).double(), values).to(dtype)


def cut(parameter: Tensor, rng: random.Random) -> list[Tensor]:
    """Return 1-D `parameter` in up to five pieces, cut between blocks; some may be empty."""
    block = block_of(parameter.dtype)
    bounds = sorted(rng.randrange(0, parameter.numel() + 1, block) for _ in range(rng.randrange(5)))
    return [parameter[a:b] for a, b in zip([0, *bounds], [*bounds, parameter.numel()], strict=True)]


def bits(tensor: Tensor) -> list[int]:
    """Return the elements as integers, so that a comparison respects -0.0 and NaN."""
    return tensor.contiguous().view(BITS_OF[tensor.dtype]).flatten().tolist()


def with_gradient(gradient: Tensor) -> Parameter:
    """Return a parameter with the layout of `gradient`, which becomes its gradient."""
    parameter = Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


# -- The oracle: plain Python floats, fractions and integers ----------------------------------------------------------

POWERS: dict[float, Callable[[float], float]] = {
    1.0: abs,
    2.0: lambda value: value * value,
    3.0: lambda value: abs(value) * (value * value),
}


def block_sum(powers: list[float]) -> float:
    """Add up in the fixed tree: lane j + lane j + half, until one is left."""
    while len(powers) > 1:
        half = len(powers) // 2
        powers = [powers[lane] + powers[lane + half] for lane in range(half)]
    return powers[0]


def oracle(parameters: list[Tensor], norm_type: float) -> PowerSum:
    """Return the partial over whole 1-D `parameters`, block by block."""
    sums: list[float] = []
    for parameter in parameters:
        powers = [POWERS[norm_type](value) for value in parameter.tolist()]
        block = block_of(parameter.dtype)
        powers += [0.0] * (-len(powers) % block)
        sums += [block_sum(powers[start : start + block]) for start in range(0, len(powers), block)]
    units = sum((Fraction(value) for value in sums if math.isfinite(value)), Fraction()) / UNIT
    assert units.denominator == 1
    return PowerSum(norm_type, units.numerator, any(map(math.isinf, sums)), any(map(math.isnan, sums)))


# -- The power sum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@given_a_seed
@settings(quick, max_examples=25)
def test_no_cut_no_order_and_no_grouping_changes_the_partial(norm_type: float, seed: int) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    values=st.lists(st.lists(st.floats(), max_size=40), max_size=3),
    norm_type=st.sampled_from(sorted(POWERS)),
)
@example(values=[[1e-45, 1e38, -0.0], [5e-324], [1.7e308, -1.7e308]], norm_type=1.0)
@example(values=[[1.3e154], [1.3e154, 1.0], [1e-160, 2.0**-537]], norm_type=2.0)
@example(values=[[1.7e308], [1.7e308, 1.0], [1e-300, 5e-324]], norm_type=1.0)
@quick
def test_the_partial_is_the_exact_sum_of_the_blocks(
    dtype: torch.dtype, values: list[list[float]], norm_type: float
) -> None:
    parameters = [torch.tensor(value, dtype=torch.float64).to(dtype) for value in values]
    assert PowerSum.of(parameters, norm_type) == oracle(parameters, norm_type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", sorted(POWERS))
def test_it_is_exact_over_many_tiles_and_a_wide_spread(dtype: torch.dtype, norm_type: float) -> None:
    parameters = [widely_spread(length, dtype, random.Random(length)) for length in (70001, 33000, 5000, 100, 1)]
    assert PowerSum.of(parameters, norm_type) == oracle(parameters, norm_type)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_exact_where_all_blocks_are_as_large_as_the_largest(seed: int) -> None:
    # Here the sum of all leading bits needs the most bits; with fp64 elements, because they use all their bits.
    noise = torch.rand(15 * 4096, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parameter = 1 - noise / 16
    assert PowerSum.of([parameter], 1.0) == oracle([parameter], 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=st.lists(st.lists(st.floats(), max_size=40), max_size=3))
@quick
def test_for_the_infinity_norm_the_partial_is_the_largest_magnitude(
    dtype: torch.dtype, values: list[list[float]]
) -> None:
    parameters = [torch.tensor(value, dtype=torch.float64).to(dtype) for value in values]
    magnitudes = [abs(value) for parameter in parameters for value in parameter.tolist()]
    norm = PowerSum.of(parameters, math.inf).norm(torch.float64).item()
    if any(map(math.isnan, magnitudes)):
        assert math.isnan(norm)
    else:
        assert norm == max(magnitudes, default=0.0)


def test_what_is_far_below_the_sum_still_counts() -> None:
    partial = PowerSum.of([torch.tensor([2.0**126]), torch.tensor([2.0**-149])], 2.0)
    assert partial.units * UNIT == Fraction(2) ** 252 + Fraction(2) ** -298


@pytest.mark.parametrize(
    ("values", "dtype", "norm_type", "expected"),
    [
        ([1e-45] * 4, torch.float32, 2.0, 2.0**-148),  # the smallest fp32 number, whose square fp32 does not have
        ([1e38] * 4, torch.float32, 2.0, 2 * torch.tensor(1e38).double().item()),  # nor this one's
        ([3e38] * 4, torch.float32, 2.0, math.inf),  # the norm itself exceeds fp32
        ([-0.0] * 4, torch.float32, 2.0, 0.0),
        ([-0.0] * 4, torch.float32, 1.0, 0.0),
        ([-0.0] * 4, torch.float32, math.inf, 0.0),
        ([-0.0] * 4, torch.float32, 0.5, 0.0),
        ([4.0, 9.0], torch.float32, 0.5, 25.0),
        ([60000.0] * 4, torch.float16, 2.0, 120000.0),
        ([3.0, -4.0], torch.bfloat16, 2.0, 5.0),
    ],
)
def test_norms_at_the_edges_of_fp32(values: list[float], dtype: torch.dtype, norm_type: float, expected: float) -> None:
    norm = PowerSum.of([torch.tensor(values, dtype=dtype)], norm_type).norm(torch.float32)
    assert norm.dtype == torch.float32
    assert bits(norm) == bits(torch.tensor(expected))  # +0.0, not -0.0


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("length", [1, 5000, 70000])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_reach_the_norm_from_anywhere(norm_type: float, length: int, poison: float) -> None:
    for position in {0, length // 2, length - 1}:
        values = torch.ones(length)
        values[position] = poison
        partial = PowerSum.of([torch.ones(20), values], norm_type)
        assert (partial.has_inf, partial.has_nan) == (not math.isnan(poison), math.isnan(poison))
        assert bits(partial.norm(torch.float32)) == bits(torch.tensor(abs(poison)))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_nan_wins_over_inf(norm_type: float) -> None:
    infinite, undefined = (PowerSum.of([torch.tensor([value])], norm_type) for value in (math.inf, math.nan))
    assert math.isnan(infinite.merge(undefined).norm(torch.float32).item())
    assert math.isnan(undefined.merge(infinite).norm(torch.float32).item())


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_nothing_has_norm_zero_and_is_the_identity_of_merging(norm_type: float) -> None:
    nothing = PowerSum.of([], norm_type)
    something = PowerSum.of([torch.arange(5.0)], norm_type)
    assert nothing == PowerSum(norm_type) == PowerSum.of([torch.empty(0), torch.empty(0).double()], norm_type)
    assert nothing.merge(something) == something == something.merge(nothing)
    for dtype in (torch.float32, torch.float64):
        assert bits(nothing.norm(dtype)) == bits(torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@given_a_seed
@settings(quick, max_examples=20)
def test_it_agrees_with_torch_in_fp64(norm_type: float, seed: int) -> None:
    values = torch.randn(random.Random(seed).randrange(1, 5000), generator=torch.Generator().manual_seed(seed))
    ours = PowerSum.of([values], norm_type).norm(torch.float64).item()
    torchs = torch.linalg.vector_norm(values.double(), norm_type).item()
    # n non-negative terms, added in any order, are off by less than n * 2**-53 of their sum; each term's power and the
    # final root by a few units in the last place, for which 10 stand here.
    assert ours == pytest.approx(torchs, rel=(len(values) + 10) * 2.0**-53, abs=0.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_neither_threads_nor_ambient_modes_change_the_partial(norm_type: float) -> None:
    parameters = [widely_spread(length, torch.float32, random.Random(length)) for length in (200_003, 40_000, 700)]
    expected = PowerSum.of(parameters, norm_type)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert PowerSum.of(parameters, norm_type) == expected
    finally:
        torch.set_num_threads(threads)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert PowerSum.of(parameters, norm_type) == expected
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # this also fills uninitialized memory with NaN
    try:
        assert PowerSum.of(parameters, norm_type) == expected
    finally:
        torch.set_deterministic_debug_mode(mode)


class Memory(bytearray):
    """Memory for a tensor that supports weak references."""


def test_pieces_that_only_the_iterator_holds_are_let_go_of_as_they_are_read() -> None:
    alive: list[weakref.ref[Memory]] = []

    def pieces() -> Iterator[Tensor]:
        for length in (100_001, 70_000, 32_769, 140_000):
            memory = Memory(4 * length)
            alive.append(weakref.ref(memory))
            piece = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
            del memory
            yield piece
            del piece
            assert [reference() for reference in alive[:-1]] == [None] * (len(alive) - 1)

    assert PowerSum.of(pieces(), 1.0).norm(torch.float64).item() == 100_001 + 70_000 + 32_769 + 140_000


def test_pieces_are_only_read() -> None:
    pieces = [torch.arange(-5.0, length) for length in (3, 5000, 40000, 70000)]
    before = [bits(piece) for piece in pieces]
    for norm_type in NORM_TYPES:
        PowerSum.of(pieces, norm_type)
    assert [bits(piece) for piece in pieces] == before


@pytest.mark.parametrize("piece", [torch.ones(4, 4), torch.ones(()), torch.ones(32)[::2]])
def test_a_piece_that_is_not_flat_is_refused(piece: Tensor) -> None:
    with pytest.raises(ValueError, match="1-D contiguous"):
        PowerSum.of([piece], 2.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_piece_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype)):
        PowerSum.of([torch.ones(16, dtype=dtype)], 2.0)


def test_partials_of_different_norms_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"2.0-norm and a 3.0-norm"):
        PowerSum(2.0).merge(PowerSum(3.0))


# -- Rounding the norm ------------------------------------------------------------------------------------------------


@given(units=st.integers(0, 1 << 2170), norm_type=st.sampled_from(NORM_TYPES), dtype=st.sampled_from(DTYPES[:2]))
@example(units=((1 << 53) + 1) << 1074, norm_type=1.0, dtype=torch.float64)  # halfway: to even
@example(units=1, norm_type=2.0, dtype=torch.float64)
@example(units=1, norm_type=2.0, dtype=torch.float32)
@example(units=1 << 2098, norm_type=1.0, dtype=torch.float64)
@quick
def test_the_norm_rounds_the_power_sum_once_then_the_root_then_to_its_dtype(
    units: int, norm_type: float, dtype: torch.dtype
) -> None:
    try:
        rounded = float(units * UNIT)  # correctly rounded
    except OverflowError:
        rounded = math.inf
    root = {1.0: rounded, 2.0: math.sqrt(rounded), math.inf: rounded}.get(norm_type, rounded ** (1 / norm_type))
    norm = PowerSum(norm_type, units).norm(dtype)
    assert norm.shape == ()
    assert bits(norm) == bits(torch.tensor(root, dtype=torch.float64).to(dtype))


def test_a_root_beyond_fp64_is_infinite() -> None:
    assert PowerSum(0.01, 1 << 1200).norm(torch.float64).item() == math.inf


@given(
    partial=st.builds(
        PowerSum,
        norm_type=st.floats(min_value=0.0, exclude_min=True),
        units=st.integers(0, (1 << 2176) - 1),
        has_inf=st.booleans(),
        has_nan=st.booleans(),
    )
)
@quick
def test_bytes_bring_back_the_partial(partial: PowerSum) -> None:
    data = partial.to_bytes()
    assert len(data) == 288
    assert PowerSum.from_bytes(data) == partial


@given(data=st.binary(max_size=300))
@example(data=PowerSum(2.0).to_bytes()[:-1])
@example(data=PowerSum(2.0).to_bytes() + b"\0")
@quick
def test_bytes_of_another_length_are_refused(data: bytes) -> None:
    if len(data) != 288:
        with pytest.raises(ValueError, match="288 bytes"):
            PowerSum.from_bytes(data)


@pytest.mark.parametrize("position", range(8, 16))
def test_bytes_with_bits_that_are_never_set_are_refused(position: int) -> None:
    data = bytearray(PowerSum(2.0).to_bytes())
    data[position] |= 4
    with pytest.raises(ValueError, match="never set"):
        PowerSum.from_bytes(bytes(data))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan, -math.inf])
def test_there_is_no_partial_of_a_norm_that_is_none(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        PowerSum(norm_type)
    with pytest.raises(ValueError, match="norm_type"):
        PowerSum.from_bytes(struct.pack("<d", norm_type) + bytes(280))


# -- The clip factor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(norm=st.floats(min_value=0.0, width=32), max_norm=st.floats(min_value=0.0))
@example(norm=math.nan, max_norm=1.0)
@example(norm=math.inf, max_norm=1.0)
@example(norm=math.inf, max_norm=math.inf)
@example(norm=0.0, max_norm=0.0)
@example(norm=1.0, max_norm=math.inf)
@quick
def test_the_clip_factor_is_torchs(dtype: torch.dtype, norm: float, max_norm: float) -> None:
    total_norm = torch.tensor(norm, dtype=dtype)
    one = with_gradient(torch.ones(1, dtype=dtype))
    torch.nn.utils.clip_grads_with_norm_(one, max_norm, total_norm)
    factor = clip_factor(total_norm, max_norm)
    assert (factor.dtype, factor.shape) == (dtype, ())
    assert one.grad is not None
    assert bits(factor) == bits(one.grad)


# -- Clipping in a plain loop -----------------------------------------------------------------------------------------


@given_a_seed
@settings(quick, max_examples=30)
def test_gradients_are_scaled_as_torch_scales_them_by_the_same_norm_also_twice(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = rng.choice([[torch.float32], [torch.bfloat16, torch.float32], [torch.float16], list(DTYPES)])
    gradients = [torch.randn(rng.randrange(100)).to(rng.choice(dtypes)) for _ in range(rng.randrange(1, 6))]
    ours = [with_gradient(gradient.clone()) for gradient in gradients]
    torchs = [with_gradient(gradient.clone()) for gradient in gradients]
    norm_type, max_norm = rng.choice(NORM_TYPES), rng.choice([0.0, 0.1, 1.0, 7.3, 100.0])
    for _ in range(2):
        norm = clip_grad_norm_(ours, max_norm, norm_type)
        torch.nn.utils.clip_grads_with_norm_(torchs, max_norm, norm)
        assert [bits(p.grad) for p in ours] == [bits(p.grad) for p in torchs]  # type: ignore[arg-type]


@given_a_seed
@settings(quick, max_examples=20)
def test_the_norm_is_that_of_the_pieces_that_ranks_would_hold(seed: int) -> None:
    rng = random.Random(seed)
    gradients = [widely_spread(rng.randrange(3000), torch.float32, rng) for _ in range(3)]
    pieces = [piece for gradient in gradients for piece in cut(gradient, rng)]
    rng.shuffle(pieces)
    expected = PowerSum.of(pieces, 2.0).norm(torch.float32)
    assert bits(clip_grad_norm_([with_gradient(gradient) for gradient in gradients], 1.0)) == bits(expected)


@pytest.mark.parametrize("max_norm", [math.inf, 1e30])
def test_a_bound_that_is_not_reached_changes_no_bit(max_norm: float) -> None:
    gradients = [torch.tensor([-0.0, 1e-45, 3.0, -1e20]), torch.randn(100).bfloat16(), torch.randn(100).half()]
    before = [bits(gradient) for gradient in gradients]
    clip_grad_norm_([with_gradient(gradient) for gradient in gradients], max_norm)
    assert [bits(gradient) for gradient in gradients] == before


def test_the_norm_is_fp64_when_any_gradient_is() -> None:
    single, double = with_gradient(torch.ones(3)), with_gradient(torch.ones(3, dtype=torch.float64))
    half = with_gradient(torch.ones(3, dtype=torch.float16))
    assert clip_grad_norm_([single, half], 1.0).dtype == torch.float32
    assert clip_grad_norm_(half, 1.0).dtype == torch.float32
    assert clip_grad_norm_([half, double], 1.0).dtype == torch.float64


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.empty(6, 5, 3, 3).to(memory_format=torch.channels_last),
    "channels last, 3-D": lambda: torch.empty(2, 5, 3, 3, 3).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.empty(40, 30).t(),
    "permuted, with a dimension of one": lambda: torch.empty(7, 1, 11, 5).permute(2, 1, 3, 0),
    "every other column": lambda: torch.empty(30, 40)[:, ::2],
    "one channel": lambda: torch.empty(8, 1, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.empty(6, 1, 8).expand(6, 5, 8).permute(2, 1, 0),
    "contiguous": lambda: torch.empty(30, 40),
    "scalar": lambda: torch.empty(()),
    "no elements": lambda: torch.empty(0, 3, 2).permute(2, 0, 1),
}


@pytest.mark.parametrize("gradient_lies_like", ["the parameter", "a contiguous tensor", "a reversed one"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_follow_the_parameters_memory_whatever_the_gradients_strides(
    layout: str, gradient_lies_like: str
) -> None:
    parameter = Parameter(LAYOUTS[layout]())
    memory = torch.empty_like(parameter).detach()  # dense, in the parameter's order
    flat = memory.as_strided((memory.numel(),), (1,))
    flat.copy_(widely_spread(memory.numel(), torch.float32, random.Random(1)))
    expected = PowerSum.of([flat.clone()], 2.0)
    backwards = list(range(parameter.dim()))[::-1]
    gradient = {
        "the parameter": memory.clone(),
        "a contiguous tensor": memory.clone(memory_format=torch.contiguous_format),
        "a reversed one": memory.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards),
    }[gradient_lies_like]
    strides, address = gradient.stride(), gradient.data_ptr()
    parameter.grad = gradient

    ordered = in_memory_order(parameter, gradient)
    assert bits(ordered) == bits(flat)
    assert PowerSum.of([ordered], 2.0) == expected

    norm = clip_grad_norm_([parameter], 0.5)
    assert bits(norm) == bits(expected.norm(torch.float32))
    assert parameter.grad is gradient
    assert (gradient.stride(), gradient.data_ptr()) == (strides, address)
    assert bits(gradient) == bits(memory * clip_factor(norm, 0.5))


def test_the_order_in_memory_decides_the_blocks() -> None:
    # Without this, the test above would hold for any order.
    values = widely_spread(1200, torch.float32, random.Random(1)).view(40, 30)
    assert PowerSum.of([values.t().reshape(-1)], 2.0) != PowerSum.of([values.reshape(-1)], 2.0)


def test_a_gradient_in_the_parameters_order_is_not_copied() -> None:
    for make in LAYOUTS.values():
        parameter = make()
        gradient = torch.empty_like(parameter)
        assert in_memory_order(parameter, gradient).data_ptr() == gradient.data_ptr()


def test_parameters_without_a_gradient_are_left_out_and_repeated_ones_count_once() -> None:
    parameter, unused = with_gradient(torch.tensor([3.0, 4.0])), Parameter(torch.ones(5))
    norm = clip_grad_norm_((p for p in (unused, parameter, unused, parameter)), 2.5)
    assert norm.item() == 5.0
    assert parameter.grad is not None
    assert bits(parameter.grad) == bits(torch.tensor([3.0, 4.0]) * clip_factor(norm, 2.5))
    assert unused.grad is None


@pytest.mark.parametrize("parameters", [[], [Parameter(torch.ones(3))], [with_gradient(torch.empty(0))]])
def test_nothing_to_clip_has_norm_zero(parameters: list[Parameter]) -> None:
    assert bits(clip_grad_norm_(parameters, 1.0)) == bits(torch.tensor(0.0))


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_scales_or_raises_as_asked(poison: float) -> None:
    ours, torchs = (with_gradient(torch.tensor([1.0, poison, -0.0])) for _ in range(2))
    before = bits(ours.grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite.*`error_if_nonfinite=False`"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    assert bits(ours.grad) == before  # type: ignore[arg-type]
    torch.nn.utils.clip_grad_norm_(torchs, 1.0)
    clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(ours.grad, torchs.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "named"),
    [
        (math.nan, 2.0, "max_norm"),
        (-1.0, 2.0, "max_norm"),
        (1.0, 0.0, "norm_type"),
        (1.0, -2.0, "norm_type"),
        (1.0, math.nan, "norm_type"),
        (1.0, -math.inf, "norm_type"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(max_norm: float, norm_type: float, named: str) -> None:
    parameter = with_gradient(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=named):
        clip_grad_norm_(parameter, max_norm, norm_type)
    assert bits(parameter.grad) == bits(torch.tensor([3.0, 4.0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        check_norm_arguments(max_norm, norm_type)


def test_arguments_come_back_as_floats() -> None:
    arguments: tuple[Any, Any] = (torch.tensor(3), "inf")  # torch's own function accepts both
    assert check_norm_arguments(*arguments) == (3.0, math.inf)


def test_a_sparse_gradient_is_an_error_before_anything_is_scaled() -> None:
    dense = with_gradient(torch.tensor([3.0, 4.0]))
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 1, of shape \(10, 4\), is sparse.*sparse=False"):
        clip_grad_norm_([dense, embedding.weight], 1.0)
    assert bits(dense.grad) == bits(torch.tensor([3.0, 4.0]))  # type: ignore[arg-type]


class Unreadable(torch.Tensor):
    """A gradient without memory of its own."""

    @staticmethod
    def __new__(cls, size: int) -> Unreadable:
        return torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise RuntimeError("this gradient lives on other ranks")


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_gradient_that_raises_when_read_raises_here_before_anything_is_scaled(size: int) -> None:
    dense, elsewhere = with_gradient(torch.tensor([3.0, 4.0])), Parameter(torch.ones(size))
    elsewhere.grad = Unreadable(size)
    with pytest.raises(RuntimeError, match="other ranks"):
        clip_grad_norm_([dense, elsewhere], 1.0)
    assert bits(dense.grad) == bits(torch.tensor([3.0, 4.0]))  # type: ignore[arg-type]


def test_the_graph_of_a_gradient_plays_no_part() -> None:
    parameter = Parameter(torch.tensor([3.0, 4.0]))
    (gradient,) = torch.autograd.grad((parameter**2).sum() / 2, parameter, create_graph=True)
    assert gradient.requires_grad
    assert PowerSum.of([gradient], 2.0) == PowerSum.of([gradient.detach()], 2.0)
    parameter.grad = gradient
    norm = clip_grad_norm_([parameter], math.inf)
    assert (norm.item(), norm.requires_grad) == (5.0, False)


@pytest.mark.parametrize("bad", [False, True])
def test_a_norm_is_asked_to_be_finite_and_clips_where_it_is(bad: bool) -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    (model(torch.ones(1, 3)).sum() * (float("inf") if bad else 1)).backward()
    if bad:
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
    else:
        optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
        found = [optimizer.full_grad(p) for p in model.parameters()]
        assert abs(torch.cat([g.view(-1) for g in found if g is not None]).norm().item() - 0.5) < 1e-5  # rounding


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_that_owns_nothing_takes_part(stage: int) -> None:
    """Four ranks and a single element: the other three clip, step and check, too."""

    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        model = TwoVectors()
        model.b = nn.Parameter(torch.tensor([2.0]))
        model.a.requires_grad_(False)
        optimizer = with_sgd(model, transport, stage=stage)
        model(1.0 + transport.rank, use_a=False).backward()
        norm = optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.check_replicas()
        return model, norm

    for model, norm in on_threads(4, program, timeout=5):
        gradient = torch.tensor([sum(2 * 2.0 * (1.0 + rank) ** 2 for rank in range(4)) / 4])
        assert_same_bits(norm, gradient[0])
        assert_same_bits(model.b, 2.0 - 0.1 * (gradient * clip_factor(norm, 0.5)))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_no_rank_used_has_no_part_in_the_norm_not_even_its_dtype(stage: int) -> None:
    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        model = TwoVectors()
        model.a = nn.Parameter(torch.arange(32.0, dtype=torch.float64))
        optimizer = with_sgd(model, transport, stage=stage)
        model(1.0 + transport.rank, use_a=False).backward()
        norm = optimizer.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.close()
        return model, norm

    plain = TwoVectors()
    plain.a = nn.Parameter(torch.arange(32.0, dtype=torch.float64))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = plain_step(plain, optimizer, lambda m, scale: m(scale, use_a=False), [1.0, 2.0], 2, max_norm=0.3)
    assert expected is not None
    assert expected.dtype is torch.float32
    for model, norm in on_threads(2, program, timeout=5):
        assert_same_bits(norm, expected)
        assert_same_model(model, plain)
