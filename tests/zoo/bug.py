"""The bugs of ``zoo.csv``, and how each gets into a live function.

A bug is text of a function, as `ast.unparse` writes it, and what stands there instead. If the function has that text
not exactly once, the bug is stale; without such text, the new one comes first in the function.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from . import live

TABLE = Path(__file__).with_name("zoo.csv")


@dataclass(frozen=True)
class Bug:
    """A bug that some library had, or could have: a row of the table."""

    name: str
    published: str  # links to reports, or the library in whose source it was read
    seam: str  # the dotted name of the function that is wrong
    before: str  # text of the function
    after: str  # what stands there instead
    killer: str  # the test that must fail, below ``tests/``
    wrong: str  # the consequence


def bugs() -> dict[str, Bug]:
    with TABLE.open(newline="") as file:
        return {row["name"]: Bug(**row) for row in csv.DictReader(file)}


def apply(name: str) -> None:
    """Make the bug of this name in the live functions of this process. Raises `StaleError` if it does not fit."""
    made = bugs()[name]
    live.rewrite(made.seam, made.before, made.after)
