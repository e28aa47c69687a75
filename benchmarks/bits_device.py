"""Do this library's own operations have the same bits on a device as on the CPU?

Its tests compare a sharded training with the plain loop on one device. If a device has the CPU's bits, what the tests
show on the CPU holds there, too. A division by a host number is told, and is no error: on CUDA torch multiplies by the
reciprocal, in the plain loop as well.

Knows: the sum in rank order, the exact norm, casts. Does not know: how torch computes them on a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from collectives.algorithms.ordered_sum import DEVICE_BLOCK, ordered_sum
from zero.core.norm import PowerSum

from .bits_job import DTYPES, SHORT, Compared, Tally, awkward, difference, guarded

GROUP = "as on the CPU"
RANKS = (1, 2, 3, 8)
NORMS = (1.0, 2.0, 3.0, math.inf)
DIVISORS = (2.0, 3.0, 6.0, 7.0, 8.0)
WIDE = (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)
SUMS = (*WIDE, (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))  # of contributions, of the sum


def compare(device: torch.device, quick: bool) -> Iterator[Compared]:
    """Yield the rows of all operations."""
    numel = 50_003 if quick else DEVICE_BLOCK + 3  # more than one block, and ragged
    parts: tuple[tuple[str, bool, Callable[[], Iterator[Compared]]], ...] = (
        ("ordered_sum", True, lambda: _sums(device, numel)),
        ("norm", True, lambda: _norms(device, numel)),
        ("cast", True, lambda: _casts(device)),
        ("div_", False, lambda: _divisions(device, numel)),
    )
    for what, needed, part in parts:
        yield from guarded(GROUP, what, "", needed, part)


def _sums(device: torch.device, numel: int) -> Iterator[Compared]:
    for travels, sums in SUMS:
        tally = Tally()
        for ranks in RANKS:
            parts = [awkward(numel, travels, rank, 10) for rank in range(ranks)]
            found = []
            for where in (torch.device("cpu"), device):
                out = torch.empty(numel, dtype=sums, device=where)
                ordered_sum([part.to(where) for part in parts], out)
                found.append(out)
            tally.add(difference(f"{ranks} ranks", found[1], found[0]))
        yield tally.row(GROUP, f"ordered_sum, {SHORT[travels]} into {SHORT[sums]}", SHORT[sums], True)


def _norms(device: torch.device, numel: int) -> Iterator[Compared]:
    cuts = (0, 16, 16 * (numel // 48), numel)
    for dtype, norm_type in itertools.product((*DTYPES, torch.float64), NORMS):
        values, tally = awkward(numel, dtype, 5, 8), Tally()
        whole = PowerSum.of([values], norm_type)
        there = values.to(device)
        pieces = [there[low:high] for low, high in itertools.pairwise(cuts)]
        for name, found in (("whole", [there]), ("cut", pieces)):
            power_sum = PowerSum.of(found, norm_type)
            equal = power_sum.to_bytes() == whole.to_bytes()
            norms = (power_sum.norm(torch.float64).item(), whole.norm(torch.float64).item())
            tally.add("" if equal else f"{name}: the norm is {norms[0]!r} and not {norms[1]!r}")
        yield tally.row(GROUP, f"norm, p = {norm_type:g}", SHORT[dtype], True)


def _casts(device: torch.device) -> Iterator[Compared]:
    for source, target in itertools.permutations(DTYPES, 2):
        patterns = _patterns(source)
        nan = patterns.isnan()
        for what, values, needed in (("cast", patterns[~nan], True), ("cast of NaN", patterns[nan], False)):
            tally = Tally()
            tally.add(difference(f"{values.numel()} patterns", values.to(device).to(target), values.to(target)))
            yield tally.row(GROUP, f"{what}, from {SHORT[source]}", SHORT[target], needed)


def _patterns(dtype: torch.dtype) -> Tensor:
    """Return all numbers of a 16-bit dtype; of fp32 those beside each number of 16 bits and each tie between two."""
    short = torch.arange(1 << 16, dtype=torch.int32)
    if dtype.itemsize == 2:
        return short.to(torch.int16).view(dtype)
    halves = short << 16  # every number of bf16
    ends = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    near_bf16 = (halves[:, None] | ends).view(-1)
    of_fp16 = short.to(torch.int16).view(torch.float16).float().view(torch.int32)
    steps = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], dtype=torch.int32)
    return torch.cat([near_bf16, (of_fp16[:, None] | steps).view(-1)]).view(dtype)


def _divisions(device: torch.device, numel: int) -> Iterator[Compared]:
    for dtype in DTYPES:
        values = awkward(numel, dtype, 6, 8)
        for divisor in DIVISORS:
            tally = Tally()
            expected = values.clone().div_(divisor)
            tally.add(difference("quotient", values.to(device).div_(divisor), expected))
            yield tally.row(GROUP, f"div_ by {divisor:g}", SHORT[dtype], False)
