"""Straight lines through measured times: a fixed cost, a cost for each unit, and a bend if one line does not fit.

    seconds = fixed + slope · x                              one line
    seconds = fixed + slope · x + more · max(0, x − bend)    two, which meet at a measured x

The fit minimizes the squares of the relative residuals: times span decades, and plain least squares would fit only the
largest.

Knows: points. Does not know: what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MISS = 0.10  # one line is enough if its largest relative residual is at most this
GAIN = 0.25  # two lines must reduce the sum of squares to at most this share


@dataclass(frozen=True)
class Line:
    """A line with at most one bend.

    ``fixed``: the value at x = 0. ``slope``: up to ``bend``; ``beyond``: the slope after it. ``bend`` is None if the
    line is straight. ``miss``: the largest relative residual.
    """

    fixed: float
    slope: float
    bend: float | None
    beyond: float
    miss: float

    def at(self, x: float) -> float:
        past = 0.0 if self.bend is None else max(0.0, x - self.bend)
        return self.fixed + self.slope * x + (self.beyond - self.slope) * past


Values = npt.NDArray[np.floating[Any]]


def _solve(columns: Sequence[Values], seconds: Values) -> tuple[Values, Values]:
    """Return the coefficients and the relative residuals."""
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    coefficients: Values = np.linalg.lstsq(matrix, np.ones_like(seconds), rcond=None)[0]
    return coefficients, matrix @ coefficients - 1


def fit(xs: Sequence[float], seconds: Sequence[float]) -> Line | None:
    """Fit a line, with a bend if that fits much better. Return None if there are fewer than two different x."""
    if len(set(xs)) < 2:
        return None
    x, y = np.array(xs, dtype=np.float64), np.array(seconds, dtype=np.float64)
    flat, straight = _solve([np.ones_like(x), x], y)
    line = Line(float(flat[0]), float(flat[1]), None, float(flat[1]), float(abs(straight).max()))
    if line.miss <= MISS:
        return line
    best, squares = line, GAIN * float(straight @ straight)
    for bend in sorted(set(xs))[1:-1]:
        found, residuals = _solve([np.ones_like(x), x, np.maximum(0, x - bend)], y)
        if len(x) > len(found) and residuals @ residuals <= squares:
            squares = float(residuals @ residuals)
            slopes = float(found[1]), float(found[1] + found[2])
            best = Line(float(found[0]), slopes[0], float(bend), slopes[1], float(abs(residuals).max()))
    return best
