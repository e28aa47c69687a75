"""The grain of a parameter: where ranks may cut it, whether a piece is stepped by itself, and in which shape.

    grain       cut                                          a piece is stepped       in the shape
    BY_ELEMENT  anywhere, at multiples of 64 bytes           with its neighbours      1-D
    BY_BLOCK    between blocks of `CUT_EVERY` elements       by itself                1-D
    stacked     between the matrices of a stack              by itself, by one rank   of the matrix
    WHOLE       nowhere                                      by itself, by one rank   of the parameter

Knows: shapes and numbers of elements. Does not know: parameters, buckets, ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Literal

CUT_EVERY = 1 << 12  # elements: a multiple of the blocks of 8-bit and 4-bit classes, and the least that they quantize
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Grain:
    """A row of the table above.

    Attributes:
        unit: what is never cut.
        stack: the shape of each matrix of a stack, in the order of memory; empty for other grains.
    """

    unit: Literal["element", "block", "matrix", "parameter"]
    stack: Shapes = ()

    @property
    def alone(self) -> bool:
        """Whether a piece is stepped by itself: no run has elements of this parameter and of another one."""
        return self.unit != "element"

    @property
    def divided(self) -> bool:
        """Whether several ranks may step pieces of it, each by itself."""
        return self.unit in ("block", "matrix")

    def owned(self, shape: tuple[int, ...]) -> Shapes:
        """Return the shapes of the parts of a parameter of which each has one owner, in the order of memory."""
        return (shape,) if self.unit == "parameter" else self.stack

    def begins(self) -> list[int]:
        """Return the first element of each matrix of a stack, and the number of elements of all."""
        return [*itertools.accumulate(map(math.prod, self.stack), initial=0)]

    def number(self, begin: int) -> int:
        """Return the number of the matrix that begins at this element."""
        return bisect.bisect_left(self.begins(), begin)

    def __str__(self) -> str:
        """Return the text that ranks compare."""
        text = {"parameter": " whole", "block": " blocks"}.get(self.unit, "")
        return f"{text} stack {list(self.stack)}" if self.stack else text


BY_ELEMENT, BY_BLOCK, WHOLE = Grain("element"), Grain("block"), Grain("parameter")


def stacked(stack: Shapes) -> Grain:
    """Return the grain of a stack of matrices of these shapes; `BY_ELEMENT` if there are none."""
    return Grain("matrix", stack) if stack else BY_ELEMENT
