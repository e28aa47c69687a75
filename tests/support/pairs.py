"""Rows that hold each pair of values of several settings, where the product of all would be too many cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Places = dict[str, int]  # the place of a row's value among those of each setting
_Missing = dict[tuple[str, int], set[tuple[str, int]]]  # what each value of a setting did not meet yet
_TRIES = 12  # rows that compete for a place


def pair_rows(
    settings: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, *, most: int | None = None
) -> list[Row]:
    """Return rows, always the same, in which each two values of two settings meet, if an allowed row has them.

    ``most``: return so many, the first ones, which hold most pairs.
    """
    source, numbers = random.Random(0), {name: range(len(values)) for name, values in settings.items()}
    missing: _Missing = {
        (name, place): {(other, j) for other in settings if other != name for j in numbers[other]}
        for name in settings
        for place in numbers[name]
    }
    pairs = [
        ((a, i), (b, j))
        for a, b in itertools.combinations(settings, 2)
        for i, j in itertools.product(numbers[a], numbers[b])
    ]
    found: list[Row] = []
    for pair in sorted(pairs):
        if len(found) == most:
            break
        if pair[1] not in missing[pair[0]]:
            continue
        tries = (_filled(dict(pair), settings, missing, source) for _ in range(_TRIES))
        fitting = [row for each in tries if (row := _mended(each, dict(pair), settings, allowed, source)) is not None]
        missing[pair[0]].discard(pair[1])
        missing[pair[1]].discard(pair[0])
        if fitting:
            best = max(fitting, key=lambda row: sum(len(missing[value] & row.items()) for value in row.items()))
            for value in best.items():
                missing[value] -= best.items()
            found.append(_values(best, settings))
    return found


def _values(row: _Places, settings: Mapping[str, Sequence[Any]]) -> Row:
    return {name: settings[name][place] for name, place in row.items()}


def _filled(row: _Places, settings: Mapping[str, Sequence[Any]], missing: _Missing, source: random.Random) -> _Places:
    """Complete a row: each further setting has a value that meets the most missing pairs."""
    left = [name for name in settings if name not in row]
    source.shuffle(left)
    for name in left:
        places = list(range(len(settings[name])))
        source.shuffle(places)
        known = {*row.items()}
        row[name] = max(places, key=lambda place: len(missing[name, place] & known))
    return {name: row[name] for name in settings}


def _mended(
    row: _Places,
    pair: _Places,
    settings: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    source: random.Random,
) -> _Places | None:
    """Return a row that is allowed, with the first values of some settings outside the pair if need be."""
    others = [name for name in row if name not in pair]
    source.shuffle(others)
    for name in (None, *others):
        row = row if name is None else {**row, name: 0}
        if allowed(_values(row, settings)):
            return row
    return None
