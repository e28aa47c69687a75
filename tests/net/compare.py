"""Compares the records of two sides.

Knows: nested dictionaries. Does not know: their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]  # of one check: nested dictionaries whose leaves are texts and numbers
MISSING = "nothing"
ERROR = "error"  # the key under which a side records its failure


def differences(old: Mapping[str, Record], new: Mapping[str, Record]) -> list[str]:
    """Return a line for each check that differs or failed, in the order of the checks."""
    lines = []
    for check in dict.fromkeys([*old, *new]):
        line = difference(old.get(check, {}), new.get(check, {}))
        if line:
            lines.append(f"{check}: {line}")
    return lines


def difference(old: Record, new: Record) -> str:
    """Return the first difference between two records of a check, the number of differences, and which values differ.

    The text is empty if the records are equal and no side failed.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    found = [path for path in dict.fromkeys([*before, *after]) if before.get(path) != after.get(path)]
    if found:
        first = found[0]
        values = " -> ".join(_shortened(side.get(first, MISSING)) for side in (before, after))
        named = ", ".join([*dict.fromkeys(path[-1] for path in found)][:12])
        return f"{', '.join(first)}: {values} ({len(found)} of {len(before)} values differ: {named})"
    if (ERROR,) in before:
        return f"both sides fail: {before[ERROR,]}"
    return "" if before else "nothing was recorded"


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _leaves(inside, (*path, str(key)))
    elif isinstance(value, list):
        yield from _leaves(dict(enumerate(value)), path)
    else:
        yield path, value


def _shortened(value: Any) -> str:
    """Shorten a hash to its beginning."""
    text = str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text
