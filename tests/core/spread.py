"""Values for the tests of norms: over most of the range of a dtype, compared by their bits."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.nn import Parameter

from ..support.narrowed import INTEGERS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf, 2.5)


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
    """Return 1-D ``parameter`` in up to five pieces, cut between blocks; some may be empty."""
    block = block_of(parameter.dtype)
    bounds = sorted(rng.randrange(0, parameter.numel() + 1, block) for _ in range(rng.randrange(5)))
    return [parameter[a:b] for a, b in zip([0, *bounds], [*bounds, parameter.numel()], strict=True)]


def bits(tensor: Tensor | None) -> list[int]:
    """Return the elements as integers, so that a comparison respects -0.0 and NaN."""
    assert tensor is not None
    return tensor.contiguous().view(INTEGERS[tensor.itemsize]).flatten().tolist()


def with_gradient(gradient: Tensor) -> Parameter:
    """Return a parameter with the layout of ``gradient``, which becomes its gradient."""
    parameter = Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter
