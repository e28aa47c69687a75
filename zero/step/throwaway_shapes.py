"""The shapes of the throw-away parameters with which a class is tried.

Knows: the sizes at which kernels and classes take another path. Does not know: values, steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .throwaway import Placed, Setting

# With AVX-512 torch computes `sigmoid` and `pow` of 128 bytes at once, and of a rest of fewer in another way. Ranks cut
# at multiples of 64 bytes. Throw-away tensors of so many times 64 bytes have such a rest if they are stepped whole, and
# hardly any in pieces, which lie side by side without padding.
RAGGED = (1, 3, 5, 7, 9, 11, 13, 15)
# Torch's kernels for lists of tensors on CUDA take another loop if a length is no multiple of 4 (kILP in
# MultiTensorApply.cuh). Throw-away tensors of so many elements are stepped whole in it, and a half of them is not.
RAGGED_ON_DEVICE = 97
LARGE = 1 << 12  # elements from which on a class may keep its states in 8 bits or fewer
SMALL = 16  # longer sides are shortened: the classes for which this is tried take time with the cube of a side


def placed(settings: Sequence[Setting], dimensions: Sequence[int]) -> list[Placed]:
    """Return, for each of the ``settings``, throw-away parameters of each number of ``dimensions``."""
    small = [(setting, shape) for setting in settings for number in dimensions for shape in _shapes(number, setting)]
    large = [(setting, shape) for setting in settings for shape in large_shapes(setting.shapes)]
    return [*small, *((setting, shape) for setting, shape in large if len(shape) in dimensions)]


def large_shapes(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shape with the most elements, shortened to at most twice `LARGE`; none if it has fewer than `LARGE`.

    Its sides are powers of two: it consists of whole blocks for a class whose states have a scale for each block.
    """
    sides = list(max(shapes, key=math.prod))
    if math.prod(sides) < LARGE:
        return []
    sides = [1 << (side - 1).bit_length() for side in sides]
    while math.prod(sides) > 2 * LARGE:
        sides[sides.index(max(sides))] //= 2
    return [tuple(sides)]


def _shapes(dimensions: int, setting: Setting) -> list[tuple[int, ...]]:
    """Return the shapes of throw-away parameters. All but those of `RAGGED` and of 96 elements have padding after them.

    If the user has matrices, the matrix is larger than the limit below which some classes treat one as small.
    """
    match dimensions:
        case 0:
            return [()]
        case 1:
            on_cpu = setting.device.type == "cpu"
            ragged = [(n * setting.dtypes.alignment,) for n in RAGGED] if on_cpu else [(RAGGED_ON_DEVICE,)]
            return [(96,), *ragged, *([(1,)] if (1,) in setting.shapes else [])]
        case 2:
            return [(131, 137) if setting.matrices else (13, 17)]
        case 3:
            return [(4, 5, 9)]
    return [(4, 5, 3, 3, *[1] * (dimensions - 4))]


def shortened(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape whose long sides are shortened; equal ones stay equal, and a longer one stays the longer one."""
    longer = sorted({size for size in shape if size > SMALL})
    return tuple(SMALL + 1 + longer.index(size) if size > SMALL else size for size in shape)
