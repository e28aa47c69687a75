"""Compares the records of two sides.

Knows: nested dictionaries. Does not know: their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]  # of one check: nested dictionaries whose leaves are texts and numbers
ERROR = "error"  # the key under which a side records its failure


def differences(old: Mapping[str, Record], new: Mapping[str, Record]) -> list[str]:
    """Return a line for each check that differs or failed, in the order of the checks."""
    told = {check: difference(old.get(check, {}), new.get(check, {})) for check in [*old, *new]}
    return [f"{check}: {line}" for check, line in told.items() if line]


def difference(old: Record, new: Record) -> str:
    """Return the first difference between two records of a check, the number of differences, and which values differ.

    The text is empty if the records are equal and no side failed.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    found = [path for path in dict.fromkeys([*before, *after]) if before.get(path) != after.get(path)]
    if found:
        values = " -> ".join(_shortened(str(side.get(found[0], "nothing"))) for side in (before, after))
        named = ", ".join([*dict.fromkeys(path[-1] for path in found)][:12])
        return f"{', '.join(found[0])}: {values} ({len(found)} of {len(before)} values differ: {named})"
    if (ERROR,) in before:
        return f"both sides fail: {before[ERROR,]}"
    return "" if before else "nothing was recorded"


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inside in value.items():
        yield from _leaves(inside, (*path, str(key)))


def _shortened(text: str) -> str:
    """Shorten a hash to its beginning."""
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
