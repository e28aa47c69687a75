"""Fits the constants of a plan to published runs: Gauss-Newton steps on the absolute relative errors.

The seconds of each row are derived by each constant's logarithm, by a difference. A step solves the linear problem for
least absolute errors by reweighted least squares. A row counts at most `CAP`. Leaving one series out solves the same
linear problem without its rows, and plans its rows again with the constants that result.

Knows: rows, constants. Does not know: scores, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .rows import CountedRow, row_seconds

Values = npt.NDArray[np.floating[Any]]

FITTED: Mapping[str, tuple[float, float]] = {
    "matmul.ampere": (0.4, 0.95),
    "matmul.hopper": (0.4, 0.95),
    "attention.ampere": (0.1, 0.8),
    "attention.hopper": (0.1, 0.8),
    "hidden": (0.0, 2000.0),
    "elementwise": (0.2, 1.0),
    "compiled": (0.1, 1.0),
    "overlap": (0.0, 0.6),
    "fixed": (0.0, 0.2),
}
"""The constants of the planner that are fitted, and the range of each."""
CAP = 0.3  # an error above this moves no constant
_FLOOR = 0.005  # errors below this weigh as if they were this large
_STEP = 0.04  # of a logarithm, for a derivative
_LARGEST = 0.25  # the most that a logarithm changes in a step
_RIDGE = 0.05


def seconds_of(rows: Sequence[CountedRow], constants: Mapping[str, float]) -> Values:
    return np.array([row_seconds(row, constants) for row in rows])


def loss(measured: Values, planned: Values) -> float:
    """Return the mean error of tokens a second, each at most `CAP`, and half of the median."""
    errors = np.abs(measured / planned - 1)
    return float(np.minimum(errors, CAP).mean() + np.median(errors) / 2)


def derivatives(rows: Sequence[CountedRow], constants: Mapping[str, float]) -> tuple[Values, Values]:
    """Return the seconds of each row, and the derivatives of their logarithms by those of the fitted constants."""
    now = seconds_of(rows, constants)
    columns = []
    for name in FITTED:
        changed = {**constants, name: constants[name] * np.exp(_STEP)}
        columns.append((np.log(seconds_of(rows, changed)) - np.log(now)) / _STEP)
    return now, np.stack(columns, axis=1)


def change(slopes: Values, residuals: Values) -> Values:
    """Return the change of the constants' logarithms that leaves the least absolute residuals."""
    moved = np.zeros(slopes.shape[1])
    for _ in range(40):
        left = residuals - slopes @ moved
        weights = np.where(np.abs(left) > CAP, 0.0, 1 / np.maximum(np.abs(left), _FLOOR))
        normal = slopes.T @ (weights[:, None] * slopes) + _RIDGE * np.eye(len(moved))
        moved = np.clip(np.linalg.solve(normal, slopes.T @ (weights * residuals)), -_LARGEST, _LARGEST)
    return np.asarray(moved)


def moved_by(constants: Mapping[str, float], moves: Values) -> dict[str, float]:
    """Return the constants after a change of logarithms, each inside its range."""
    after = dict(constants)
    for name, move in zip(FITTED, moves, strict=True):
        after[name] = float(np.clip(constants[name] * np.exp(move), *FITTED[name]))
    return after


def fit(
    rows: Sequence[CountedRow], measured: Values, constants: Mapping[str, float], steps: int = 4
) -> tuple[dict[str, float], float]:
    """Return fitted constants, and their loss."""
    best, least = dict(constants), float("inf")
    for _ in range(steps):
        now, slopes = derivatives(rows, best)
        least = loss(measured, now)
        move, better = change(slopes, np.log(measured / now)), False
        for share in (1.0, 0.5, 0.2):
            after = moved_by(best, share * move)
            value = loss(measured, seconds_of(rows, after))
            if value < least:
                best, least, better = after, value, True
                break
        print({name: round(best[name], 4) for name in FITTED}, f"loss {least:.4f}", flush=True)
        if not better:
            break
    return best, least


def leave_one_out(
    rows: Sequence[CountedRow], measured: Values, series: Sequence[str], constants: Mapping[str, float]
) -> Values:
    """Return the seconds of each row by the constants that are fitted to the rows of all other series."""
    now, slopes = derivatives(rows, constants)
    residuals: Values = np.log(measured / now)
    planned: Values = now.copy()
    names = np.array(series)
    for name in sorted(set(series)):
        out = names == name
        after = moved_by(constants, change(slopes[~out], residuals[~out]))
        planned[out] = seconds_of([row for row, is_out in zip(rows, out, strict=True) if is_out], after)
    return np.asarray(planned)
