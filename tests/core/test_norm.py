"""Norms have the same bits for every cut, order and grouping, and those of an exact oracle; clips scale as in torch."""

from __future__ import annotations

import math
import random
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

from zero import ZeroOptimizer, clip_grad_norm_
from zero.core.norm import PowerSum
from zero.step.clip import clip_factor, in_memory_order

from ..support.errors import assert_in_order, error_of
from ..support.narrowed import INTEGERS
from ..support.rows import placed
from ..support.sides import Side, same_as_plain
from ..support.small import TwoVectors

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf, 2.5)


def block_of(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 16


def widely_spread(length: int, dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Return normal values times powers of two, whose cubes fit fp64, and zeros of either sign."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    reach = {torch.float16: 10, torch.float64: 300}.get(dtype, 110)
    exponents = torch.randint(-reach, reach + 1, (length,), generator=generator).double()
    values = torch.randn(length, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    zeros = torch.randint(0, 8, (length,), generator=generator) == 0
    return torch.where(zeros, torch.copysign(torch.zeros(()), values).double(), values).to(dtype)


def cut(parameter: Tensor, rng: random.Random) -> list[Tensor]:
    """Return 1-D ``parameter`` in up to five pieces, cut between blocks; some may be empty."""
    block = block_of(parameter.dtype)
    bounds = sorted(rng.randrange(0, parameter.numel() + 1, block) for _ in range(rng.randrange(5)))
    return [parameter[a:b] for a, b in zip([0, *bounds], [*bounds, parameter.numel()], strict=True)]


def bits(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    return tensor.contiguous().view(INTEGERS[tensor.itemsize]).flatten().tolist()


def with_gradient(gradient: Tensor) -> Parameter:
    parameter = Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


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
    flags = any(map(math.isinf, sums)), any(map(math.isnan, sums))
    is_fp64 = any(parameter.dtype is torch.float64 for parameter in parameters if parameter.numel())
    return PowerSum(norm_type, units.numerator, *flags, is_fp64)


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
    norm = replace(found, is_fp64=True).norm().item()
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
    partial = PowerSum(norm_type, units, is_fp64=dtype is torch.float64)
    assert PowerSum.from_bytes(partial.to_bytes()) == partial
    norm = partial.norm()
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
            assert bits(partial.norm()) == bits(torch.tensor(abs(poison)))
    infinite, undefined = (PowerSum.of([torch.tensor([value])], norm_type) for value in (math.inf, math.nan))
    for merged in (infinite.merge(undefined), undefined.merge(infinite)):
        assert math.isnan(merged.norm().item())
    nothing, something = PowerSum.of([], norm_type), PowerSum.of([torch.arange(5.0)], norm_type)
    assert nothing == PowerSum(norm_type) == PowerSum.of([torch.empty(0), torch.empty(0).double()], norm_type)
    assert PowerSum(0.01, 1 << 1200, is_fp64=True).norm().item() == math.inf
    assert nothing.merge(something) == something == something.merge(nothing)
    assert bits(nothing.norm()) == bits(torch.zeros(()))


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

    assert PowerSum.of(pieces(), 1.0).norm().item() == 100_001 + 70_000 + 32_769 + 140_000


def with_a_bit(position: int) -> bytes:
    data = bytearray(PowerSum(2.0).to_bytes())
    data[position] |= 8
    return bytes(data)


REFUSED: list[tuple[Callable[[Any], object], Sequence[Any], str]] = [  # call, what it is given
    (lambda p: PowerSum.of([p], 2.0), (torch.ones(4, 4), torch.ones(32)[::2]), "Value … 1-D contig"),
    (
        lambda dtype: PowerSum.of([torch.ones(4).to(dtype)], 2.0),
        (torch.int64, torch.complex64),
        "TypeError: … not torch.",
    ),
    (lambda n: PowerSum(2.0).merge(PowerSum(n)), (3.0,), "ValueError: … 2.0-norm and a 3.0-norm"),
    (PowerSum.from_bytes, (b"", bytes(287), bytes(289)), "ValueError: … 288 bytes"),
    (lambda n: PowerSum.from_bytes(with_a_bit(n)), range(8, 16), "ValueError: … never set"),
    (lambda n: PowerSum.from_bytes(struct.pack("<d", n) + bytes(280)), (0.0, math.nan), "ValueError: … norm_type"),
]


def test_what_is_no_piece_and_no_partial_is_refused() -> None:
    for call, each, words in REFUSED:
        for given_ in each:
            assert_in_order(words, error_of(call, given_))


@given(norm=st.floats(min_value=0.0, width=32), max_norm=st.floats(min_value=0.0), dtype=st.sampled_from(DTYPES[:2]))
@example(norm=math.nan, max_norm=1.0, dtype=torch.float32)
@example(norm=math.inf, max_norm=1.0, dtype=torch.float32)
@example(norm=math.inf, max_norm=math.inf, dtype=torch.float32)
@example(norm=0.0, max_norm=0.0, dtype=torch.float64)
@example(norm=1.0, max_norm=math.inf, dtype=torch.float32)
@quick
def test_the_clip_factor_is_torchs(norm: float, max_norm: float, dtype: torch.dtype) -> None:
    total_norm = torch.tensor(norm, dtype=dtype)
    one = with_gradient(torch.ones(1, dtype=dtype))
    torch.nn.utils.clip_grads_with_norm_(one, max_norm, total_norm)
    factor = clip_factor(total_norm, max_norm)
    assert (factor.dtype, factor.shape) == (dtype, ())
    assert bits(factor) == bits(one.grad)


@given(seed=st.integers(0, 2**32 - 1))
@quick
def test_gradients_are_scaled_as_torch_scales_them_by_the_same_norm(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = rng.choice([[torch.float32], [torch.bfloat16, torch.float32], [torch.float16], list(DTYPES)])
    gradients = [widely_spread(rng.randrange(100), rng.choice(dtypes), rng) for _ in range(rng.randrange(1, 6))]
    ours = [with_gradient(gradient.clone()) for gradient in gradients]
    torchs = [with_gradient(gradient.clone()) for gradient in gradients]
    norm_type, max_norm = rng.choice(NORM_TYPES), rng.choice([0.0, 0.1, 1.0, 7.3, 1e30, math.inf])
    pieces = [piece for gradient in gradients for piece in cut(gradient, rng)]
    rng.shuffle(pieces)
    expected = PowerSum.of(pieces, norm_type).norm()
    for turn in range(2):
        norm = clip_grad_norm_(ours, max_norm, norm_type)
        assert turn or bits(norm) == bits(expected), "the norm of the pieces that ranks would hold"
        torch.nn.utils.clip_grads_with_norm_(torchs, max_norm, norm)
        assert [bits(p.grad) for p in ours] == [bits(p.grad) for p in torchs]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.empty(6, 5, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.empty(40, 30).t(),
    "permuted, with a dimension of one": lambda: torch.empty(7, 1, 11, 5).permute(2, 1, 3, 0),
    "every other column": lambda: torch.empty(30, 40)[:, ::2],
    "expanded": lambda: torch.empty(6, 1, 8).expand(6, 5, 8).permute(2, 1, 0),
    "scalar": lambda: torch.empty(()),
    "no elements": lambda: torch.empty(0, 3, 2).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_follow_the_parameters_memory_whatever_the_gradients_strides(layout: str) -> None:
    parameter = Parameter(LAYOUTS[layout]())
    memory = torch.empty_like(parameter).detach()  # dense, in the parameter's order
    flat = memory.as_strided((memory.numel(),), (1,))
    flat.copy_(widely_spread(memory.numel(), torch.float32, random.Random(1)))
    expected = PowerSum.of([flat.clone()], 2.0)
    backwards = list(range(parameter.dim()))[::-1]
    assert in_memory_order(parameter, memory).data_ptr() == memory.data_ptr(), "not copied"
    for gradient in (
        memory.clone(),
        memory.clone(memory_format=torch.contiguous_format),
        memory.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards),
    ):
        strides, address = gradient.stride(), gradient.data_ptr()
        parameter.grad = gradient
        ordered = in_memory_order(parameter, gradient)
        assert bits(ordered) == bits(flat)
        assert PowerSum.of([ordered], 2.0) == expected
        norm = clip_grad_norm_([parameter], 0.5)
        assert bits(norm) == bits(expected.norm())
        assert parameter.grad is gradient
        assert (gradient.stride(), gradient.data_ptr()) == (strides, address)
        assert bits(gradient) == bits(memory * clip_factor(norm, 0.5))
    if layout == "transposed":  # without this, the above would hold for any order
        assert PowerSum.of([memory.reshape(-1)], 2.0) != expected


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_scales_or_raises_as_asked(poison: float) -> None:
    ours, torchs = (with_gradient(torch.tensor([1.0, poison, -0.0])) for _ in range(2))
    before = bits(ours.grad)
    words = "total norm of order 2.0 … is non-finite … `error_if_nonfinite=False`"
    assert_in_order(words, error_of(clip_grad_norm_, ours, 1.0, error_if_nonfinite=True))
    assert bits(ours.grad) == before
    torch.nn.utils.clip_grad_norm_(torchs, 1.0)
    clip_grad_norm_(ours, 1.0)
    assert torch.equal(ours.grad.nan_to_num(7), torchs.grad.nan_to_num(7))  # type: ignore[union-attr]
    model = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    (model(torch.ones(1, 3)).sum() * poison).backward()
    assert "non-finite" in error_of(optimizer.clip_grad_norm_, 0.5, error_if_nonfinite=True)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True).isfinite()


def sparse() -> Tensor:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    return embedding.weight


UNCLIPPED: list[tuple[list[Any], tuple[float, float], str]] = [
    *[([], (max_norm, 2.0), "ValueError: … max_norm") for max_norm in (math.nan, -1.0)],
    *[([], (1.0, norm_type), "ValueError: … norm_type") for norm_type in (0.0, -2.0, math.nan, -math.inf)],
    ([sparse()], (1.0, 2.0), "RuntimeError: … parameter 1, of shape (10, 4), is sparse … sparse=False"),
]


def test_what_cannot_be_clipped_is_an_error_before_anything_is_scaled() -> None:
    for further, arguments, words in UNCLIPPED:
        dense = with_gradient(torch.tensor([3.0, 4.0]))
        assert_in_order(words, error_of(clip_grad_norm_, [dense, *further], *arguments))
        assert bits(dense.grad) == bits(torch.tensor([3.0, 4.0]))


def of_one_element() -> TwoVectors:
    model = TwoVectors()
    model.b = Parameter(torch.tensor([2.0]))
    model.a.requires_grad_(False)
    return model


def with_an_unused_one_in_fp64() -> TwoVectors:
    model = TwoVectors()
    model.a = Parameter(torch.arange(32.0, dtype=torch.float64))
    return model


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("build", [of_one_element, with_an_unused_one_in_fp64])
def test_a_rank_that_owns_nothing_takes_part_and_what_no_rank_used_has_no_part(build: Any, stage: int) -> None:
    def loop(side: Side) -> Tensor:
        side.train(lambda model, rank: model(1.0 + rank, use_a=False))
        norm = side.clip(0.3)
        side.step()
        return norm

    same_as_plain(loop, build, world_size=4, lr=0.1, settings={"stage": stage})


@pytest.mark.law("missing gradients")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_missing_gradient_adds_nothing_not_even_a_sign(stage: int) -> None:
    """-0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0: only adding -0.0 preserves a negative zero. A step shows it."""

    def loop(side: Side) -> list[Tensor]:
        found = []
        for signs in ((-1.0, None), (None, -1.0), (-1.0, -1.0), (1.0, None), (-1.0, 1.0), (None, None)):
            side.model.a.data.fill_(-0.0)
            side.train(lambda model, rank, of=signs: model(0.0 * (of[rank] or 1), of[rank] is not None))  # type: ignore
            side.step()
            side.clear()
            found.append(side.model.a.detach().clone())
        return found

    same_as_plain(loop, TwoVectors, lr=0.5, settings={"stage": stage})
