"""On a device the sums of all buckets are divided in one call, with the bits of torch's `div_` there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero.gradients import reducer
from zero.gradients.reducer import Division

from ..support.plain import assert_same_bits

CPU = torch.device("cpu")
DIVISORS = (2.0, 3.0, 6.0, 7.0, 8 / 7, 1000.5, 1e-46)
pytestmark = pytest.mark.usefixtures("unseen")


_TORCHS = Tensor.div_


def _sums(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(1000, generator=generator).mul_(100).exp_().to(dtype)
    whole[:3] = torch.tensor([-0.0, torch.inf, torch.nan])
    return [whole[:517], whole[517:]]


def _as_cuda_divides(tensor: Tensor, divisor: float) -> Tensor:
    """Multiply by the reciprocal, in fp32 for narrower dtypes."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    inverse = torch.ones((), dtype=wide) / torch.tensor(divisor, dtype=wide)
    return tensor.copy_(tensor.to(wide) * inverse)


def _as_no_list_does(tensor: Tensor, divisor: float) -> Tensor:
    return tensor.mul_(-1 / divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("alone", [_TORCHS, _as_cuda_divides, _as_no_list_does])
def test_sums_have_the_bits_of_a_division_of_each_alone(
    alone: Callable[[Tensor, float], Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "div_", alone)
    by_reciprocal = alone is _as_cuda_divides and dtype.itemsize > 2  # the CPU's list kernels round a factor to 16 bits
    expected_way = reducer._by_reciprocal if by_reciprocal else reducer._one_by_one
    chosen = Division()
    chosen.prepare(CPU, dtype)
    assert chosen._ways[CPU, dtype] is (reducer.foreach_div_ if alone is _TORCHS else expected_way)
    for divisor in DIVISORS:
        expected = [alone(each, divisor) for each in _sums(dtype)]
        chosen.divide(found := _sums(dtype), divisor)
        assert_same_bits(torch.cat(found), torch.cat(expected))
