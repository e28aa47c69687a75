"""Rows that hold each pair of values of several settings, where the product of all would be too many cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_TRIES, _PATIENCE = 12, 60  # rows that compete for a place; failed ones after which a pair counts as impossible


def pair_rows(
    settings: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, first: Sequence[Row] = ()
) -> list[Row]:
    """Return rows such that each two values of two settings meet in one of them, the same rows every time.

    ``allowed``: whether a row makes sense; a pair that no such row holds is left out. ``first``: rows to begin with.
    """
    source, names = random.Random(0), list(settings)
    missing = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((a, i) for i in range(len(settings[a]))), ((b, j) for j in range(len(settings[b])))
        )
    }
    places = [{name: list(settings[name]).index(row[name]) for name in names} for row in first]
    for row in places:
        missing.difference_update(itertools.combinations(row.items(), 2))
    while missing:
        pair = min(missing)
        found: list[dict[str, int]] = []
        for _ in range(_PATIENCE):
            row = _filled(dict(pair), settings, missing, source)
            if allowed({name: settings[name][place] for name, place in row.items()}):
                found.append(row)
                if len(found) == _TRIES:
                    break
        missing.discard(pair)
        if found:
            best = max(found, key=lambda row: len(missing.intersection(itertools.combinations(row.items(), 2))))
            places.append(best)
            missing.difference_update(itertools.combinations(best.items(), 2))
    return [{name: settings[name][place] for name, place in row.items()} for row in places]


def name_of(row: Row) -> str:
    """Return a row's values as the name of a case."""
    return ", ".join(f"{name}={value}" for name, value in row.items())


def _filled(
    pair: dict[str, int], settings: Mapping[str, Sequence[Any]], missing: set[Any], source: random.Random
) -> dict[str, int]:
    """Complete a pair to a row: each further setting has a value that meets the most missing pairs, or any value."""
    row = dict(pair)
    left = [name for name in settings if name not in row]
    source.shuffle(left)
    order = list(settings)
    for name in left:
        places = list(range(len(settings[name])))
        source.shuffle(places)
        if source.random() < 0.8:
            row[name] = max(places, key=lambda place: _new(name, place, row, missing, order))
        else:
            row[name] = places[0]
    return {name: row[name] for name in order}


def _new(name: str, place: int, row: dict[str, int], missing: set[Any], order: list[str]) -> int:
    number = order.index(name)
    pairs = (
        ((name, place), known) if number < order.index(known[0]) else (known, (name, place)) for known in row.items()
    )
    return sum(pair in missing for pair in pairs)
