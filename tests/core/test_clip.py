"""`clip_grad_norm_` scales as torch does, by a norm over memory order, and every rank takes part in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
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
from ..support.sides import Side, same_as_plain
from ..support.small import TwoVectors
from .spread import DTYPES, NORM_TYPES, bits, cut, widely_spread, with_gradient

quick = settings(max_examples=50)


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
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    expected = PowerSum.of(pieces, norm_type).norm(dtype)
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
        assert bits(norm) == bits(expected.norm(torch.float32))
        assert parameter.grad is gradient
        assert (gradient.stride(), gradient.data_ptr()) == (strides, address)
        assert bits(gradient) == bits(memory * clip_factor(norm, 0.5))
    if layout == "transposed":  # without this, the above would hold for any order
        assert PowerSum.of([memory.reshape(-1)], 2.0) != expected


# -- errors ------------------------------------------------------------------------------------------------------------


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


REFUSED: list[tuple[list[Any], tuple[float, float], str]] = [
    *[([], (max_norm, 2.0), "ValueError: … max_norm") for max_norm in (math.nan, -1.0)],
    *[([], (1.0, norm_type), "ValueError: … norm_type") for norm_type in (0.0, -2.0, math.nan, -math.inf)],
    ([sparse()], (1.0, 2.0), "RuntimeError: … parameter 1, of shape (10, 4), is sparse … sparse=False"),
]


def test_what_cannot_be_clipped_is_an_error_before_anything_is_scaled() -> None:
    for further, arguments, words in REFUSED:
        dense = with_gradient(torch.tensor([3.0, 4.0]))
        assert_in_order(words, error_of(clip_grad_norm_, [dense, *further], *arguments))
        assert bits(dense.grad) == bits(torch.tensor([3.0, 4.0]))


# -- ranks -------------------------------------------------------------------------------------------------------------


def of_one_element() -> TwoVectors:
    """Return a model of which one rank owns all that is used."""
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
