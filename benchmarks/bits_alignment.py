"""Does the address of a weight or a bias change the bits of a product?

In this library parameters lie side by side in flat tensors, each in a slot that begins at a multiple of some bytes. The
plain loop's parameters begin where torch's allocator puts them: on a GPU at multiples of 512. A library of products may
choose its algorithm, and so its order of sums, by the alignment of the operands (cuBLASLt does for a product with a
bias).

Knows: shapes, addresses, products, and the boundary of slots.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from zero.core.layout import slot_bytes

from .bits_job import DTYPES, SHORT, Compared, Tally, first_difference, guarded, placed

GROUP = "alignment"
OFFSETS = (64, 128, 256, 512)
PLACES = ("weight", "bias", "both")
ROWS = (1, 3, 16, 77, 128, 512, 2048)
WIDTHS = (1, 8, 30, 64, 100, 128, 257, 512, 768, 1000, 1024, 2560, 3072, 4096, 5000, 11008)
QUICK_ROWS, QUICK_WIDTHS = (1, 7, 32), (1, 8, 33, 64, 100)
Shape = tuple[int, int, int]  # rows of the input, features in, features out


def shapes(count: int, quick: bool) -> list[Shape]:
    """Return ``count`` shapes of products, the same at each call."""
    rows, widths = (QUICK_ROWS, QUICK_WIDTHS) if quick else (ROWS, WIDTHS)
    return random.Random(0).sample(list(itertools.product(rows, widths, widths)), count)


def compare(device: torch.device, count: int, quick: bool) -> Iterator[Compared]:
    """Yield the rows of each dtype."""
    for dtype in DTYPES:
        yield from guarded(
            GROUP, "F.linear", SHORT[dtype], True, partial(_of_dtype, device, dtype, shapes(count, quick))
        )


def _of_dtype(device: torch.device, dtype: torch.dtype, chosen: Sequence[Shape]) -> Iterator[Compared]:
    again, tallies = Tally(), {key: Tally() for key in itertools.product(OFFSETS, PLACES)}
    for shape in chosen:
        product = _Product(device, dtype, shape)
        expected = product.run(0, 0)
        unsteady = product.difference(product.run(0, 0), expected)
        again.add(unsteady)
        if unsteady:
            continue  # it differs from itself: the plain loop has no bits, either
        for (offset, place), tally in tallies.items():
            run = product.run(0 if place == "bias" else offset, 0 if place == "weight" else offset)
            tally.add(product.difference(run, expected))
    yield again.row(GROUP, "F.linear, twice at one address", SHORT[dtype], False)
    for (offset, place), tally in tallies.items():
        what = f"F.linear, {place} at {offset} mod 1024"
        yield tally.row(GROUP, what, SHORT[dtype], offset % slot_bytes(str(device)) == 0)


class _Product:
    """The forward and the backward of one product, with its weight and its bias at chosen addresses."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
        rows, fan_in, fan_out = self._shape = shape
        sizes = ((rows, fan_in), (fan_out, fan_in), (fan_out,), (rows, fan_out))
        generator = torch.Generator(device).manual_seed(0)
        made = [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]
        self._input, self._weight, self._bias, self._gradient = made

    def run(self, weight_at: int, bias_at: int) -> list[Tensor]:
        """Return the output and the gradients. The addresses are in bytes, modulo 1024."""
        leaves = [placed(self._input, 0), placed(self._weight, weight_at), placed(self._bias, bias_at)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        output: Any = functional.linear(*leaves)
        return [output, *torch.autograd.grad(output, leaves, self._gradient)]

    def difference(self, given: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
        names = ["output", "gradient of input", "gradient of weight", "gradient of bias"]
        found = first_difference(names, given, expected)
        rows, fan_in, fan_out = self._shape
        return found and f"{rows} × {fan_in} by {fan_in} × {fan_out}: {found}"
