"""The bugs of ``zoo.csv``, and how each gets into live functions.

Knows: rows of the table. Does not know: how tests run.

A seam is the dotted name of a function. A bug that does not fit its seam any more is stale, which is found when it is
applied, and ends nothing: so a seam is a name, not an import.
"""

from __future__ import annotations

import ast
import csv
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import live, patterns

TABLE = Path(__file__).with_name("zoo.csv")


@dataclass(frozen=True)
class Bug:
    """A bug that some library had, or could have: a row of the table.

    Attributes:
        name: also that of its function in one of ``wrong_*.py``, unless ``change`` makes it.
        published: links to reports, or the library in whose source it was read.
        seam: the function that is wrong.
        change: a pattern and its arguments, such as "drop wait 0".
        killer: the test that must fail, below ``tests/``.
        wrong: the consequence.
    """

    name: str
    published: str
    seam: str
    change: str
    killer: str
    wrong: str


def bugs() -> dict[str, Bug]:
    """Return all bugs, by name."""
    with TABLE.open(newline="") as file:
        return {row["name"]: Bug(**row) for row in csv.DictReader(file)}


def apply(name: str) -> None:
    """Make the bug of this name in the live functions of this process. Raises `StaleError` if it does not fit."""
    made = bugs()[name]
    if made.change:
        live.rewrite(made.seam, pattern_of(made.change))
    else:
        live.replace(made.seam, functions()[name])


def functions() -> dict[str, Any]:
    """Return the functions of ``wrong_*.py``, by the name of their bug."""
    from . import wrong_checkpoints, wrong_devices, wrong_training  # here: they import what they are wrong about

    modules = (wrong_training, wrong_devices, wrong_checkpoints)
    return {name.replace("_", "-"): value for each in modules for name, value in (vars(each) | each.WRONG).items()}


def pattern_of(change: str) -> patterns.Pattern:
    """Return the pattern of a text such as "drop wait 0"."""
    pattern, *arguments = change.split()
    made: patterns.Pattern = getattr(patterns, pattern)(*map(_value, arguments))
    return made


def _value(word: str) -> object:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(word)
    return word
