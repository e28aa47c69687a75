"""The division of sums, with the bits of torch's `div_`, in one call for all buckets where there is one.

On the CPU each sum is divided by itself. On accelerators the number of kernels decides, and torch has calls for lists
of tensors. Their kernels are others than that of `div_`: on CUDA `div_` multiplies by the reciprocal of a number, and
`_foreach_div_` divides. So a way is chosen by a trial for each device and dtype, before any step.

Knows: tensors and numbers. Does not know: buckets, stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float

import torch
from torch import Tensor

from collectives.torch_internals import foreach_div_, foreach_mul_

from ..core.bits import INTEGERS, host_readable, same_bits

_Way = Callable[[list[Tensor], float], None]
# No reciprocal is exact, and fp32 does not have the last three. With 8/7 some quotient in 16 bits is not the product.
_DIVISORS = (3.0, 7.0, 8 / 7, 0.1, 16777217.0)


class Division:
    """The way in which one optimizer divides sums on each device."""

    def __init__(self) -> None:
        self._ways: dict[tuple[torch.device, torch.dtype], _Way] = {}

    def prepare(self, device: torch.device, dtype: torch.dtype, *, offloaded: bool = False) -> None:
        """Choose the way for sums of a floating dtype on a device. Local; waits for the device, once.

        ``offloaded``: they lie in the host's memory, and get the quotients of the device.
        """
        if (device, dtype) not in self._ways:
            self._ways[device, dtype] = _one_by_one if host_readable(device) else _chosen(device, dtype)
        if offloaded:
            self._ways[torch.device("cpu"), dtype] = self._ways[device, dtype]

    @torch.no_grad()
    def divide(self, sums: Sequence[Tensor], divisor: float) -> None:
        """Divide 1-D tensors in place, with the bits of ``div_(divisor)``. Each is of a device and dtype of
        `prepare`."""
        if divisor == 1:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for each in sums:
            alike.setdefault((each.device, each.dtype), []).append(each)
        for key, tensors in alike.items():
            self._ways[key](tensors, divisor)


def _one_by_one(tensors: list[Tensor], divisor: float) -> None:
    for tensor in tensors:
        tensor.div_(divisor)


def _by_reciprocal(tensors: list[Tensor], divisor: float) -> None:
    foreach_mul_(tensors, _reciprocal(divisor, tensors[0].dtype))


def _reciprocal(divisor: float, dtype: torch.dtype) -> float:
    """Return 1 / ``divisor`` as a kernel of CUDA forms it: in fp64 for fp64, and else in fp32.

    The quotient of two fp32 numbers that is rounded to fp64 and then to fp32 is the one that is rounded once.
    """
    if dtype is not torch.float64:
        divisor = c_float(divisor).value
    inverse = 1.0 / divisor if divisor else math.inf
    return inverse if dtype is torch.float64 else c_float(inverse).value


def _chosen(device: torch.device, dtype: torch.dtype) -> _Way:
    """Return the way of fewest launches that has the bits of `div_` on this device."""
    numbers = _tried(dtype).to(device)
    odd = numbers.numel() // 2 + 1

    def quotients(way: _Way) -> Tensor:
        found = []
        for divisor in _DIVISORS:
            found.append(numbers.clone())
            way([found[-1][:odd], found[-1][odd:]], divisor)  # the second is aligned otherwise
        return torch.cat(found)

    expected = quotients(_one_by_one)
    ways: tuple[_Way, ...] = (_by_reciprocal, foreach_div_)
    for way in ways:
        if same_bits(quotients(way), expected):  # host synchronisation: a trial before any step
            return way
    return _one_by_one


def _tried(dtype: torch.dtype) -> Tensor:
    """Return all numbers of 16 bits, or so many of random bits, among them NaNs, infinities and subnormal numbers."""
    integers = INTEGERS[dtype.itemsize]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    if dtype.itemsize == 2:
        return torch.arange(low, high + 1, dtype=torch.int32, device="cpu").to(integers).view(dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (1 << 16,), dtype=integers, generator=generator, device="cpu").view(dtype)
