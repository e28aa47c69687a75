"""Rows of a parametrized test that the default run takes, and further ones, which `TESTS_ROWS=all` adds.

The first rows are those that show most: three ranks, mixed settings, and each promise of a test's name once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

EVERY = os.environ.get("TESTS_ROWS") == "every"  # also each pair of all values of dials
ALL = EVERY or os.environ.get("TESTS_ROWS") == "all"


def rows(first: Iterable[T], further: Iterable[T]) -> list[T]:
    """Return the first rows, and with ``TESTS_ROWS=all`` the further ones behind them."""
    return [*first, *further] if ALL else list(first)


def without(table: Iterable[T], *further: T) -> list[T]:
    """Return the rows of a table, in its order; those that are named as further ones only with ``TESTS_ROWS=all``."""
    known = list(table)
    assert set(further) <= set(known), f"there is no row {set(further) - set(known)}"
    return [row for row in known if ALL or row not in further]


def only(table: Iterable[T], *first: T) -> list[T]:
    """Return the rows of a table that are named, and with ``TESTS_ROWS=all`` all rows, in its order."""
    known = list(table)
    return without(known, *(row for row in known if row not in first))


def placed(name: str, table: Iterable[T], *first: int) -> list[Any]:
    """Return the rows at these places of a table, or all, with the name and the place of each as its id."""
    import pytest

    return [pytest.param(row, id=f"{name}{place}") for place, row in enumerate(table) if ALL or place in first]


def further_rows(items: Iterable[Any]) -> dict[Any, None]:
    """Return the items of pytest that only ``TESTS_ROWS=all`` runs: rows of a test behind those of its mark `first`."""
    seen: Counter[str] = Counter()
    further: dict[Any, None] = {}
    for item in () if ALL else items:
        mark, name = item.get_closest_marker("first"), item.nodeid.partition("[")[0]
        seen[name] += 1
        if mark is not None and seen[name] > mark.args[0]:
            further[item] = None
    return further
