"""The bugs of ``zoo.csv``, and how each gets into live functions.

Knows: rows of the table. Does not know: how tests run.

A seam is the dotted name of a function. A bug that does not fit its seam any more is stale, which is found when it is
applied, and ends nothing: so a seam is a name, not an import.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from . import live, patterns

TABLE, ENTRIES = (Path(__file__).with_name(name) for name in ("zoo.csv", "entries.csv"))


@dataclass(frozen=True)
class Bug:
    """A bug that some library had, or could have: a row of the table.

    Attributes:
        name: also that of its function in `wrong_training` or `wrong_checkpoints`, unless ``change`` makes it.
        entry: those that it stands for, of ``entries.csv``, with blanks between them.
        published: links to reports.
        seam: the function that is wrong.
        change: a pattern and its arguments, such as "drop wait 0".
        killer: the test that must fail, below ``tests/``.
        wrong: the consequence.
        seconds: of its test, in the last run of all bugs.
    """

    name: str
    entry: str
    published: str
    seam: str
    change: str
    killer: str
    wrong: str
    seconds: str


def bugs() -> dict[str, Bug]:
    """Return all bugs, by name."""
    with TABLE.open(newline="") as file:
        return {row["name"]: Bug(**row) for row in csv.DictReader(file)}


def entries() -> dict[str, dict[str, str]]:
    """Return the rows of ``entries.csv``: what was published, what was read in a peer's source, what is promised."""
    with ENTRIES.open(newline="") as file:
        return {row["entry"]: row for row in csv.DictReader(file)}


def apply(name: str) -> None:
    """Make the bug of this name in the live functions of this process. Raises `StaleError` if it does not fit."""
    made = bugs()[name]
    if made.change:
        live.rewrite(made.seam, pattern_of(made.change))
        return
    from . import wrong_checkpoints, wrong_training  # here: they import what they are wrong about

    known = vars(wrong_training) | vars(wrong_checkpoints) | wrong_training.WRONG | wrong_checkpoints.WRONG
    live.replace(made.seam, known.get(name) or known[name.replace("-", "_")])


def write(seconds: Mapping[str, float]) -> None:
    """Write the table anew, with the links of the entries and these seconds."""
    known, rows = entries(), bugs()
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(Bug)]
        table.writerow(names)
        for name, each in rows.items():
            links = " ".join(known[entry]["published"] for entry in each.entry.split()).split()
            new = {"published": " ".join(links), "seconds": f"{seconds[name]:.1f}"}
            table.writerow([{**vars(each), **new}[key] for key in names])


def pattern_of(change: str) -> patterns.Pattern:
    """Return the pattern of a text such as "drop wait 0"."""
    pattern, *arguments = change.split()
    made: patterns.Pattern = getattr(patterns, pattern)(*map(_value, arguments))
    return made


def _value(word: str) -> object:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(word)
    return word
