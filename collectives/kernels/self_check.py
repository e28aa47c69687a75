"""Each kernel beside torch's operators, on values and shapes where they could differ.

Knows: what the kernels promise, said again in operators and Python's integers. Does not know: how they are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from .device_kernels import LIMBS, NORM_TYPES, DeviceKernels

WIDTHS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LENGTHS = (1, 7, 8, 15, 16, 17, 33, 4099, 20011)  # ragged ends, and more than a kernel's chunk
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits, where NaN is NaN: operators differ in its bits.

    Host synchronisation.
    """
    integers = _INTEGERS[a.itemsize]
    return bool(((a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())).all())


def awkward(count: int, dtype: torch.dtype, device: torch.device, seed: int, offset: int = 0) -> Tensor:
    """Return ``count`` values of all magnitudes, with both zeros, subnormals, ties, infinities and NaN among them.

    They begin ``offset`` elements behind an aligned address.
    """
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    values = torch.randn(count, dtype=torch.float64, generator=generator)
    kinds = torch.randint(8, (count,), generator=generator)
    values = torch.where(kinds < 3, values * 2.0 ** torch.randint(-180, 120, (count,), generator=generator), values)
    special = [0.0, -0.0, info.tiny, -info.smallest_normal / 4, info.max, -info.max, 1 + info.eps, 65520.0, 2.0**-25]
    special += [math.inf, -math.inf, math.nan] if seed % 3 == 2 else []
    picked = torch.tensor(special, dtype=torch.float64)[torch.randint(len(special), (count,), generator=generator)]
    values = torch.where(kinds == 7, picked, values)
    if seed % 3 != 2:  # no infinity by conversion either
        values = values.clamp(-info.max, info.max)
    memory = torch.empty(count + offset, dtype=dtype, device=device)
    return memory[offset:].copy_(values.to(dtype))


def first_wrong(kernels: DeviceKernels, device: torch.device) -> str | None:
    """Return the name of the first kernel whose bits are not those of the operators, or None. Waits for the device."""
    checks: dict[str, Callable[[DeviceKernels, torch.device], bool]] = {
        "ordered_sum": sums_agree,
        "norm_limbs": norms_agree,
        "scale": products_agree,
        "follow": masters_agree,
    }
    return next((name for name, agrees in checks.items() if not agrees(kernels, device)), None)


# -- the sum in rank order -------------------------------------------------------------------------------------------


def plain_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Add the parts in their order, each sum rounded to ``out``'s dtype."""
    total = parts[0].to(out.dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def sums(device: torch.device) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield parts and a tensor for their sum: 1 to 9 parts, several dtypes, unaligned starts, a sum in place."""
    for number, (out_type, part_type) in enumerate(product(WIDTHS, WIDTHS)):
        for ranks in (1, 2 + number % 8) if number else (3, 66):  # 66: more than a launch adds
            length = LENGTHS[(number + ranks) % len(LENGTHS)]
            parts = [awkward(length, part_type, device, number + r, (number + r) % 3) for r in range(ranks)]
            out = torch.empty(length + 1, dtype=out_type, device=device)[number % 2 :][:length]
            yield parts, out
            start = awkward(length, out_type, device, number, number % 3)
            yield [start, *parts], start


def sums_agree(kernels: DeviceKernels, device: torch.device) -> bool:
    """Return whether `DeviceKernels.ordered_sum` has the bits of operators."""
    for parts, out in sums(device):
        if kernels.can_sum(parts, out):
            expected = torch.empty_like(out)
            plain_sum(parts, expected)
            kernels.ordered_sum(parts, out)
            if not same(out, expected):
                return False
    return True


# -- the norm --------------------------------------------------------------------------------------------------------


def plain_power_sum(tensors: Sequence[Tensor]) -> tuple[int, bool, bool]:
    """Return the sum of squares in units of 2**-1074 as `DeviceKernels.norm_limbs` promises it, by Python's integers,
    and whether a block's sum is infinite, and NaN."""
    units, infinite, nan = 0, False, False
    for tensor in tensors:
        lanes = torch.nn.functional.pad(tensor.double(), (0, -tensor.numel() % 16)).view(-1, 16).square()
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        for value in lanes.flatten().tolist():  # host synchronisation: the exact sum is an integer of Python
            if math.isfinite(value):
                numerator, denominator = value.as_integer_ratio()
                units += numerator * 2**1074 // denominator
            infinite, nan = infinite or math.isinf(value), nan or math.isnan(value)
    return units, infinite, nan


def plain_norm(units: int, infinite: bool, nan: bool) -> Tensor:
    """Return the 2-norm as 0-dim fp32 on the host."""
    try:
        root = math.sqrt(units / 2**1074)
    except OverflowError:
        root = math.inf
    root = math.nan if nan else math.inf if infinite else root
    return torch.tensor(root, dtype=torch.float64).to(torch.float32)


def gradients(seed: int, device: torch.device) -> list[Tensor]:
    """Return tensors of several lengths and dtypes: of all magnitudes, for 2 with inf and NaN; from 3 of one value."""
    tensors = [awkward(n, t, device, 3 * n, n % 3) for n in LENGTHS for t in sorted(NORM_TYPES, key=str)]
    if seed > 2:
        return [tensor.fill_(seed * 2.0 ** (20 - 20 * seed)) for tensor in tensors]
    bad = [torch.tensor([1.0, value], device=device) for value in (math.inf, math.nan) if seed == 2]
    return [*(tensor.mul_((1.0, 2.0**-60, 1.0)[seed]) for tensor in tensors), *bad]


def roundings() -> list[int]:
    """Return sums of squares whose norm shows how they are rounded to fp64, in units of 2**-1074."""
    half_way = (2**25 + 2**24 + 2) ** 2  # of a number between two of fp32; a last bit more or less of fp64 decides
    tie = (half_way << 1074) + (1 << 1074 + half_way.bit_length() - 54)
    return [0, 1, 1 << 1034, half_way << 1074, tie, tie + 1, tie - 1, (1 << 1200) - 1, (1 << 2098) - 1, 3 << 2097]


def norms_agree(kernels: DeviceKernels, device: torch.device) -> bool:
    """Return whether `norm_limbs` and `clip_factor` have the bits of exact sums and of torch's clip."""
    for seed, copies in product(range(5), (1, 8)):
        tensors = gradients(seed, device)
        limbs = torch.zeros(LIMBS, dtype=torch.int64, device=device)
        kernels.norm_limbs(tensors, limbs)
        *digits, infs, nans = limbs.tolist()  # host synchronisation: a check
        units, infinite, nan = plain_power_sum(tensors)
        if (sum(digit << 32 * place for place, digit in enumerate(digits)), infs > 0, nans > 0) != (
            units,
            infinite,
            nan,
        ):
            return False
        # as if so many ranks had added theirs
        if not _clips_agree(kernels, limbs * copies, plain_norm(units * copies, infinite, nan)):
            return False
    for units in roundings():
        digits = [units >> 32 * place & 0xFFFFFFFF for place in range(LIMBS - 2)]
        limbs = torch.tensor([*digits, 0, 0], dtype=torch.int64, device=device)
        if not _clips_agree(kernels, limbs, plain_norm(units, False, False)):
            return False
    return True


def _clips_agree(kernels: DeviceKernels, limbs: Tensor, norm: Tensor) -> bool:
    for max_norm in (1.0, 0.3, 1e-6, 0.0, math.inf):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        found = torch.stack(kernels.clip_factor(limbs, max_norm))
        if not same(found.cpu(), torch.stack([norm, factor])):  # host synchronisation: a check
            return False
    return True


# -- products and master weights -------------------------------------------------------------------------------------


def products_agree(kernels: DeviceKernels, device: torch.device) -> bool:
    """Return whether `DeviceKernels.scale_` has the bits of a product by a number of the host."""
    for factor in (1.0, 0.3, 1e-30, 2.0**-140, 0.0, math.inf, math.nan):
        number = torch.tensor(factor)
        tensors = [awkward(n, t, device, n, n % 3) for n in LENGTHS for t in WIDTHS]
        expected = [tensor.clone().mul_(number) for tensor in tensors]
        kernels.scale_(tensors, number.to(device))
        if not all(map(same, tensors, expected)):
            return False
    return True


def plain_follow(master: Tensor, param: Tensor) -> None:
    """Take over the elements of a parameter that are not the master weight, rounded."""
    rounded, integers = master.to(param.dtype), _INTEGERS[param.itemsize]
    written = (rounded.view(integers) != param.view(integers)) & ~(rounded.isnan() & param.isnan())
    master.copy_(torch.where(written, param.to(master.dtype), master))


def masters_agree(kernels: DeviceKernels, device: torch.device) -> bool:
    """Return whether `DeviceKernels.follow` has the bits of operators."""
    masters, params = [], []
    for number, (wide, narrow) in enumerate(product(WIDTHS[2:], WIDTHS[:3])):
        for length in LENGTHS:
            master = awkward(length, wide, device, number + length, number % 3)
            param = torch.empty(length + 1, dtype=narrow, device=device)[number % 2 :][:length].copy_(master)
            edited = awkward(length, narrow, device, 3 * length + 2)
            param.copy_(torch.where(torch.arange(length, device=device) % 5 == 3, edited, param))
            if kernels.can_follow(master, param):
                masters.append(master)
                params.append(param)
    expected = [master.clone() for master in masters]
    for master, param in zip(expected, params, strict=True):
        plain_follow(master, param)
    kernels.follow(masters, params)
    return all(map(same, masters, expected))
